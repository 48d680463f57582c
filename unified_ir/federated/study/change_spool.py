"""The changes of a round until they are reduced: in memory, and beyond a limit in a file.

So the memory of a simulated round does not grow with the number of its devices.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from tempfile import TemporaryFile
from types import TracebackType
from typing import IO, Any, Final, Self

import numpy as np

from triplane.proto.disk import refusal
from triplane.unified_ir.ir.graph import Array

MAX_BYTES: Final = 1 << 28
"""Bytes of changes that a round keeps in memory."""


class ChangeSpool:
    """Changes that are kept in the order in which they come. Its end deletes the file."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = self._left = max_bytes
        self._file: IO[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            with suppress(OSError):  # it writes what a full disk did not take
                self._file.close()

    def keep(self, change: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return the change, or what reads it from the file; to be read before the spool ends.

        Unavailable: the file cannot be written; NoRoom if the disk is full.
        """
        size = sum(x.nbytes for x in change.values())
        if size <= self._left:
            self._left -= size
            return change
        try:
            return self._stored(change)
        except OSError as error:
            raise refusal(
                error,
                f"the changes of a round take more than {self._max_bytes >> 20} MiB, and a "
                f"temporary file cannot take the rest: {error}; set TMPDIR to a folder with room, "
                "or ask fewer devices in a round",
            ) from error

    def _stored(self, change: Mapping[str, Array]) -> Mapping[str, Array]:
        if self._file is None:
            self._file = TemporaryFile()  # noqa: SIM115 - `__exit__` closes it
        at, offset = {}, self._file.seek(0, os.SEEK_END)
        for name, x in change.items():
            at[name] = offset, x.dtype, x.shape
            offset += self._file.write(x.tobytes())
        self._file.flush()
        return _StoredChange(self._file, at)


class _StoredChange(Mapping[str, Array]):
    """A change in a file: each look at a tensor reads it."""

    def __init__(
        self, file: IO[bytes], at: Mapping[str, tuple[int, np.dtype[Any], tuple[int, ...]]]
    ) -> None:
        self._file, self._at = file, at

    def __getitem__(self, name: str) -> Array:
        offset, dtype, shape = self._at[name]
        self._file.seek(offset)
        content = self._file.read(dtype.itemsize * math.prod(shape))
        return np.frombuffer(content, dtype).reshape(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._at)

    def __len__(self) -> int:
        return len(self._at)
