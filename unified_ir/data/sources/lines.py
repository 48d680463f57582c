"""Lines of a text file in UTF-8, of which none may fill the memory."""

from __future__ import annotations

import io
from pathlib import Path
from typing import IO, Final

from triplane.proto.errors import Corrupt, InvalidInput

MAX_LINE_CHARS: Final = 1 << 20
"""Limit for the characters of one row or line."""


class LimitedLines:
    """The lines of an open file, read once. A byte order mark at its start is skipped.

    max_chars: limit for all lines. newline: as of `open`. Raises Corrupt for other encodings and
    InvalidInput beyond a limit, with path and line.
    """

    def __init__(
        self, path: Path, file: IO[bytes], max_chars: int, *, newline: str | None = None
    ) -> None:
        self._path, self._number = path, 0
        self._text = io.TextIOWrapper(file, encoding="utf-8-sig", newline=newline)
        self._max_chars = self._left = max_chars
        self._record_left = MAX_LINE_CHARS

    def start_record(self) -> None:
        """Apply the limit of one row to the lines that follow together."""
        self._record_left = MAX_LINE_CHARS

    def __iter__(self) -> LimitedLines:
        return self

    def __next__(self) -> str:
        try:
            line = self._text.readline(self._record_left + 1)
        except UnicodeDecodeError as error:
            raise Corrupt(
                f"{self._path} is not UTF-8 text behind line {self._number}: {error}; convert it"
            ) from error
        if not line:
            raise StopIteration
        self._number += 1
        self._record_left -= len(line)
        self._left -= len(line)
        if min(self._record_left, self._left) < 0:
            raise InvalidInput(
                f"{self._path}:{self._number}: a row or line has at most {MAX_LINE_CHARS} "
                f"characters, a file {self._max_chars}; split it, or close a quote that is open"
            )
        return line
