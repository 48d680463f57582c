"""Datasets in `numpy.savez` archives, read within limits by `files.npz`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from numpy.typing import NDArray

from triplane.proto.errors import InvalidInput, NotFound
from triplane.unified_ir.data.dataset import Dataset, from_arrays
from triplane.unified_ir.files.images import MAX_IMAGES, check_sizes
from triplane.unified_ir.files.npz import opened_npz
from triplane.unified_ir.files.pixels import TOP

PART_KEYS: Final = (  # the first pair present is the training part; a second pair is held out
    (("x", "y"),),
    (("x_train", "y_train"), ("x_test", "y_test")),
)


def read(path: Path, *, top: int = TOP) -> tuple[Dataset, ...]:
    """Read one dataset from keys `x` and `y`, or two from `x_train` and so on.

    uint8 pixels are divided by `top`; other keys are not read.
    """
    with opened_npz(path) as npz:
        for pairs in PART_KEYS:
            if all(key in npz.names for pair in pairs for key in pair):
                return tuple(
                    from_arrays(npz.array(x, _check_shape), npz.array(y, _check_shape), top=top)
                    for x, y in pairs
                )
    raise NotFound(
        f"{path} needs the arrays x and y (or x_train, y_train, x_test, y_test); it holds "
        f"{', '.join(npz.names[:8]) or 'nothing'}"
    )


def columns(path: Path, keys: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Read the arrays of these keys as they are stored; NotFound names the keys that exist."""
    with opened_npz(path) as npz:
        npz.check(keys)
        return {key: npz.array(key, _check_shape) for key in keys}


def _check_shape(what: str, shape: tuple[int, ...]) -> None:
    if len(shape) == 1 and 0 < shape[0] <= MAX_IMAGES:
        return
    if len(shape) not in {3, 4}:
        raise InvalidInput(f"{what} is (N,), (N, H, W) or (N, C, H, W), got {shape}")
    # Called before any value is inflated.
    check_sizes((shape[0], 1, *shape[1:]) if len(shape) == 3 else shape, what)
