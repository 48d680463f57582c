"""Unsigned bytes as the numbers that a model was trained on: one rule for every plane.

    x / 255 in float32, where an input takes floating point

Training, conversion, devices and nodes all call this, so an image means the same numbers wherever
it is fed. Arrays other than uint8, and those for integer inputs, stay as they are.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

TOP: Final = 255
FLOATS: Final = ("float16", "float32", "float64")


def as_input(
    x: npt.NDArray[Any], dtype: np.dtype[Any] | str, *, top: int = TOP
) -> npt.NDArray[Any]:
    """Return `x` for an input of that element type; a copy where it is scaled.

    top: the byte that means 1.0, where a dataset uses another than 255.
    """
    if x.dtype != np.uint8 or str(dtype) not in FLOATS:
        return x
    scaled = x.astype(np.float32, order="C")
    scaled /= top
    return scaled.astype(dtype, copy=False)
