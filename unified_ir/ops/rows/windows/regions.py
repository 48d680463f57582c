"""Pooling over regions of interest: boxes in image coordinates, each to a plane of fixed size."""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.dims import product
from triplane.unified_ir.ir.types import ShapeError, TensorType, int64
from triplane.unified_ir.ops.row import Op, OpCall, OpKind
from triplane.unified_ir.ops.rows.arithmetic.elementwise import (
    ceil,
    floor,
    maximum,
    minimum,
    round_,
)
from triplane.unified_ir.ops.rows.movement.indexing import arange, gather, range_row
from triplane.unified_ir.ops.rows.movement.structure import size_of, slice_axis, where
from triplane.unified_ir.ops.rows.windows.sampling import rows_of
from triplane.unified_ir.ops.samples import computed, normal, sample
from triplane.unified_ir.ops.tensor import Tensor, dims_of

_AXES: Final = (("output_height", 1, 3), ("output_width", 0, 2))
"""Attribute of the output size, columns of start and end in a box, for y and for x."""


def _align_types(call: OpCall) -> tuple[TensorType]:
    x, rois, batch, attrs = call.type(0), call.type(1), call.type(2), call.attrs
    if x.rank != 4 or rois.shape[1:] != (4,) or batch.shape != rois.shape[:1]:
        raise ShapeError(
            f"RoiAlign takes x: (N, C, H, W), rois: (R, 4) and batch indices: (R), got {x}, {rois}"
            f" and {batch}"
        )
    if min(attrs["output_height"], attrs["output_width"]) < 1 or attrs["sampling_ratio"] < 0:
        raise InvalidInput(
            f"RoiAlign takes output sizes of at least 1 and a sampling ratio of at least 0, got "
            f"{attrs['output_height']}, {attrs['output_width']}, {attrs['sampling_ratio']}"
        )
    if attrs["mode"] not in ("avg", "max"):
        raise InvalidInput(f"RoiAlign has the modes avg and max, got {attrs['mode']!r}")
    plane = (attrs["output_height"], attrs["output_width"])
    return (x.with_shape((rois.shape[0], x.shape[1], *plane)),)


def _column(rois: Tensor, k: int) -> Tensor:
    """Return column `k` of (R, ...) as (R, 1, 1)."""
    return slice_axis(rois, 1, k, k + 1).reshape((rois.shape[0], 1, 1))


def _samples(
    rois: Tensor, axis: int, attrs: Any, size: Any, count: Tensor | None
) -> tuple[list[tuple[Tensor, Tensor]], Tensor, Tensor]:
    """Return along one axis (position, weight) of both neighbours, and the samples per box.

    Positions are (R, P, S) for P bins of S samples; samples beyond a box's own number, and those
    beyond the image, have weight 0. Last, (R, 1, S): which are within the box's own number.
    """
    name, first, last = _AXES[axis]
    bins, ratio = int(attrs[name]), int(attrs["sampling_ratio"])
    half = 0.5 if attrs["coordinate_transformation_mode"] == "half_pixel" else 0.0
    scale = float(attrs["spatial_scale"])
    start = _column(rois, first) * scale - half
    extent = _column(rois, last) * scale - half - start
    # ONNX enlarges boxes below one pixel only without half pixels.
    if not half:
        extent = maximum(extent, 1.0)
    width = extent / float(bins)
    if count is None:
        own = width * 0.0 + float(max(ratio, 1))
        sample_number = np.arange(max(ratio, 1), dtype=rois.dtype.numpy)
        number = rois.build.as_operand(sample_number).reshape((1, 1, -1))
    else:
        own = maximum(ceil(width), 1.0)
        number = range_row(0, count, 1).cast(rois.dtype)
        number = number.reshape((1, 1, number.shape[0]))
    bin_number = np.arange(bins, dtype=rois.dtype.numpy).reshape(1, -1, 1)
    at = start + width * bin_number + (number + 0.5) * width / own
    # Up to one pixel outside, a sample reads the edge; further out it counts as 0.
    seen = ((at >= -1.0) & (at <= size) & (number < own)).cast(rois.dtype)
    held = minimum(maximum(at, 0.0), size - 1.0)
    low = minimum(floor(held), size - 1.0)
    high = minimum(low + 1.0, size - 1.0)
    part = held - low
    return [(low, (1.0 - part) * seen), (high, part * seen)], own, number < own


def _most(rois: Tensor, axis: int, attrs: Any) -> Tensor | None:
    """Return the largest number of samples any box takes along an axis; None if it is fixed."""
    if attrs["sampling_ratio"] > 0:
        return None
    name, first, last = _AXES[axis]
    extent = (_column(rois, last) - _column(rois, first)) * float(attrs["spatial_scale"])
    if attrs["coordinate_transformation_mode"] != "half_pixel":
        extent = maximum(extent, 1.0)
    return maximum(ceil(extent / float(attrs[name])), 1.0).max().cast(int64)


def _roi_align(x: Tensor, rois: Tensor, batch: Tensor, **attrs: Any) -> Tensor:
    """Take the mean (or maximum) of bilinear samples in each bin of each box (He 2017)."""
    r, c = rois.shape[0], x.shape[1]
    ph, pw = int(attrs["output_height"]), int(attrs["output_width"])
    h, w = (size_of([d], x.dtype) for d in x.shape[2:])
    ys, own_y, taken_y = _samples(rois, 0, attrs, h, _most(rois, 0, attrs))
    xs, own_x, taken_x = _samples(rois, 1, attrs, w, _most(rois, 1, attrs))
    sy, sx = ys[0][0].shape[2], xs[0][0].shape[2]
    rows = rows_of(x)
    plane = dims_of([product(list(x.shape[2:]))]).reshape(())
    base = batch.cast(int64).reshape((r, 1, 1, 1, 1)) * plane
    width = dims_of([x.shape[3]]).reshape(())

    def term(y: Tensor, wy: Tensor, z: Tensor, wz: Tensor) -> Tensor:
        line = y.cast(int64).reshape((r, ph, sy, 1, 1)) * width
        index = base + line + z.cast(int64).reshape((r, 1, 1, pw, sx))
        weight = wy.reshape((r, ph, sy, 1, 1, 1)) * wz.reshape((r, 1, 1, pw, sx, 1))
        return gather(rows, index, axis=0) * weight

    terms = (term(*in_y, *in_x) for in_y in ys for in_x in xs)
    # ONNX's mode max takes the maximum of the weighted neighbours, not of the interpolated samples.
    tensor: Tensor = reduce(add if attrs["mode"] == "avg" else maximum, terms)
    if attrs["mode"] == "max":
        taken = taken_y.reshape((r, 1, sy, 1, 1, 1)) & taken_x.reshape((r, 1, 1, 1, sx, 1))
        tensor = where(taken, tensor, np.array(np.finfo(x.dtype.numpy).min, x.dtype.numpy))
        pooled = tensor.max([2, 4])  # (R, PH, PW, C)
    else:
        count = own_y.reshape((r, 1, 1, 1)) * own_x.reshape((r, 1, 1, 1))
        pooled = tensor.sum([2, 4]) / count
    return pooled.transpose(0, 3, 1, 2).reshape((r, c, ph, pw))


_BOXES: Final = [[0.3, 0.2, 3.1, 2.9], [1.2, 0.4, 4.6, 3.3], [0.1, 1.3, 2.2, 3.7]]


def _aligned(**attrs: Any) -> Any:
    operands = (normal(2, 2, 5, 6), computed(_BOXES), computed([0, 1, 1]))
    return sample(*operands, output_height=2, output_width=3, **attrs)


roi_align = Op(
    name="RoiAlign", kind=OpKind.WINDOW,
    infer=_align_types,
    body=_roi_align,
    fixed_sizes="a sampling_ratio, such as 2, in place of 0",
    native=lambda node, opset: opset < 22,
    samples=(
        _aligned(sampling_ratio=2),
        _aligned(sampling_ratio=1, spatial_scale=0.75,
                 coordinate_transformation_mode="output_half_pixel"),
        _aligned(),
        _aligned(sampling_ratio=2, mode="max", smooth=(0,)),
        _aligned(mode="max", smooth=(0,)),
    ),
)  # fmt: skip
"""onnxruntime has a kernel up to opset 21 only."""


def _max_roi_types(call: OpCall) -> tuple[TensorType]:
    x, rois, shape = call.type(0), call.type(1), call.attrs["pooled_shape"]
    if x.rank != 4 or rois.shape[1:] != (5,) or len(shape) != 2 or min(shape) < 1:
        raise ShapeError(
            f"MaxRoiPool takes x: (N, C, H, W), rois: (R, 5), two sizes, got {x}, {rois}, {shape}"
        )
    return (x.with_shape((rois.shape[0], x.shape[1], *shape)),)


def _bin_mask(rois: Tensor, axis: int, bins: int, scale: float, size: Any, n: Any) -> Tensor:
    """Return (R, bins, n): which positions each bin of each box covers."""
    # Corners are rounded to whole positions and inclusive, hence + 1.
    first = round_(_column(rois, 2 - axis) * scale)
    extent = maximum(round_(_column(rois, 4 - axis) * scale) - first + 1.0, 1.0)
    width = extent / float(bins)
    number = np.arange(bins, dtype=rois.dtype.numpy).reshape(1, -1, 1)
    start = minimum(maximum(floor(width * number) + first, 0.0), size)
    end = minimum(maximum(ceil(width * (number + 1.0)) + first, 0.0), size)
    position = arange(n).cast(rois.dtype).reshape((1, 1, n))
    return (position >= start) & (position < end)


def _max_roi_pool(x: Tensor, rois: Tensor, *, pooled_shape: Any, spatial_scale: float) -> Tensor:
    """Take the maximum of each bin; ties share the gradient, empty bins are 0 (Girshick 2015)."""
    r, c, (h, w) = rois.shape[0], x.shape[1], x.shape[2:]
    image = round_(slice_axis(rois, 1, 0, 1).reshape((r,))).cast(int64)
    planes = gather(x, image, axis=0)
    ys = _bin_mask(rois, 0, pooled_shape[0], spatial_scale, size_of([h], x.dtype), h)
    xs = _bin_mask(rois, 1, pooled_shape[1], spatial_scale, size_of([w], x.dtype), w)
    low = np.array(np.finfo(x.dtype.numpy).min, x.dtype.numpy)
    ph, pw = pooled_shape
    # The maximum over a rectangle, first over rows and then over columns, needs no gather.
    in_row = ys.reshape((r, 1, ph, h, 1))
    rows = where(in_row, planes.reshape((r, c, 1, h, w)), low).max([3])
    in_column = xs.reshape((r, 1, 1, pw, w))
    bins = where(in_column, rows.reshape((r, c, ph, 1, w)), low).max([4])
    return where(bins == low, 0.0, bins)


_WHOLE: Final = [[0.0, 0, 0, 3, 3], [1, 1, 0, 5, 4], [1, 2, 2, 2, 2], [0, 4, 4, 9, 9]]

max_roi_pool = Op(
    name="MaxRoiPool", kind=OpKind.WINDOW,
    infer=_max_roi_types,
    body=_max_roi_pool,
    native=lambda node, opset: opset < 22,
    samples=(
        sample(normal(2, 2, 5, 6), computed(_WHOLE), pooled_shape=(2, 3), smooth=(0,)),
        sample(normal(1, 2, 4, 4), computed([[0.0, 0, 0, 6, 7]]), pooled_shape=(2, 2),
               spatial_scale=0.5, smooth=(0,)),
    ),
)  # fmt: skip
"""onnxruntime has a kernel up to opset 21 only."""
