"""`triplane registry collect`: opens the home of a cloud that is not running."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triplane.cloud.cli.text import age, size, table
from triplane.cloud.home import Home, open_database
from triplane.cloud.registry.collecting import Roots, Stored, collect, unwanted
from triplane.cloud.roots import recorded, roots_of
from triplane.cloud.store import Database
from triplane.cloud.trust import MetadataRepository
from triplane.proto.errors import Conflict
from triplane.proto.transfer import BlobFolder

ACTOR = "operator at the machine"


@dataclass(frozen=True, slots=True)
class _Opened:
    database: Database
    blobs: BlobFolder
    roots: tuple[Roots, ...]


def looked(path: Path, older_than_s: float) -> tuple[dict[str, Any], str]:
    """List the blobs that would be removed."""
    with _opened(path) as home:
        blobs = asyncio.run(
            unwanted(home.database, home.blobs, home.roots, older_than_s=older_than_s)
        )
    rows = [(f.sha256.hex(), size(f.size), age(f.last_s)) for f in blobs]
    text = f"{_sum(blobs)} would go; remove them with --yes" if blobs else "nothing to remove"
    shown = [table(("SHA256", "SIZE", "LAST TOUCHED"), rows)] if blobs else []
    return _record(blobs, removed=False), "\n".join([*shown, text])


def collected(path: Path, older_than_s: float) -> tuple[dict[str, Any], str]:
    """Remove it; the audit log says so."""
    with _opened(path) as home:
        removed = asyncio.run(
            collect(
                home.database,
                home.blobs,
                home.roots,
                older_than_s=older_than_s,
                on_removed=recorded(time.time(), ACTOR),
            )
        )
    return _record(removed, removed=True), f"{_sum(removed)} removed"


@contextmanager
def _opened(path: Path) -> Iterator[_Opened]:
    home = Home(path)
    home.hosts()
    try:
        database = open_database(home)
    except Conflict as error:
        raise Conflict(
            f"{error}; a running cloud collects by itself, once a day. Stop it to collect now"
        ) from error
    try:
        repository = MetadataRepository(home.metadata, home.keys)
        yield _Opened(database, BlobFolder(home.blobs), roots_of(repository))
    finally:
        database.close()


def _sum(blobs: Sequence[Stored]) -> str:
    files = "1 file" if len(blobs) == 1 else f"{len(blobs)} files"
    return f"{files}, {size(sum(f.size for f in blobs))},"


def _record(blobs: Sequence[Stored], *, removed: bool) -> dict[str, Any]:
    return {
        "removed": removed,
        "bytes": sum(f.size for f in blobs),
        "blobs": [{"sha256": f.sha256.hex(), "size": f.size, "last_s": f.last_s} for f in blobs],
    }
