"""`triplane registry collect`: remove unused files from the home of a stopped cloud."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from triplane.cloud.cli.text import age, size, table
from triplane.cloud.home import Home, open_database
from triplane.cloud.registry.collecting import Roots, Stored, collect, unwanted
from triplane.cloud.roots import audit_removals, roots_of
from triplane.cloud.store import Database
from triplane.cloud.trust import MetadataRepository
from triplane.proto.blobs import BlobFolder
from triplane.proto.errors import Conflict

ACTOR = "operator at the machine"


def list_unwanted(path: Path, older_than_s: float) -> tuple[dict[str, Any], str]:
    """List the blobs that would be removed."""
    with _open_home(path) as home:
        blobs = asyncio.run(unwanted(*home, older_than_s=older_than_s))
    if not blobs:
        return _record(blobs, removed=False), "nothing to remove"
    rows = [(blob.sha256.hex(), size(blob.size), age(blob.last_s)) for blob in blobs]
    text = table(("SHA256", "SIZE", "LAST USED"), rows)
    return (
        _record(blobs, removed=False),
        f"{text}\n{_sum(blobs)} would be removed; remove them with --yes",
    )


def remove_unwanted(path: Path, older_than_s: float) -> tuple[dict[str, Any], str]:
    """Remove these blobs and record it in the audit log."""
    on_removed = audit_removals(time.time(), ACTOR)
    with _open_home(path) as home:
        removed = asyncio.run(collect(*home, older_than_s=older_than_s, on_removed=on_removed))
    return _record(removed, removed=True), f"{_sum(removed)} removed"


@contextmanager
def _open_home(path: Path) -> Iterator[tuple[Database, BlobFolder, tuple[Roots, ...]]]:
    home = Home(path)
    # Raises if there is no complete cloud, before anything is opened or created.
    home.hosts()
    try:
        database = open_database(home)
    except Conflict as error:
        raise Conflict(
            f"{error}; a running cloud collects by itself, once a day. Stop it to collect now"
        ) from error
    try:
        repository = MetadataRepository(home.metadata, home.keys)
        yield database, BlobFolder(home.blobs), roots_of(repository)
    finally:
        database.close()


def _sum(blobs: Sequence[Stored]) -> str:
    files = "1 file" if len(blobs) == 1 else f"{len(blobs)} files"
    return f"{files}, {size(sum(blob.size for blob in blobs))},"


def _record(blobs: Sequence[Stored], *, removed: bool) -> dict[str, Any]:
    return {
        "removed": removed,
        "bytes": sum(blob.size for blob in blobs),
        "blobs": [asdict(blob) | {"sha256": blob.sha256.hex()} for blob in blobs],
    }
