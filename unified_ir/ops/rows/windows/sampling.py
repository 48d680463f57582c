"""Reading a plane at computed places: grids, deformable windows, columns of patches.

Values between positions are weighted sums of neighbours. Neighbours are gathered as rows of
(N P, C), so the gradient in x is one scatter of rows; that of the places comes from the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from itertools import product as combinations
from operator import add, mul
from typing import Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.dims import Dim, Expr, product
from triplane.unified_ir.ir.graph import Node
from triplane.unified_ir.ir.types import ShapeError, TensorType, int64
from triplane.unified_ir.ops.emission import EmissionContext
from triplane.unified_ir.ops.recorder import recorder
from triplane.unified_ir.ops.row import Known, Op, OpCall, OpKind
from triplane.unified_ir.ops.rows.arithmetic.elementwise import (
    abs_,
    div,
    floor,
    maximum,
    minimum,
    round_,
)
from triplane.unified_ir.ops.rows.movement.indexing import arange, gather
from triplane.unified_ir.ops.rows.movement.structure import (
    axes_of,
    pad_row,
    size_of,
    slice_axis,
    where,
)
from triplane.unified_ir.ops.samples import between, fixed, normal, sample
from triplane.unified_ir.ops.settings import length, settled
from triplane.unified_ir.ops.tensor import Tensor, dims_of

Tap = tuple[Tensor, Tensor | None]
"""A position along one axis, and its weight (None: 1)."""


def rows_of(x: Tensor) -> Tensor:
    """Return the channels of each place as one row: (N, C, *S) -> (N P, C)."""
    flat = x.reshape((x.shape[0], x.shape[1], product(list(x.shape[2:]))))
    return flat.transpose(0, 2, 1).reshape((-1, x.shape[1]))


def inside(position: Tensor, size: Any) -> Tensor:
    """Return 1 where a position is on the axis, else 0."""
    held: Tensor = (position >= 0.0) & (position <= size - 1.0)
    return held.cast(position.dtype)


def weighted_rows(
    rows: Tensor, first: Tensor, sizes: Sequence[Dim], axes: Sequence[Sequence[Tap]]
) -> Tensor:
    """Return weighted sums of rows over every combination of taps: (*T, C).

    first: (*T) int64, the first row of the plane each place lies on; taps: (*T), positions inside.
    """

    def term(taps: Sequence[Tap]) -> Tensor:
        index = first
        for i, (position, _) in enumerate(taps):
            # Row-major: the position along an axis counts for all places of the axes after it.
            index = index + position.cast(int64) * whole(product(list(sizes[i + 1 :])))
        weights = [w for _, w in taps if w is not None]
        read = gather(rows, index, axis=0)
        if not weights:
            return read
        weight = reduce(mul, weights)
        return read * weight.reshape((*weight.shape, 1))

    return reduce(add, map(term, combinations(*axes)))


def whole(n: Dim) -> Any:
    """Return a size as a number or as a scalar of the graph."""
    return n if isinstance(n, int) else dims_of([n]).reshape(())


def _reflected(x: Tensor, size: Any, *, aligned: bool) -> Tensor:
    """Mirror x at the borders: at corner centres if `aligned`, else at the outer edges."""
    low, span = (0.0, _at_least_1(size - 1.0)) if aligned else (-0.5, size)
    shifted = x - low
    turned = shifted - floor(shifted / (2.0 * span)) * (2.0 * span)
    # A triangle wave of period 2 span between the two borders.
    reflected = span - abs_(turned - span) + low
    return minimum(reflected, size - 1.0) if aligned else reflected


def _at_least_1(x: Any) -> Any:
    return maximum(x, 1.0) if isinstance(x, Tensor) else max(x, 1.0)


def bounded(x: Tensor, size: Any) -> Tensor:
    """Return positions, those beyond the axis moved to its ends."""
    return minimum(maximum(x, 0.0), size - 1.0)


def _place(x: Tensor, size: Any, padding: str, *, aligned: bool) -> Tensor:
    """Return a coordinate; the padding mode says where those beyond the border move."""
    low, high = (0.0, size - 1.0) if aligned else (-0.5, size - 0.5)
    outside = (x < low) | (x > high)
    if padding == "border":
        return where(outside, bounded(x, size), x)
    if padding == "reflection":
        return where(outside, _reflected(x, size, aligned=aligned), x)
    return x


def _pixel(position: Tensor, size: Any, padding: str, *, aligned: bool) -> Tap:
    """Move a whole position onto the axis; return it with the weight the padding mode leaves it."""
    if padding == "zeros":
        return bounded(position, size), inside(position, size)
    if padding == "reflection":
        position = round_(_reflected(position, size, aligned=aligned))
    return bounded(position, size), None


def linear(x: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return the two points around a position, with their weights."""
    low = floor(x)
    part = x - low
    return [(low, 1.0 - part), (low + 1.0, part)]


def _cubic(x: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return the four points around a position, weighted by Keys 1981 with a = -0.75."""
    a = -0.75
    low = floor(x)
    part = x - low
    taps = []
    for k in (-1, 0, 1, 2):
        t = part + 1.0 if k < 0 else part if k == 0 else float(k) - part
        near = ((a + 2.0) * t - (a + 3.0)) * t * t + 1.0
        far = ((t - 5.0) * t + 8.0) * t * a - 4.0 * a
        taps.append((low + float(k), near if k in (0, 1) else far))
    return taps


_MODES: Final[Mapping[str, Callable[[Tensor], Sequence[Tap]]]] = {
    "nearest": lambda x: [(x, None)],
    "linear": linear,
    "cubic": _cubic,
}
_PADDING: Final = ("zeros", "border", "reflection")


def _grid_types(call: OpCall) -> tuple[TensorType]:
    x, grid = call.type(0), call.type(1)
    n = x.rank - 2
    if n not in (2, 3) or grid.rank != x.rank or grid.shape[-1] != n:
        raise ShapeError(f"GridSample takes x: (N, C, *S) and grid: (N, *T, {n}), got {x}, {grid}")
    if x.shape[0] != grid.shape[0]:
        raise ShapeError(f"GridSample takes one grid per sample, got {x} and {grid}")
    mode, padding = call.attrs["mode"], call.attrs["padding_mode"]
    if mode not in _MODES or padding not in _PADDING:
        raise InvalidInput(
            f"GridSample has modes {', '.join(_MODES)} and paddings {', '.join(_PADDING)}, got "
            f"{mode!r} and {padding!r}"
        )
    if mode == "cubic" and n != 2:
        raise InvalidInput(f"GridSample with mode 'cubic' takes planes, got {x}")
    return (x.with_shape((*x.shape[:2], *grid.shape[1:-1])),)


def _grid_sample(
    x: Tensor, grid: Tensor, *, align_corners: int, mode: str, padding_mode: str
) -> Tensor:
    n = x.rank - 2
    spatial, out = x.shape[2:], grid.shape[1:-1]
    places = grid.reshape((grid.shape[0], product(list(out)), n))
    axes = []
    for i, size in enumerate(spatial):
        extent = size_of([size], grid.dtype)
        # Grids list x before y, the spatial axes of a tensor y before x.
        g = slice_axis(places, 2, n - 1 - i, n - i).reshape(places.shape[:2])
        # -1 and 1 are the centres of the corner pixels; otherwise they are the outer edges.
        if align_corners:
            x_i = (g + 1.0) * 0.5 * (extent - 1.0)
        else:
            x_i = ((g + 1.0) * extent - 1.0) * 0.5
        x_i = round_(x_i) if mode == "nearest" else x_i
        if mode != "cubic":  # whose neighbours are bounded one by one, as runtimes do
            x_i = _place(x_i, extent, padding_mode, aligned=bool(align_corners))
        taps: list[Tap] = []
        for position, weight in _MODES[mode](x_i):
            held, left = _pixel(position, extent, padding_mode, aligned=bool(align_corners))
            weights = [w for w in (weight, left) if w is not None]
            taps.append((held, reduce(mul, weights).cast(x.dtype) if weights else None))
        axes.append(taps)
    first = arange(x.shape[0]).reshape((x.shape[0], 1)) * whole(product(list(spatial)))
    y = weighted_rows(rows_of(x), first, spatial, axes)
    return y.transpose(0, 2, 1).reshape((*x.shape[:2], *out))


def _sampled(reach: float = 1.3, **attrs: Any) -> Any:
    return sample(normal(2, 3, 4, 5), between(-reach, reach, 2, 3, 2, 2), **attrs)


def _emit_grid_sample_names(context: EmissionContext, node: Node) -> None:
    """Emit the names that modes of GridSample have for planes before opset 20."""
    names = {"linear": "bilinear", "cubic": "bicubic"}
    mode = str(node.attrs.get("mode", "linear"))
    context.plain(node, mode=names.get(mode, mode))


grid_sample_row = Op(
    name="GridSample", kind=OpKind.WINDOW,
    infer=_grid_types,
    body=_grid_sample,
    native=lambda node, opset: opset >= 20 or node.outputs[0].type.rank == 4,
    lower_below={20: _emit_grid_sample_names},
    samples=(
        _sampled(),
        _sampled(align_corners=1, padding_mode="border"),
        _sampled(padding_mode="reflection"),
        _sampled(padding_mode="reflection", align_corners=1),
        _sampled(2.8, padding_mode="reflection"),
        _sampled(2.8, padding_mode="border"),
        _sampled(mode="nearest"),
        _sampled(mode="nearest", padding_mode="border", align_corners=1),
        _sampled(mode="cubic"),
        _sampled(mode="cubic", padding_mode="border", align_corners=1),
        _sampled(mode="cubic", padding_mode="reflection"),
        sample(normal(1, 2, 3, 2, 4), between(-1.2, 1.2, 1, 2, 2, 3, 3)),
        sample(normal(1, 2, 3, 2, 4), between(-1.2, 1.2, 1, 2, 2, 3, 3), align_corners=1,
               padding_mode="border", mode="nearest"),
    ),
)  # fmt: skip


def contents(row: str, x: Tensor) -> Known:
    """Return the contents of an operand of sizes, which a body must know."""
    known = recorder().known(x)
    if known is None:
        raise InvalidInput(
            f"a gradient of {row}, or its form in other operators, needs sizes that are known when "
            "the graph is built; give a constant or sizes taken from a tensor's shape"
        )
    return known


def _affine_types(call: OpCall) -> tuple[TensorType]:
    theta, size = call.type(0), call.dims(1)
    n = len(size) - 2
    if n not in (2, 3) or theta.shape[1:] != (n, n + 1) or size[0] != theta.shape[0]:
        raise ShapeError(
            f"AffineGrid takes theta (N, n, n + 1) and a size (N, C, *S) of n axes, got {theta} "
            f"and {size}"
        )
    return (theta.with_shape((theta.shape[0], *size[2:], n)),)


def _affine_grid(theta: Tensor, size: Tensor, *, align_corners: int) -> Tensor:
    """Apply theta: (N, n, n + 1) to coordinates in [-1, 1] -> (N, *S, n), x before y before z."""
    known = contents("AffineGrid", size)
    spatial: list[Any] = [d if isinstance(d, Expr) else int(d) for d in known[2:]]
    axes = len(spatial)
    total = slice_axis(theta, 2, axes, axes + 1).reshape((theta.shape[0], *[1] * axes, axes))
    for i, d in enumerate(spatial):
        column = slice_axis(theta, 2, axes - 1 - i, axes - i)
        column = column.reshape((theta.shape[0], *[1] * axes, axes))
        place = _centres(d, theta, aligned=bool(align_corners))
        total = total + column * place.reshape([d if k == i else 1 for k in range(axes)] + [1])
    return total


def _centres(size: Dim, like: Tensor, *, aligned: bool) -> Tensor:
    """Return coordinates of pixel centres in [-1, 1]; 0 for a single one of aligned corners."""
    extent = size_of([size], like.dtype)
    o = arange(size).cast(like.dtype)
    if not aligned:
        return (o * 2.0 + 1.0) / extent - 1.0
    spread = o * 2.0 / _at_least_1(extent - 1.0) - 1.0
    if isinstance(extent, Tensor):
        return where(extent > 1.0, spread, 0.0)
    return spread if extent > 1.0 else o * 0.0


def _affine_grid_kernel(theta: Any, size: Any, *, align_corners: int) -> Any:
    spatial = [int(d) for d in size[2:]]
    places = []
    for d in spatial:
        o = np.arange(d, dtype=np.float64)
        places.append(o * 2 / max(d - 1, 1) - (d > 1) if align_corners else (o * 2 + 1) / d - 1)
    planes = np.meshgrid(*places, indexing="ij")
    homogeneous = np.stack([*planes[::-1], np.ones(spatial)], -1)
    return np.einsum("...k,nik->n...i", homogeneous, theta)


def _affine_open(call: OpCall) -> tuple[Dim | None, ...]:
    theta, n = call.type(0), length(call, 1) - 2
    return (theta.shape[0], *[None] * n, n)


affine_grid_row = Op(
    name="AffineGrid",
    kind=OpKind.WINDOW,
    **settled(_affine_types, _affine_open, 1),
    reference=_affine_grid_kernel,
    body=_affine_grid,
    samples=(
        sample(normal(2, 2, 3), fixed([2, 3, 4, 5])),
        sample(normal(2, 2, 3), fixed([2, 3, 3, 4]), align_corners=1),
        sample(normal(2, 3, 4), fixed([2, 1, 2, 3, 4])),
    ),
)


def _center_crop_pad(x: Tensor, shape: Tensor, *, axes: Sequence[int] | None) -> Tensor:
    """Keep the middle if the wanted size is smaller; pad with zeros around if it is larger."""
    known = contents("CenterCropPad", shape)
    wanted_axes = range(x.rank) if axes is None else [range(x.rank)[a] for a in axes]
    for axis, want in zip(wanted_axes, known, strict=True):
        wanted: Dim = want if isinstance(want, Expr) else int(want)
        have = x.shape[axis]
        if isinstance(have, int) and isinstance(wanted, int):
            x = _cropped_or_padded(x, axis, have, wanted)
        elif have != wanted:
            x = _centred_at_run(x, axis, wanted)
    return x


def _cropped_or_padded(x: Tensor, axis: int, have: int, wanted: int) -> Tensor:
    if wanted < have:
        start = (have - wanted) // 2
        return slice_axis(x, axis, start, start + wanted)
    before = (wanted - have) // 2
    amounts = [0] * (2 * x.rank)
    amounts[axis], amounts[x.rank + axis] = before, wanted - have - before
    return x if wanted == have else pad_row(x, np.array(amounts))


def _centred_at_run(x: Tensor, axis: int, wanted: Dim) -> Tensor:
    """Crop or pad when the graph runs: read positions from the middle, those outside as zero."""
    have = dims_of([x.shape[axis]])
    offset = div(have - dims_of([wanted]), 2)  # towards zero, which serves both
    position = arange(wanted) + offset
    inside = (position >= 0) & (position < have)
    last = have - 1
    taken = gather(x, minimum(maximum(position, 0), last), axis=axis)
    shape = [wanted if i == axis else 1 for i in range(x.rank)]
    return where(inside.reshape(shape), taken, np.zeros((), x.dtype.numpy))


def _center_types(call: OpCall) -> tuple[TensorType]:
    x, wanted, axes = call.type(0), call.dims(1), call.attrs["axes"]
    changed = range(x.rank) if axes is None else axes
    if len(axes_of(x.rank, changed)) != len(wanted):
        raise ShapeError(f"CenterCropPad of {x} takes {len(changed)} sizes, got {wanted}")
    shape = list(x.shape)
    for axis, d in zip(changed, wanted, strict=True):
        shape[axis] = d
    return (x.with_shape(shape),)


def _center_kernel(x: Any, shape: Any, *, axes: Sequence[int] | None) -> Any:
    for axis, wanted in zip(range(x.ndim) if axes is None else axes, shape, strict=True):
        have = x.shape[axis]
        if wanted < have:
            start = (have - wanted) // 2
            x = np.take(x, np.arange(start, start + wanted), axis)
        before = max(0, wanted - have) // 2
        amounts = [(0, 0)] * x.ndim
        amounts[axis] = (int(before), int(max(0, wanted - have) - before))
        x = np.pad(x, amounts)
    return x


def _center_open(call: OpCall) -> tuple[Dim | None, ...]:
    x = call.type(0)
    axes = call.attrs["axes"]
    changed = {range(x.rank)[a] for a in (range(x.rank) if axes is None else axes)}
    return tuple(None if i in changed else d for i, d in enumerate(x.shape))


center_crop_pad = Op(
    name="CenterCropPad",
    kind=OpKind.MOVEMENT,
    **settled(_center_types, _center_open, 1),
    reference=_center_kernel,
    body=_center_crop_pad,
    samples=(
        sample(normal(2, 7, 4), fixed([4, 7]), axes=(1, 2)),
        sample(normal(2, 3, 6), fixed([6, 3]), axes=(-2, -1)),
        sample(normal(5, 4), fixed([3, 6])),
    ),
)


def grid_sample(
    x: Tensor,
    grid: Tensor,
    *,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool = False,
) -> Tensor:
    """x: (N, C, *S) read at grid: (N, *T, n), coordinates in [-1, 1], x first -> (N, C, *T).

    `mode`: bilinear, nearest or bicubic; `padding_mode`: zeros, border or reflection.
    """
    mode = {"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode)
    return grid_sample_row(
        x, grid, mode=mode, padding_mode=padding_mode, align_corners=int(align_corners)
    )


def affine_grid(theta: Tensor, size: Sequence[Dim], *, align_corners: bool = False) -> Tensor:
    """theta: (N, n, n + 1), size: (N, C, *S) -> grid (N, *S, n) for `grid_sample`."""
    return affine_grid_row(theta, dims_of(list(size)), align_corners=int(align_corners))
