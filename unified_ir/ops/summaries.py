"""Summaries: extra named results of the function being recorded, for monitoring.

A summary inside nested cells is named after their path, such as `summary/blocks.0/size`; one of the
outermost cell is `summary/size`. No gradient flows through a summary.
"""

from __future__ import annotations

from typing import Final

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.types import ShapeError, float32, uint8
from triplane.unified_ir.ops.recorder import recorder
from triplane.unified_ir.ops.rows.arithmetic.elementwise import clip, floor, is_nan, round_
from triplane.unified_ir.ops.rows.movement.indexing import scatter_elements
from triplane.unified_ir.ops.rows.movement.structure import concat, stop_gradient, where, zeros
from triplane.unified_ir.ops.tensor import Tensor

SUMMARY: Final = "summary/"
"""Prefix of scalars."""
HISTOGRAM: Final = "histogram/"
IMAGE: Final = "image/"
PREFIXES: Final = (SUMMARY, HISTOGRAM, IMAGE)
BINS: Final = 32


def scalar_summary(name: str, x: Tensor) -> None:
    """Add the scalar `x` as the extra result `summary/NAME`."""
    if x.rank:
        raise InvalidInput(f"scalar_summary({name!r}) takes a scalar, got {x.type}; reduce it")
    _effect(SUMMARY, name, stop_gradient(x))


def histogram_summary(name: str, x: Tensor) -> None:
    """Add a histogram of the elements of `x` as the extra result `histogram/NAME`.

    float32[4 + BINS]: smallest, largest, sum, sum of squares, then the number of elements in each
    of BINS bins of equal width from smallest to largest (exact below 2^24). NaN is in the first
    bin.
    """
    if not x.dtype.is_float:
        raise InvalidInput(f"histogram_summary({name!r}) takes floating point, got {x.type}")
    flat = stop_gradient(x).cast(float32).reshape(-1)
    low, high = -(-flat).max(), flat.max()
    share = (flat - low) / where(high > low, high - low, 1.0)
    # The largest element would fall into bin BINS, and NaN into no bin; casting NaN is undefined.
    place = clip(floor(where(is_nan(share), 0.0, share) * float(BINS)), 0.0, BINS - 1.0)
    empty = zeros((BINS,), float32)
    counts = scatter_elements(empty, place.cast("int64"), flat * 0.0 + 1.0, axis=0, reduction="add")
    moments = [v.reshape(1) for v in (low, high, flat.sum(), (flat * flat).sum())]
    _effect(HISTOGRAM, name, concat([*moments, counts], 0))


def image_summary(name: str, x: Tensor) -> None:
    """Add the picture `x` as the extra result `image/NAME`, uint8 (C, H, W).

    x: (H, W), (C, H, W), or (N, C, H, W), of which the first is used; C: 1 or 3; clipped to 0..1.
    """
    picture = x[0] if x.rank == 4 else x
    if picture.rank == 2:
        picture = picture[None]
    if picture.rank != 3 or picture.shape[0] not in (1, 3) or not x.dtype.is_float:
        raise ShapeError(
            f"image_summary({name!r}) takes float (H, W), (C, H, W) or (N, C, H, W) with 1 or 3 "
            f"channels, got {x.type}"
        )
    levels = round_(clip(stop_gradient(picture), 0.0, 1.0) * 255.0)
    _effect(IMAGE, name, levels.cast(uint8))


def _effect(prefix: str, name: str, x: Tensor) -> None:
    build = recorder()
    build.effect(f"{prefix}{build.scope}/{name}" if build.scope else prefix + name, x)
