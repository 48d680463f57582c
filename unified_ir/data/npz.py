"""Arrays of a `numpy.savez` archive, read without numpy's own loader.

That loader evaluates a header, inflates what it finds and, asked to, unpickles. Here the header is
matched by a pattern, sizes are checked against the limits before a byte is inflated, and an object
array is refused like any other type that is no number.
"""

from __future__ import annotations

import math
import re
import struct
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray

from triplane.proto.errors import Corrupt, InvalidInput, NotFound, TriplaneError
from triplane.unified_ir.data import bounded
from triplane.unified_ir.data.dataset import Dataset, from_arrays
from triplane.unified_ir.files.images import MAX_IMAGES, check_sizes
from triplane.unified_ir.files.pixels import TOP

MAX_DIRECTORY_BYTES: Final = 64 * 2**10  # of the archive's list of members, about a thousand
# Errors of `zipfile` on a damaged archive; NotImplementedError: an unusual compression method.
DAMAGE: Final = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    NotImplementedError,
    RuntimeError,
    OSError,
    ValueError,
    struct.error,
)
MAX_ITEM_BYTES: Final = 8
END: Final = struct.Struct("<4sHHHHIIH")  # the zip format's end record, without a comment
LOCATOR_BYTES: Final = 20
PREAMBLE: Final = struct.Struct("<6sBBH")
HEADER: Final = re.compile(
    r"\{'descr': '(?P<descr>[<>|=][a-zA-Z]\d{0,2})', 'fortran_order': (?P<fortran>True|False), "
    r"'shape': \((?P<shape>(?:\d{1,10}, ?)*(?:\d{1,10})?)\), \} *\n"
)


PART_KEYS: Final = (  # the first pair present is the training part; a second pair is held out
    (("x", "y"),),
    (("x_train", "y_train"), ("x_test", "y_test")),
)


def read(path: Path, *, top: int = TOP) -> tuple[Dataset, ...]:
    """Read one dataset from keys `x` and `y`, or two from `x_train` and so on.

    uint8 pixels are divided by `top`; other keys are not read.
    """
    with bounded.opened(path) as file:
        _check_end(path, file)
        with _unzip(path, file) as archive:
            present = set(archive.namelist())
            for pairs in PART_KEYS:
                if all(f"{key}.npy" in present for pair in pairs for key in pair):
                    return tuple(
                        from_arrays(_array(path, archive, x), _array(path, archive, y), top=top)
                        for x, y in pairs
                    )
    names = ", ".join(sorted(present)[:8]) or "nothing"
    raise NotFound(
        f"{path} needs the arrays x and y (or x_train, y_train, x_test, y_test): {names}"
    )


def columns(path: Path, keys: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Read the arrays of these keys as they are stored; NotFound names the keys that exist."""
    with bounded.opened(path) as file:
        _check_end(path, file)
        with _unzip(path, file) as archive:
            present = sorted(set(archive.namelist()))
            missing = [key for key in keys if f"{key}.npy" not in present]
            if missing:
                raise NotFound(f"{path} has no {missing[0]!r}: {', '.join(present[:8])}")
            return {key: _array(path, archive, key) for key in keys}


def _check_end(path: Path, file: IO[bytes]) -> None:
    """Check the list of members against its limit before `zipfile` builds an object for each."""
    tail_bytes = END.size + LOCATOR_BYTES
    size = file.seek(0, 2)
    file.seek(max(0, size - tail_bytes))
    tail = file.read(tail_bytes)
    if len(tail) < END.size or not tail[-END.size :].startswith(b"PK\5\6"):
        raise Corrupt(
            f"{path} is not a complete npz file: no end record in its last {END.size} bytes"
        )
    *_, directory_bytes, _, comment_bytes = END.unpack(tail[-END.size :])
    if comment_bytes or tail.startswith(b"PK\6\7"):
        raise InvalidInput(f"{path} has a comment or zip64 records; write it with numpy.savez")
    if directory_bytes > MAX_DIRECTORY_BYTES:
        raise InvalidInput(
            f"{path} lists its members in {directory_bytes} bytes; "
            f"at most {MAX_DIRECTORY_BYTES} are read"
        )


def _unzip(path: Path, file: IO[bytes]) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(file)
    except DAMAGE as error:
        raise Corrupt(f"{path} is not a complete npz file: {error}") from error


def _array(path: Path, archive: zipfile.ZipFile, key: str) -> NDArray[Any]:
    what = f"{path}: {key}"
    try:
        with archive.open(f"{key}.npy") as member:
            return _parse(what, member)
    except TriplaneError:
        raise
    except DAMAGE as error:
        raise Corrupt(f"{what}: {error}") from error


def _parse(what: str, member: IO[bytes]) -> NDArray[Any]:
    magic, major, _, header_bytes = PREAMBLE.unpack(bounded.exactly(member, PREAMBLE.size, what))
    if magic != b"\x93NUMPY" or major != 1:
        raise Corrupt(f"{what} is not an array in npy format 1")
    header = bounded.exactly(member, header_bytes, f"{what}: header").decode("latin-1")
    match = HEADER.fullmatch(header)
    if match is None or match["descr"][1] not in "biuf":
        raise InvalidInput(f"{what} is not a plain array of numbers: {header.strip()[:120]!r}")
    try:
        dtype = np.dtype(match["descr"])
    except TypeError as error:
        raise Corrupt(f"{what} has no such type: {match['descr']!r}") from error
    if dtype.itemsize > MAX_ITEM_BYTES:  # pixels are counted, and these would take 4 GiB
        raise InvalidInput(
            f"{what} holds {dtype}; numbers of at most {MAX_ITEM_BYTES} bytes are read"
        )
    shape = tuple(map(int, re.findall(r"\d+", match["shape"])))
    _check_shape(what, shape)
    n_bytes = math.prod(shape) * dtype.itemsize
    flat = np.frombuffer(bounded.exactly(member, n_bytes, what), dtype=dtype)
    bounded.ended(member, what)
    return flat.reshape(shape[::-1]).T if match["fortran"] == "True" else flat.reshape(shape)


def _check_shape(what: str, shape: tuple[int, ...]) -> None:
    if len(shape) == 1 and 0 < shape[0] <= MAX_IMAGES:
        return
    if len(shape) not in {3, 4}:
        raise InvalidInput(f"{what} is (N,), (N, H, W) or (N, C, H, W), got {shape}")
    check_sizes((shape[0], 1, *shape[1:]) if len(shape) == 3 else shape, what)
