"""Garbage collection of blobs that nothing references.

A blob is removed only inside the one writer, after checking that no table names it and that nobody
wrote or claimed it recently. A push looks its blobs up again in the same place, and so does
everything else that begins to name a blob (`claim`): either it keeps them, or they have to be
uploaded again. Uploads that are younger than `older_than_s`, finished or not, are kept.
"""

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sqlalchemy import Connection

from triplane.cloud.store import Database
from triplane.proto.blobs import BlobFolder
from triplane.proto.errors import InvalidInput

MIN_AGE_S: Final = 3600.0
"""An upload or a conversion is followed by the row that names it within this time."""

_NAME: Final = re.compile(r"[0-9a-f]{64}")

Roots = Callable[[Connection], set[bytes]]
"""Returns the digests that one part's tables or files name, such as `queries.referenced`."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A file of a blob. last_s: when it was written or claimed last, in seconds since 1970."""

    sha256: bytes
    size: int
    last_s: float


OnRemoved = Callable[[Connection, Sequence[Stored]], None]
"""Called with the removed blobs in the transaction that checked that nothing names them."""


def _nobody(_connection: Connection, _removed: Sequence[Stored]) -> None:
    """Record nothing."""


async def unwanted(
    db: Database,
    blobs: BlobFolder,
    roots: Sequence[Roots],
    *,
    older_than_s: float,
    clock: Callable[[], float] = time.time,
) -> tuple[Stored, ...]:
    """Return the blobs that `collect` would remove now, by name."""
    old = _old_files(blobs, roots, older_than_s, clock())
    return await db.read(lambda connection: _unnamed(connection, roots, old))


async def collect(
    db: Database,
    blobs: BlobFolder,
    roots: Sequence[Roots],
    *,
    older_than_s: float,
    clock: Callable[[], float] = time.time,
    on_removed: OnRemoved = _nobody,
) -> tuple[Stored, ...]:
    """Remove blobs that are old and not in any of `roots`; return what was removed.

    roots: those of every part that stores blobs. A part that is left out loses its blobs.
    """
    until_s = clock() - older_than_s
    # List the folder outside the transaction, which blocks all writers; the few candidates are
    # checked again inside it.
    old = _old_files(blobs, roots, older_than_s, clock())

    def work(connection: Connection) -> tuple[Stored, ...]:
        removed = tuple(
            blob
            for blob in _unnamed(connection, roots, old)
            if all(again.last_s < until_s for again in _files(blobs, blob.sha256))
        )
        for blob in removed:
            # Within the writer: nothing can begin to name the blob between the check and the
            # removal.
            blobs.remove(blob.sha256)
        if removed:
            on_removed(connection, removed)
        return removed

    return await db.write(work)


async def claim(db: Database, blobs: BlobFolder, names: Iterable[bytes]) -> None:
    """Protect blobs from collection for `MIN_AGE_S`, until what names them is published.

    NotFound: a blob is missing; upload it first.
    """
    wanted = sorted(names)

    def work(_: Connection) -> None:
        for name in wanted:
            # The time of the file protects it, so a claim needs no table and no clean-up.
            os.utime(blobs.find(name))

    if wanted:
        await db.write(work)


def _old_files(
    blobs: BlobFolder, roots: Sequence[Roots], older_than_s: float, now_s: float
) -> list[Stored]:
    if older_than_s < MIN_AGE_S or not roots:
        raise InvalidInput(
            f"collection needs the roots of every part and an age of at least {MIN_AGE_S:.0f} s, "
            f"got {len(roots)} roots and {older_than_s} s"
        )
    paths = [*blobs.folder.iterdir(), *blobs.partial.iterdir()]
    names = sorted({path.name for path in paths if _NAME.fullmatch(path.name)})
    each = (list(_files(blobs, bytes.fromhex(name))) for name in names)
    return [
        Stored(files[0].sha256, sum(f.size for f in files), max(f.last_s for f in files))
        for files in each
        # An upload may be adding to the partial file although the complete one is old.
        if files and all(file.last_s < now_s - older_than_s for file in files)
    ]


def _files(blobs: BlobFolder, sha256: bytes) -> Iterator[Stored]:
    """Yield the complete file and the unfinished one, if they exist."""
    for path in (blobs.path(sha256), blobs.partial / sha256.hex()):
        with contextlib.suppress(FileNotFoundError):
            seen = Path(path).stat()
            yield Stored(sha256, seen.st_size, seen.st_mtime)


def _unnamed(
    connection: Connection, roots: Sequence[Roots], old: Sequence[Stored]
) -> tuple[Stored, ...]:
    kept = set[bytes]().union(*(root(connection) for root in roots))
    return tuple(blob for blob in old if blob.sha256 not in kept)
