"""Arrays of a `numpy.savez` archive, read without numpy's own loader.

Numpy's loader parses the header as a Python literal, inflates whatever the archive holds and, if
asked to, unpickles. Here the header must match a pattern, sizes are checked against limits before a
byte is inflated, and an array of objects is refused like any other array that holds no numbers.
"""

from __future__ import annotations

import math
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray

from triplane.proto.errors import Corrupt, InvalidInput, NotFound, TriplaneError
from triplane.unified_ir.files import bounded

MAX_TOTAL_BYTES: Final = 4 * 2**30  # of all arrays that are read from one file
MAX_DIRECTORY_BYTES: Final = 64 * 2**10  # of the archive's list of members, about a thousand
MAX_ITEM_BYTES: Final = 8
# Errors of `zipfile` on a damaged archive; NotImplementedError: an unusual compression method.
DAMAGE: Final = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    NotImplementedError,
    RuntimeError,
    OSError,
    ValueError,  # also of sizes that no array can have
    OverflowError,
    struct.error,
)
END: Final = struct.Struct("<4sHHHHIIH")  # the zip format's end record, without a comment
LOCATOR_BYTES: Final = 20
PREAMBLE: Final = struct.Struct("<6sBBH")
# At most 20 digits per size: enough for 64 bits, and conversion takes O(n^2) in the digits.
HEADER: Final = re.compile(
    r"\{ *'descr': *'(?P<descr>[<>|=][a-zA-Z]\d{0,2})', *'fortran_order': *"
    r"(?P<fortran>True|False), *'shape': *\((?P<shape>(?:\d{1,20}, *)*(?:\d{1,20})?)\),? *\} *\n?"
)


@dataclass(slots=True)
class NpzReader:
    """An open archive. names: its arrays, sorted; left_bytes: how many bytes may still be read."""

    path: Path
    archive: zipfile.ZipFile
    names: tuple[str, ...]
    left_bytes: int

    def check(self, keys: Iterable[str]) -> None:
        """Raise NotFound for the first of these names that is absent."""
        for name in keys:
            if name not in self.names:
                present = ", ".join(self.names[:8]) or "nothing"
                raise NotFound(f"{self.path} has no array {name!r}; it holds {present}")

    def array(
        self, name: str, check_shape: Callable[[str, tuple[int, ...]], None] | None = None
    ) -> NDArray[Any]:
        """Return one array as it is stored; NotFound names the arrays that exist.

        check_shape: called with a description of the array and its shape before values are read.
        """
        self.check([name])
        what = f"{self.path}: {name}"
        try:
            with self.archive.open(f"{name}.npy") as member:
                dtype, shape, fortran = _header(member, what)
                if check_shape is not None:
                    check_shape(what, shape)
                n_bytes = math.prod(shape) * dtype.itemsize
                # A zip bomb: a few kilobytes can announce, and inflate to, terabytes.
                if n_bytes > self.left_bytes:
                    raise InvalidInput(
                        f"{what} announces {n_bytes} bytes as {dtype}{shape}; at most "
                        f"{self.left_bytes} bytes are read"
                    )
                data = np.empty(n_bytes, np.uint8)
                bounded.fill(member, data.data, what)
                # Reading to the end also makes `zipfile` compare the member's CRC-32.
                bounded.ended(member, what)
            flat = data.view(dtype)
            # Column order is row order of the transposed array.
            array = flat.reshape(shape[::-1]).T if fortran else flat.reshape(shape)
        except TriplaneError:
            raise
        except DAMAGE as error:
            raise Corrupt(f"{what}: {error}") from error
        self.left_bytes -= n_bytes
        return array


@contextmanager
def opened_npz(
    path: Path,
    *,
    file_bytes: int = bounded.MAX_FILE_BYTES,
    total_bytes: int = MAX_TOTAL_BYTES,
) -> Iterator[NpzReader]:
    """Open an archive of at most `file_bytes`, of which at most `total_bytes` are inflated.

    Raises NotFound, InvalidInput (a limit, or something that numpy.savez does not write) or
    Corrupt.
    """
    with bounded.opened(path, limit_bytes=file_bytes) as file:
        # `zipfile` builds an object for each entry of the directory, so millions of empty members
        # would fill the memory before any limit of ours applies.
        _check_end(path, file)
        try:
            archive = zipfile.ZipFile(file)
        except DAMAGE as error:
            raise Corrupt(f"{path} is not a complete npz file: {error}") from error
        with archive:
            members = {name for name in archive.namelist() if name.endswith(".npy")}
            names = tuple(sorted(name.removesuffix(".npy") for name in members))
            yield NpzReader(path, archive, names, total_bytes)


def _check_end(path: Path, file: IO[bytes]) -> None:
    """Check the list of members against its limit before `zipfile` builds an object for each."""
    tail_bytes = END.size + LOCATOR_BYTES
    size = file.seek(0, 2)
    file.seek(max(0, size - tail_bytes))
    tail = file.read(tail_bytes)
    if len(tail) < END.size or not tail[-END.size :].startswith(b"PK\5\6"):
        raise Corrupt(
            f"{path} is not a complete npz file: no end record in its last {END.size} bytes "
            "(a zip comment is not read: write it with numpy.savez)"
        )
    *_, directory_bytes, _, comment_bytes = END.unpack(tail[-END.size :])
    if comment_bytes or tail.startswith(b"PK\6\7"):
        raise InvalidInput(f"{path} has a comment or zip64 records; write it with numpy.savez")
    if directory_bytes > MAX_DIRECTORY_BYTES:
        raise InvalidInput(
            f"{path} lists its members in {directory_bytes} bytes; "
            f"at most {MAX_DIRECTORY_BYTES} are read"
        )


def _header(member: IO[bytes], what: str) -> tuple[np.dtype[Any], tuple[int, ...], bool]:
    """Return element type, shape and whether columns come first (Fortran's order)."""
    magic, major, _, header_bytes = PREAMBLE.unpack(bounded.exactly(member, PREAMBLE.size, what))
    if magic != b"\x93NUMPY":
        raise Corrupt(f"{what} is not an array in npy format")
    if major != 1:
        raise InvalidInput(f"{what} is npy format {major}; write it with numpy.savez")
    header = bounded.exactly(member, header_bytes, f"{what}: header").decode("latin-1")
    match = HEADER.fullmatch(header)
    if match is None or match["descr"][1] not in "biuf":
        raise InvalidInput(f"{what} is not a plain array of numbers: {header.strip()[:120]!r}")
    try:
        dtype = np.dtype(match["descr"])
    except TypeError as error:
        raise Corrupt(f"{what} has no such type: {match['descr']!r}") from error
    if dtype.itemsize > MAX_ITEM_BYTES:
        raise InvalidInput(
            f"{what} holds {dtype}; numbers of at most {MAX_ITEM_BYTES} bytes are read"
        )
    return dtype, tuple(map(int, re.findall(r"\d+", match["shape"]))), match["fortran"] == "True"
