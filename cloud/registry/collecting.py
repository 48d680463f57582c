"""Garbage collection of blobs that nothing names any more.

A blob is removed only inside the one writer, where it is seen that no table names it; a push asks
for its blobs again in the same place, so that it either keeps them or is told to upload them anew.
Uploads that are younger than `older_than_s`, finished or not, are left to whoever sent them.
"""

import re
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

from sqlalchemy import Connection

from triplane.cloud.store import Database
from triplane.proto.errors import InvalidInput
from triplane.proto.transfer import BlobFolder

MIN_AGE_S: Final = 3600.0
"""Nobody takes longer from the end of an upload, or of a conversion, to the row that names it."""

_NAME: Final = re.compile(r"[0-9a-f]{64}")

Roots = Callable[[Connection], set[bytes]]
"""Digests that one part's tables name, such as `queries.referenced`."""


async def collect(
    db: Database,
    blobs: BlobFolder,
    roots: Sequence[Roots],
    *,
    older_than_s: float,
    clock: Callable[[], float] = time.time,
) -> tuple[bytes, ...]:
    """Remove blobs that are old and not in any of `roots`; returns their names.

    roots: of every part that keeps blobs; one that is left out loses them.
    """
    if older_than_s < MIN_AGE_S or not roots:
        raise InvalidInput(
            f"collection needs the roots of every part and an age of at least {MIN_AGE_S:.0f} s, "
            f"got {len(roots)} roots and {older_than_s} s"
        )
    until_s = clock() - older_than_s
    old = [*_old(blobs.folder.iterdir(), until_s), *_old(blobs.partial.iterdir(), until_s)]

    def work(connection: Connection) -> tuple[bytes, ...]:
        kept = set[bytes]().union(*(root(connection) for root in roots))
        unwanted = tuple(dict.fromkeys(name for name in old if name not in kept))
        for name in unwanted:
            blobs.remove(name)
        return unwanted

    return await db.write(work)


def _old(paths: Iterable[Path], until_s: float) -> list[bytes]:
    """Digests of the files last written before `until_s`."""
    return [
        bytes.fromhex(path.name)
        for path in paths
        if _NAME.fullmatch(path.name) and path.is_file() and path.stat().st_mtime < until_s
    ]
