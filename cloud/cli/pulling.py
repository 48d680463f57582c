"""`triplane registry pull`: download a version's model file, verified, whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from triplane.cloud.cli.connection import Calls
from triplane.cloud.cli.progress import reported
from triplane.cloud.cli.text import record
from triplane.proto.blobs import BlobFolder
from triplane.proto.disk import OS_DISK
from triplane.proto.errors import Conflict
from triplane.proto.registry_pb2 import GetVersionRequest
from triplane.proto.transfer import download


def pull_file(cloud: Calls, *, reference: str, out: Path | None) -> tuple[dict[str, Any], str]:
    """Download to `out`, or NAME-VERSION.tpm; the next call continues an interrupted download.

    Conflict: that file exists already.
    """
    version = cloud.registry.GetVersion(GetVersionRequest(reference=reference))
    path = out or Path(f"{version.model}-{version.version}.tpm")
    if path.exists():
        raise Conflict(f"{path} exists already; name another file with --out")
    # Beside the target, on the same file system, so that the finished file can be renamed to it.
    parts = BlobFolder(path.parent / f".{path.name}.parts")
    with reported(cloud.output, f"downloading {path.name}") as progress:
        blob = download(cloud.channel, version.blob, version.size, parts, progress)
    OS_DISK.replace(blob, path)
    OS_DISK.sync_folder(path.parent)
    for folder in (parts.partial, parts.folder):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    return record(version) | {"file": str(path)}, f"{path}: {version.model}@{version.version}"
