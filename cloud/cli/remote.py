"""The cloud as a source for signing, over gRPC: metadata, versions, bundles, files."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from triplane.cloud.cli.connection import Calls
from triplane.cloud.cli.pushing import wait_for_bundle
from triplane.cloud.trust.repository import Pending, Submitted
from triplane.cloud.trust.roles import Lists
from triplane.proto.blobs import BlobFolder
from triplane.proto.errors import Corrupt
from triplane.proto.messages import value_from
from triplane.proto.metadata_pb2 import GetPendingRequest, GetRequest, SubmitRequest
from triplane.proto.registry_pb2 import Bundle, GetVersionRequest, Version
from triplane.proto.status import remote_errors
from triplane.proto.transfer import download
from triplane.proto.transfer_pb2 import DownloadRequest
from triplane.proto.transfer_pb2_grpc import TransferStub


class Remote:
    """See `triplane.cloud.trust.signing.ReleaseSource`. files: where downloads are kept."""

    def __init__(self, cloud: Calls, files: BlobFolder) -> None:
        self._cloud, self._files = cloud, files

    def get(self, name: str, /) -> bytes:
        """Return one published metadata file."""
        with remote_errors():
            return self._cloud.metadata.Get(GetRequest(name=name)).metadata

    def pending(self, role: str, /) -> Pending:
        """Return the version that the next signer adds a signature to."""
        with remote_errors():
            response = self._cloud.metadata.GetPending(GetPendingRequest(role=role))
        return value_from(Pending, response)

    def submit(self, role: str, data: bytes, auto: Lists = Lists.CARRIED, /) -> Submitted:
        """Submit a version with this signer's signatures."""
        with remote_errors():
            drop = auto is Lists.DROPPED
            request = SubmitRequest(role=role, metadata=data, drop_auto=drop)
            response = self._cloud.metadata.Submit(request)
        return value_from(Submitted, response)

    def version(self, reference: str, /) -> Version:
        """Return a registered version."""
        with remote_errors():
            return self._cloud.registry.GetVersion(GetVersionRequest(reference=reference))

    def bundle(self, reference: str, target: str, /) -> Bundle:
        """Return its bundle for a target; waits while it is converted."""
        return wait_for_bundle(self._cloud, reference, target)

    def blob(self, sha256: bytes, size: int | None, /) -> Path:
        """Download the file of that digest and verify it; return where it is."""
        with remote_errors():
            length = size if size is not None else _length(self._cloud, sha256)
        return download(self._cloud.channel, sha256, length, self._files)


def _length(cloud: Calls, sha256: bytes) -> int:
    """Return the size that the first chunk announces; the digest of the file is verified later."""
    call = TransferStub(cloud.channel).Download(DownloadRequest(sha256=sha256))
    # The service has no call for a size; a download announces it in its first chunk.
    first = next(iter(call), None)
    call.cancel()
    if first is None:
        raise Corrupt(f"blob {sha256.hex()} is empty")
    return first.size


@contextlib.contextmanager
def remote_at(cloud: Calls) -> Iterator[Remote]:
    """Give a `Remote` whose downloads are removed at the end."""
    with tempfile.TemporaryDirectory(prefix="triplane-sign-") as folder:
        yield Remote(cloud, BlobFolder(Path(folder)))
