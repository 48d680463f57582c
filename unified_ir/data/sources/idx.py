"""IDX, the format of MNIST: two zero bytes, type, rank, big-endian sizes, then the values.

Arrays of all its types and ranks are read, plain or through gzip.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from triplane.proto.errors import Corrupt, InvalidInput, NotFound
from triplane.unified_ir.data.columns import MAX_RANK, Array
from triplane.unified_ir.data.sources.memory import array_table, native
from triplane.unified_ir.data.table import MAX_MEMORY_BYTES, ArrayTable
from triplane.unified_ir.files import bounded
from triplane.unified_ir.files.pixels import TOP

MAX_RATIO: Final = 1100
"""More than gzip can compress by (1032), so a file that announces more is not complete."""
TYPES: Final = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


@dataclass(frozen=True)
class IdxSource:
    """The array of one file as the column x, and the labels beside it as y.

    If the file is named like MNIST's images (`train-images-idx3-ubyte.gz`), its labels are in the
    file with `labels-idx1` for `images-idx3`, which must exist: x is (N, 1, H, W) as stored, y is
    (N,) int64. Any other file is the column x alone, (N, ...) as stored.
    """

    path: str

    def open(self) -> ArrayTable:
        """Read both files into memory. NotFound, InvalidInput or Corrupt."""
        path = Path(self.path)
        x = read_idx(path)
        if not is_idx_images(path):
            return array_table(path, {"x": x})
        beside = labels_beside(path)
        y = read_idx(beside)
        if x.ndim != 3 or y.ndim != 1 or y.dtype.kind not in "iu":
            raise InvalidInput(
                f"{path} holds images (N, H, W) and {beside.name} labels (N,), whole numbers; got "
                f"{x.shape} and {y.dtype}{y.shape}"
            )
        if len(x) != len(y):
            raise InvalidInput(f"{path} has {len(x)} images, {beside.name} has {len(y)} labels")
        pixels = {"x": TOP} if x.dtype == np.uint8 else {}
        return array_table(path, {"x": x[:, None], "y": y.astype(np.int64)}, pixels=pixels)


def is_idx_images(path: Path) -> bool:
    """Return whether the name is that of IDX images, such as `train-images-idx3-ubyte.gz`."""
    return "images" in path.name and "idx3" in path.name


def labels_beside(images: Path) -> Path:
    """Return the labels file of an images file, plain or gzip, whichever exists."""
    name = images.name.replace("images", "labels").replace("idx3", "idx1").removesuffix(".gz")
    for candidate in (images.with_name(name), images.with_name(name + ".gz")):
        if candidate.exists():
            return candidate
    raise NotFound(f"{images} needs its labels beside it, in {name} or {name}.gz")


def read_idx(path: Path) -> Array:
    """Return the array of one file, of at most `MAX_MEMORY_BYTES`, in native byte order."""
    with bounded.inflated(path, limit_bytes=MAX_MEMORY_BYTES) as file:
        zero, kind, rank = struct.unpack(">HBB", bounded.exactly(file, 4, f"{path}: header"))
        if zero != 0 or kind not in TYPES:
            raise Corrupt(
                f"{path} is not an IDX file: it starts with {zero:#06x} and type {kind:#04x}, not "
                f"with two zeros and one of {', '.join(f'{k:#04x}' for k in TYPES)}"
            )
        if not 1 <= rank <= MAX_RANK + 1:
            raise InvalidInput(f"{path} has rank {rank}; 1..{MAX_RANK + 1} are read")
        shape = struct.unpack(f">{rank}I", bounded.exactly(file, 4 * rank, f"{path}: sizes"))
        dtype = np.dtype(TYPES[kind])
        n_bytes = math.prod(shape) * dtype.itemsize
        # Checked first, so that a gzip bomb is not inflated beyond its header.
        if n_bytes > MAX_MEMORY_BYTES:
            raise InvalidInput(
                f"{path} announces {n_bytes} bytes as {dtype}{shape}; {MAX_MEMORY_BYTES} are read"
            )
        # Nor is memory requested for values that a short file cannot hold.
        if n_bytes > MAX_RATIO * path.stat().st_size:
            raise Corrupt(f"{path} announces {n_bytes} bytes, more than it holds; is it complete?")
        values = np.empty(n_bytes, np.uint8)
        bounded.fill(file, values.data, f"{path}: values")
        bounded.ended(file, str(path))
    try:
        return native(values.view(dtype).reshape(shape))
    except ValueError as error:  # no bytes, in sizes that no array can have
        raise Corrupt(f"{path} announces the sizes {shape}: {error}") from error
