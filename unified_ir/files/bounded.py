"""Read files that may be hostile: only regular files, and no byte beyond a stated limit."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

from triplane.proto.errors import Corrupt, InvalidInput, NotFound, Unavailable

MAX_FILE_BYTES: Final = 2**30
PIECE_BYTES: Final = 2**20


@contextmanager
def opened(path: Path, *, limit_bytes: int = MAX_FILE_BYTES) -> Iterator[IO[bytes]]:
    """Open a file; refuse one that is missing, not regular, or longer than the limit."""
    try:
        # Opening a named pipe would block until somebody writes to it; a device may have no end.
        regular, size = path.is_file(), path.stat().st_size
    except OSError as error:
        raise NotFound(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise InvalidInput(f"{str(path)!r} is not a file name: {error}") from error
    if not regular:
        raise InvalidInput(f"{path} is not a regular file")
    if size > limit_bytes:
        raise InvalidInput(f"{path} has {size} bytes; at most {limit_bytes} are read")
    try:
        file = path.open("rb")
    except OSError as error:
        raise Unavailable(f"{path} could not be opened: {error.strerror}") from error
    with file:
        yield file


@contextmanager
def inflated(path: Path, *, limit_bytes: int = MAX_FILE_BYTES) -> Iterator[IO[bytes]]:
    """Open a file, through gzip if its name ends in .gz.

    The limit applies to the compressed file; the caller limits what it reads from the stream.
    """
    with opened(path, limit_bytes=limit_bytes) as file:
        if path.suffix != ".gz":
            yield file
            return
        try:
            with gzip.GzipFile(fileobj=file) as stream:
                yield stream  # type: ignore[misc]  # typeshed: GzipFile is no IO, though it reads
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise Corrupt(f"{path} is not a complete gzip file: {error}") from error


def exactly(file: IO[bytes], n_bytes: int, what: str) -> bytes:
    """Read the next `n_bytes`; Corrupt if the file ends before."""
    data = file.read(n_bytes)
    if len(data) != n_bytes:
        raise Corrupt(f"{what}: {n_bytes} bytes announced, {len(data)} present; is it complete?")
    return data


def fill(file: IO[bytes], buffer: memoryview, what: str) -> None:
    """Read the next bytes into a buffer, a piece at a time; Corrupt if the file ends before."""
    at = 0
    while at < len(buffer):
        # In pieces: `read(n)` of a decompressing file may first collect all n bytes in a second
        # buffer.
        piece = file.read(min(PIECE_BYTES, len(buffer) - at))
        if not piece:
            raise Corrupt(f"{what}: {len(buffer)} bytes announced, {at} present; is it complete?")
        buffer[at : at + len(piece)] = piece
        at += len(piece)


def ended(file: IO[bytes], what: str) -> None:
    """Raise Corrupt if there are more bytes than the header announced."""
    if file.read(1):
        raise Corrupt(f"{what}: there are more bytes than announced")
