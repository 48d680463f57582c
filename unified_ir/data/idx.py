"""IDX, the format of MNIST: two zero bytes, type, rank, big-endian sizes, then the values.

Supported are unsigned bytes of rank 3 (images) and rank 1 (labels), plain or gzip. The labels are
beside the images under the same name, with `labels-idx1` for `images-idx3`.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from triplane.proto.errors import Corrupt, InvalidInput, NotFound
from triplane.unified_ir.data.dataset import Dataset, from_arrays
from triplane.unified_ir.files import bounded
from triplane.unified_ir.files.images import MAX_IMAGES, check_sizes

UNSIGNED_BYTE: Final = 0x08
OTHER_TYPES: Final = {0x09: "int8", 0x0B: "int16", 0x0C: "int32", 0x0D: "float32", 0x0E: "float64"}


def read(images: Path) -> Dataset:
    """Read the images of one file, with the labels beside it."""
    x = array(images, rank=3)
    y = array(labels_beside(images), rank=1)
    if len(x) != len(y):
        raise InvalidInput(f"{images} has {len(x)} images, its labels file {len(y)}")
    return from_arrays(x, y)


def is_images(path: Path) -> bool:
    """Return whether the name is that of IDX images, such as `train-images-idx3-ubyte.gz`."""
    return "images" in path.name and "idx3" in path.name


def labels_beside(images: Path) -> Path:
    """Return the labels file of an images file, plain or gzip, whichever exists."""
    name = images.name.replace("images", "labels").replace("idx3", "idx1").removesuffix(".gz")
    for candidate in (images.with_name(name), images.with_name(name + ".gz")):
        if candidate.exists():
            return candidate
    raise NotFound(f"{images} needs its labels beside it, in {name} or {name}.gz")


def array(path: Path, *, rank: int) -> NDArray[Any]:
    """Read the array of one file: (N, H, W) or (N,) uint8."""
    with bounded.inflated(path) as file:
        zero, kind, file_rank = struct.unpack(">HBB", bounded.exactly(file, 4, f"{path}: header"))
        if zero != 0:
            raise Corrupt(
                f"{path} is not an IDX file: it starts with {zero:#06x}, not with two zeros"
            )
        if kind != UNSIGNED_BYTE:
            name = OTHER_TYPES.get(kind, f"type {kind:#04x}")
            raise InvalidInput(f"{path} holds {name}; only unsigned bytes (type 0x08) are read")
        if file_rank != rank:
            raise InvalidInput(f"{path} has rank {file_rank}; rank {rank} is expected")
        sizes = bounded.exactly(file, 4 * rank, f"{path}: sizes")
        shape = struct.unpack(f">{rank}I", sizes)
        if rank == 3:
            check_sizes((shape[0], 1, *shape[1:]), str(path))
        elif not 0 < shape[0] <= MAX_IMAGES:
            raise InvalidInput(f"{path} announces {shape[0]} labels; 1..{MAX_IMAGES} are read")
        # Bounded by the checks of the shape above, so that a gzip bomb is not inflated beyond its
        # header.
        values = bounded.exactly(file, math.prod(shape), f"{path}: values")
        bounded.ended(file, str(path))
    return np.frombuffer(values, dtype=np.uint8).reshape(shape)
