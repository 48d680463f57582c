"""The header of an array in npy format, read without numpy's own loader.

Numpy's loader parses the header as a Python literal and, if asked to, unpickles. Here the header
must match a pattern, and an array of objects is refused like any other that holds no numbers.
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray

from triplane.proto.errors import Corrupt, InvalidInput
from triplane.unified_ir.files import bounded

MAX_ITEM_BYTES: Final = 8
PREAMBLE: Final = struct.Struct("<6sBBH")
# At most 20 digits per size: enough for 64 bits, and conversion takes O(n^2) in the digits.
HEADER: Final = re.compile(
    r"\{ *'descr': *'(?P<descr>[<>|=][a-zA-Z]\d{0,2})', *'fortran_order': *"
    r"(?P<fortran>True|False), *'shape': *\((?P<shape>(?:\d{1,20}, *)*(?:\d{1,20})?)\),? *\} *\n?"
)


@dataclass(frozen=True, slots=True)
class NpyHeader:
    """What an npy file announces. fortran: columns come first (Fortran's order)."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool
    header_bytes: int

    @property
    def n_bytes(self) -> int:
        """Bytes of the values behind the header."""
        return math.prod(self.shape) * self.dtype.itemsize

    def array(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the bytes of the values, (n_bytes,) uint8, as the array; a view."""
        flat = values.view(self.dtype)
        # Column order is row order of the transposed array.
        return flat.reshape(self.shape[::-1]).T if self.fortran else flat.reshape(self.shape)


def read_header(file: IO[bytes], what: str) -> NpyHeader:
    """Read the header of format 1; what: names the array in errors.

    Raises Corrupt, or InvalidInput for other formats and anything but plain numbers.
    """
    magic, major, _, length = PREAMBLE.unpack(bounded.exactly(file, PREAMBLE.size, what))
    if magic != b"\x93NUMPY":
        raise Corrupt(f"{what} is not an array in npy format")
    if major != 1:
        raise InvalidInput(f"{what} is npy format {major}; write it with numpy.save or numpy.savez")
    header = bounded.exactly(file, length, f"{what}: header").decode("latin-1")
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
    shape = tuple(map(int, re.findall(r"\d+", match["shape"])))
    return NpyHeader(dtype, shape, match["fortran"] == "True", PREAMBLE.size + length)
