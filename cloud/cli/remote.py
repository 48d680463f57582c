"""The cloud as signing sees it, over the wire: metadata, versions, bundles, files."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from triplane.cloud.cli.connection import Calls
from triplane.cloud.cli.pushing import wait_for_bundle
from triplane.cloud.trust.repository import Pending, Submitted
from triplane.proto.errors import Corrupt
from triplane.proto.metadata_pb2 import GetPendingRequest, GetRequest, SubmitRequest
from triplane.proto.registry_pb2 import Bundle, GetVersionRequest, Version
from triplane.proto.status import remote_errors
from triplane.proto.transfer import BlobFolder, download
from triplane.proto.transfer_pb2 import DownloadRequest
from triplane.proto.transfer_pb2_grpc import TransferStub


class Remote:
    """See `triplane.cloud.trust.signing.ReleaseSource`. files: where downloads are kept."""

    def __init__(self, cloud: Calls, files: BlobFolder) -> None:
        self._cloud, self._files = cloud, files

    def get(self, name: str, /) -> bytes:
        """One published metadata file."""
        with remote_errors():
            return self._cloud.metadata.Get(GetRequest(name=name)).metadata

    def pending(self, role: str, /) -> Pending:
        """Return the version that the next signer starts from."""
        with remote_errors():
            response = self._cloud.metadata.GetPending(GetPendingRequest(role=role))
        return Pending(
            response.metadata, response.published, response.signatures, response.threshold
        )

    def submit(self, role: str, data: bytes, /) -> Submitted:
        """Hand over a version with this signer's signatures."""
        with remote_errors():
            response = self._cloud.metadata.Submit(SubmitRequest(role=role, metadata=data))
        return Submitted(
            response.published, response.signatures, response.threshold, response.version
        )

    def version(self, reference: str, /) -> Version:
        """A registered version."""
        with remote_errors():
            return self._cloud.registry.GetVersion(GetVersionRequest(reference=reference))

    def bundle(self, reference: str, target: str, /) -> Bundle:
        """Its bundle for a target; waits while it is converted."""
        return wait_for_bundle(self._cloud, reference, target)

    def blob(self, sha256: bytes, size: int | None, /) -> Path:
        """A file of that digest, verified."""
        with remote_errors():
            length = size if size is not None else _length(self._cloud, sha256)
        return download(self._cloud.channel, sha256, length, self._files)


def _length(cloud: Calls, sha256: bytes) -> int:
    """The size that the first chunk announces; the digest of the whole is verified later."""
    call = TransferStub(cloud.channel).Download(DownloadRequest(sha256=sha256))
    first = next(iter(call), None)
    call.cancel()
    if first is None:
        raise Corrupt(f"blob {sha256.hex()} is empty")
    return first.size


@contextlib.contextmanager
def remote_at(cloud: Calls) -> Iterator[Remote]:
    """Keeps downloads in a folder that goes at the end."""
    with tempfile.TemporaryDirectory(prefix="triplane-sign-") as folder:
        yield Remote(cloud, BlobFolder(Path(folder)))
