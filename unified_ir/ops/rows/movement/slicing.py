"""Slices: their bounds, sizes known only at run time, and the gradient that writes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from triplane.unified_ir.ir.dims import Dim, Expr, ceil_div, symbols
from triplane.unified_ir.ir.graph import Node
from triplane.unified_ir.ir.types import ShapeError
from triplane.unified_ir.ops import batching
from triplane.unified_ir.ops.emission import EmissionContext
from triplane.unified_ir.ops.lowering import XlaContext
from triplane.unified_ir.ops.recorder import recorder
from triplane.unified_ir.ops.row import OPEN, IntegerForm, Op, OpCall, OpKind
from triplane.unified_ir.ops.rows.movement.indexing import gather, range_row, scatter_elements
from triplane.unified_ir.ops.rows.movement.shape_assertions import assume_shape
from triplane.unified_ir.ops.rows.movement.structure import Types, axes_of, pad_row, zeros
from triplane.unified_ir.ops.samples import computed, fixed, normal, sample
from triplane.unified_ir.ops.settings import length, settled
from triplane.unified_ir.ops.tensor import Tensor, dims_of


def _bounds(call: OpCall) -> list[tuple[int, Dim, Dim, int]]:
    """Return (axis, start, end, step) of a Slice, clipped if sizes are static."""
    x = call.type(0)
    starts, ends = call.dims(1), call.dims(2)
    axes = call.ints(3) if call.has(3) else tuple(range(len(starts)))
    steps = call.ints(4) if call.has(4) else (1,) * len(starts)
    if not len(starts) == len(ends) == len(axes) == len(steps) or 0 in steps:
        raise ShapeError(f"Slice needs a start, end and nonzero step per axis, got {steps=}")
    resolved = []
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        axis = axes_of(x.rank, [axis])[0]
        resolved.append((axis, *_clip_bounds(x.shape[axis], start, end, step), step))
    return resolved


def _clip_bounds(size: Dim, start: Dim, end: Dim, step: int) -> tuple[Dim, Dim]:
    if isinstance(size, int) and isinstance(start, int) and isinstance(end, int):
        # Going backwards, ONNX clips an end below -size to "before the first element", which Python
        # writes as None; as a number it would count from the end.
        first, last, _ = slice(start, None if end < -size and step < 0 else end, step).indices(size)
        return first, last
    return _symbolic_bound(size, start, step), _symbolic_bound(size, end, step)


# Exporters write INT64_MAX or INT32_MAX for "to the end"; no axis is that long.
_FAR = 2**31 - 1


def _symbolic_bound(size: Dim, bound: Dim, step: int) -> Dim:
    """Return a bound on an axis of symbolic size: far beyond is the end; negative, from it."""
    if not isinstance(bound, int) or 0 <= bound < _FAR:
        return bound
    if bound >= _FAR:
        return size if step > 0 else size - 1
    return (0 if step > 0 else -1) if bound <= -_FAR else size + bound


def _slice(call: OpCall) -> Types:
    x = call.type(0)
    shape = list(x.shape)
    for axis, start, end, step in _bounds(call):
        # A start from the front and an end from the back: the number depends on whether they cross.
        if step < 0 and isinstance(start, int) and not isinstance(end, int):
            raise ShapeError(
                f"the number of elements in a Slice from {start} down to {end} of {x} is not "
                "known; count both bounds from the same end"
            )
        length = ceil_div(end - start, step) if step > 0 else ceil_div(start - end, -step)
        shape[axis] = max(length, 0) if isinstance(length, int) else length
    return (x.with_shape(shape),)


def _sliced_open(call: OpCall) -> list[Dim | None]:
    """Leave axes with computed bounds open, or all axes if they are computed themselves."""
    x = call.type(0)
    if not call.has(3):
        return [None if i < length(call, 1) else d for i, d in enumerate(x.shape)]
    if call.known[3] is None:
        return [None] * x.rank
    axes = axes_of(x.rank, call.ints(3))
    return [None if i in axes else d for i, d in enumerate(x.shape)]


def _slices(
    x: Any, starts: Any, ends: Any, axes: Any = None, steps: Any = None
) -> tuple[slice, ...]:
    """Return the slice of each axis."""
    index = [slice(None)] * x.ndim
    axes = range(len(starts)) if axes is None else axes
    steps = [1] * len(starts) if steps is None else steps
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        stop = None if step < 0 and end < -x.shape[axis] else int(end)
        index[axis] = slice(int(start), stop, int(step))
    return tuple(index)


def _slice_xla(k: XlaContext, x: Any, *bounds: Any) -> Any:
    """Slice forwards, then reverse: JAX would gather for a step below -1."""
    known = [None if b is None else k.known(b, "its bounds") for b in bounds]
    ranges = [range(n)[s] for n, s in zip(x.shape, _slices(x, *known), strict=True)]
    forward = [r if r.step > 0 else r[::-1] for r in ranges]
    lows = [min(r.start, n) if r else 0 for r, n in zip(forward, x.shape, strict=True)]
    highs = [r[-1] + 1 if r else 0 for r in forward]
    part = k.lax.slice(x, lows, highs, [r.step for r in forward])
    back = [i for i, r in enumerate(ranges) if r.step < 0]
    return k.lax.rev(part, back) if back else part


def _slice_vjp(g: Tensor, y: Tensor, x: Tensor, *bounds: Tensor) -> Any:
    """Pad the cotangent back; strides and reversals gather places, computed bounds scatter."""
    known = [recorder().known(b) for b in bounds]
    none = tuple(None for _ in bounds)
    if any(k is None for k in known):
        return (_scattered(g, x, bounds), *none)
    call = OpCall(slice_row, (x.type, *(b.type for b in bounds)), (None, *known), {}, (), 1)
    resolved = _bounds(call)
    if all(step == 1 for *_, step in resolved):
        around = {axis: (start, x.shape[axis] - end) for axis, start, end, _ in resolved}
        return (_padded(g, around), *none)
    strided = [(x.shape[axis], start, end) for axis, start, end, step in resolved if step != 1]
    if any(isinstance(d, Expr) for part in strided for d in part):
        return (_scattered(g, x, bounds), *none)
    for axis, start, end, step in resolved:
        g = _spread(g, axis, x.shape[axis], start, end, step)
    return (g, *none)


def _scattered(g: Tensor, x: Tensor, bounds: Sequence[Tensor]) -> Tensor:
    """Write the cotangent to the places that the same Slice reads, wherever these are."""
    # Slicing the numbers of all elements gives the places; no bound has to be known.
    places = range_row(0, dims_of([x.type.size]).reshape(()), 1).reshape(x.shape)
    read = assume_shape(slice_row(places, *bounds), g.shape).reshape((-1,))
    base = zeros([x.type.size], g.dtype)
    return scatter_elements(base, read, g.reshape((-1,))).reshape(x.shape)


def _padded(g: Tensor, around: Mapping[int, tuple[Dim, Dim]]) -> Tensor:
    """Return `g` with that many zeros before and after each of the given axes."""
    pairs = [around.get(axis, (0, 0)) for axis in range(g.rank)]
    return pad_row(g, dims_of([b for b, _ in pairs] + [a for _, a in pairs]))


def _spread(g: Tensor, axis: int, size: Dim, start: Dim, end: Dim, step: int) -> Tensor:
    """Place slices of `g` along `axis` at start, start+step, ... of an axis of zeros."""
    if step == 1:
        return _padded(g, {axis: (start, size - end)})
    assert isinstance(size, int)
    positions = np.arange(size)[slice(start, None if step < 0 and end < 0 else end, step)]  # type: ignore[operator]
    # Positions that the slice did not read gather the zero that is appended behind g.
    take = np.full(size, len(positions))
    take[positions] = np.arange(len(positions))
    return gather(_padded(g, {axis: (0, 1)}), take, axis=axis)


def _emit_slice(context: EmissionContext, node: Node) -> None:
    """Refuse a number of rows that the axis does not imply: Slice itself would return fewer."""
    x, y = node.inputs[0], node.outputs[0].type
    assert x is not None
    opened: Any = node.attrs.get(OPEN, ())
    if all(
        isinstance(a, int) or (isinstance(b, Expr) and symbols(b) <= symbols(a) | set(opened))
        for a, b in zip(x.type.shape, y.shape, strict=True)
    ):  # each size follows from its axis, or is whatever the slice turns out to have
        context.plain(node)
        return
    taken = context.emit("Slice", *context.inputs(node))
    context.add("Reshape", [taken, context.dims(y.shape)], context.output_names(node), allowzero=1)


slice_row = Op(
    name="Slice",
    kind=OpKind.MOVEMENT,
    integer_form=IntegerForm.PART,
    emit=_emit_slice,
    batch=batching.sliced,
    **settled(_slice, _sliced_open, 1, 2, 3, 4),
    reference=lambda x, *bounds: x[_slices(x, *bounds)],
    xla=_slice_xla,
    vjp=_slice_vjp,
    samples=(
        sample(normal(4, 5), fixed([1, 0]), fixed([3, -1]), fixed([0, 1])),
        sample(normal(4, 5), fixed([-1]), fixed([-100]), fixed([1]), fixed([-2])),
        sample(normal(7), fixed([1]), fixed([7]), fixed([0]), fixed([3])),
        sample(normal(4, 3), fixed([2**40]), fixed([-(2**40)]), fixed([0]), fixed([-1])),
        sample(normal(7, 2), fixed([-2]), fixed([-(2**40)]), fixed([0]), fixed([-2])),
        sample(normal(6, 2), fixed([1, 0]), fixed([2**40, 1]), fixed([0, 1]), fixed([2, 1])),
        sample(normal(4, 5), computed([1, 0]), computed([3, 4])),
    ),
)
