"""Convert unsigned bytes to the numbers that a model was trained on, by one rule everywhere.

    x / 255 in float32, where an input takes floating point

Training, conversion, devices and nodes all call this, so an image becomes the same numbers wherever
it is passed in. Arrays other than uint8, and those for integer inputs, are not changed.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

TOP: Final = 255
FLOATS: Final = ("float16", "float32", "float64")


def as_input(
    x: npt.NDArray[Any], dtype: np.dtype[Any] | str, *, top: int = TOP
) -> npt.NDArray[Any]:
    """Return `x` for an input of that element type; a copy if it is scaled.

    top: the byte that means 1.0, if a dataset uses another value than 255.
    """
    if x.dtype != np.uint8 or str(dtype) not in FLOATS:
        return x
    scaled = x.astype(np.float32, order="C")
    # Divided in float32 whatever the input takes, then converted to its type.
    scaled /= top
    return scaled.astype(dtype, copy=False)
