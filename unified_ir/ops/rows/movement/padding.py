"""How Pad adds elements around a tensor: kernel, body and gradient.

Unless it pads with a constant, Pad repeats elements of the tensor itself: along each axis it
gathers places, and its gradient adds up the cotangents of the copies of each place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.dims import Dim, Expr
from triplane.unified_ir.ir.graph import Node
from triplane.unified_ir.ir.types import ShapeError, TensorType
from triplane.unified_ir.ops.emission import EmissionContext
from triplane.unified_ir.ops.infer import onnx_attrs
from triplane.unified_ir.ops.lowering import XlaContext, sizes
from triplane.unified_ir.ops.recorder import recorder
from triplane.unified_ir.ops.row import OpCall
from triplane.unified_ir.ops.tensor import Tensor, dims_of, emit

Amounts = list[tuple[Dim, Dim]]
"""How many elements come before and after each axis; a negative number takes away."""


def emit_pad(context: EmissionContext, node: Node) -> None:
    """Emit amounts for all axes: onnxruntime ignores `axes` when it moves a transpose."""
    names = context.inputs(node)
    axes = context.held(names[3]) if len(names) > 3 and names[3] else None
    if axes is None or node.inputs[0] is None:
        context.plain(node)
        return
    rank, count = node.inputs[0].type.rank, len(axes)
    # The result lists all "before" amounts, then all "after" amounts, as `amounts` reads them.
    places = np.full(2 * rank, 2 * count)  # of the 0 behind the amounts
    for k, axis in enumerate(int(a) % rank for a in axes):
        places[[axis, axis + rank]] = k, k + count
    held_amounts = context.held(names[1])
    if held_amounts is None:
        zero = context.constant(np.zeros(1, np.int64))
        with_zero = context.emit("Concat", names[1], zero, axis=0)
        amounts = context.emit("Gather", with_zero, context.constant(places))
    else:
        amounts = context.constant(np.append(held_amounts, 0)[places].astype(np.int64))
    inputs = [names[0], amounts, *names[2:3]]
    attrs = onnx_attrs(node.attrs)
    context.add("Pad", inputs if inputs[-1] else inputs[:2], context.output_names(node), **attrs)


def amounts(rank: int, pads: Sequence[Any], axes: Sequence[Any] | None) -> Amounts:
    """Return the amounts of a Pad by axis, from its operands."""
    named = list(range(rank)) if axes is None else [int(a) for a in axes]
    if any(not -rank <= a < rank for a in named) or len({a % rank for a in named}) < len(named):
        raise ShapeError(f"Pad names the axes {named} of a tensor of {rank}; name each once")
    if len(pads) != 2 * len(named):
        raise ShapeError(
            f"Pad of {len(named)} axes needs {2 * len(named)} amounts, got {len(pads)}"
        )
    by_axis: Amounts = [(0, 0)] * rank
    for k, axis in enumerate(named):
        before, after = (p if isinstance(p, Expr) else int(p) for p in pads[k :: len(named)])
        by_axis[axis % rank] = (before, after)
    return by_axis


def padded_type(call: OpCall) -> tuple[TensorType, ...]:
    """Infer the type if amounts and axes are known."""
    x, mode = call.type(0), call.attrs["mode"]
    by_axis = amounts(x.rank, call.dims(1), call.ints(3) if call.has(3) else None)
    for size, pads in zip(x.shape, by_axis, strict=True):
        # reflect leaves out the edge itself, so it has one element less to repeat than wrap has.
        room = {"reflect": -1, "wrap": 0, "edge": None}.get(mode)
        most = max((p for p in pads if isinstance(p, int)), default=0)
        if isinstance(size, int) and (
            (room is not None and most > max(size + room, 0)) or (mode == "edge" and not size)
        ):
            raise ShapeError(
                f"Pad by {pads} in mode {mode!r} repeats more elements than an axis of {size} has"
            )
        total = size + pads[0] + pads[1]
        if isinstance(total, int) and total < 0:
            raise ShapeError(f"Pad by {pads} removes more elements than an axis of {size} has")
    return (x.with_shape(d + b + a for d, (b, a) in zip(x.shape, by_axis, strict=True)),)


def pad_kernel(x: Any, pads: Any, value: Any = None, axes: Any = None, *, mode: str) -> Any:
    """Pad as numpy does, then remove the elements that negative amounts ask to remove."""
    by_axis: Any = amounts(x.ndim, pads, axes)
    how = {} if mode != "constant" or value is None else {"constant_values": np.reshape(value, ())}
    y: Any = np.pad(x, [(max(b, 0), max(a, 0)) for b, a in by_axis], mode, **how)  # type: ignore[call-overload]
    stays = zip(y.shape, by_axis, strict=True)
    return y[tuple(slice(max(-b, 0), d - max(-a, 0)) for d, (b, a) in stays)]


def pad_xla(
    k: XlaContext, x: Any, pads: Any, value: Any = None, axes: Any = None, *, mode: str
) -> Any:
    """Pad with XLA's operator, which also removes; repeat elements as `pad_kernel` does."""
    named = None if axes is None else sizes(k.known(axes, "its axes"))
    by_axis: Any = amounts(x.ndim, sizes(k.known(pads, "its amounts")), named)
    if mode == "constant":
        fill = np.zeros((), x.dtype) if value is None else k.np.reshape(value, ())
        return k.lax.pad(x, fill, [(b, a, 0) for b, a in by_axis])
    y = k.np.pad(x, [(max(b, 0), max(a, 0)) for b, a in by_axis], mode)
    stays = zip(y.shape, by_axis, strict=True)
    return y[tuple(slice(max(-b, 0), d - max(-a, 0)) for d, (b, a) in stays)]


def has_pad(node: Node, opset: int) -> bool:
    """Return whether the opset has the node: axes as an operand since 18, wrapping since 19."""
    named = len(node.inputs) > 3 and node.inputs[3] is not None
    return opset >= 19 or (node.attrs.get("mode") != "wrap" and (opset >= 18 or not named))


def pad_body(
    x: Tensor, pads: Tensor, value: Tensor | None = None, axes: Tensor | None = None, *, mode: str
) -> Tensor:
    """Work axis by axis: join constants to the ends, or gather repeated elements."""
    for axis, (before, after) in enumerate(_known(x, pads, axes)):
        if (before, after) == (0, 0):
            continue
        if mode == "constant":
            x = _filled(x, axis, before, after, value)
        else:
            x = emit("Gather", x, _places(x.shape[axis], before, after, mode), axis=axis)
    return x


def pad_vjp(
    g: Tensor, y: Tensor, x: Tensor, pads: Tensor, value: Tensor | None = None,
    axes: Tensor | None = None, *, mode: str,
) -> Any:  # fmt: skip
    """Return the part of g over x; in modes that repeat elements, sum g over their copies."""
    by_axis = _known(x, pads, axes)
    if mode != "constant":
        for axis, amount in enumerate(by_axis):
            if amount != (0, 0):
                g = _added(g, _places(x.shape[axis], *amount, mode), axis, x.shape[axis])
        return g, None, None, None
    # Pad with the opposite amounts undoes both additions and removals.
    if any(isinstance(p, int) and p < 0 for pair in by_axis for p in pair):
        back = emit("Pad", g, dims_of([-b for b, _ in by_axis] + [-a for _, a in by_axis]))
    else:
        starts = [b for b, _ in by_axis]
        ends = [b + d for b, d in zip(starts, x.shape, strict=True)]
        back = emit("Slice", g, dims_of(starts), dims_of(ends), np.arange(x.rank))
    # Every added element is the same value, so its cotangent is the sum over all of them.
    rest = None if value is None else (g.sum() - back.sum()).reshape(value.shape)
    return back, None, rest, None


def _known(x: Tensor, pads: Tensor, axes: Tensor | None) -> Amounts:
    contents: list[Any] = [None if t is None else recorder().known(t) for t in (pads, axes)]
    if contents[0] is None or (axes is not None and contents[1] is None):
        raise InvalidInput("the gradient of Pad and its form in operators need constant amounts")
    return amounts(x.rank, contents[0], contents[1])


def _filled(x: Tensor, axis: int, before: Dim, after: Dim, value: Tensor | None) -> Tensor:
    fill = x.build.as_operand(0, x.dtype) if value is None else value.reshape(())
    taken = [-p if isinstance(p, int) and p < 0 else 0 for p in (before, after)]
    if any(taken):
        end = x.shape[axis] - taken[1]
        x = emit("Slice", x, dims_of([taken[0]]), dims_of([end]), np.array([axis]))
    parts = [x]
    for k, count in enumerate((before, after)):
        if isinstance(count, Expr) or count > 0:
            shape = [count if i == axis else d for i, d in enumerate(x.shape)]
            parts.insert(len(parts) if k else 0, emit("Expand", fill, dims_of(shape)))
    return emit("Concat", *parts, axis=axis) if len(parts) > 1 else x


def _places(size: Dim, before: Dim, after: Dim, mode: str) -> Any:
    """Return, for each place of the padded axis, the position of its element in the axis."""
    if isinstance(size, int) and isinstance(before, int) and isinstance(after, int):
        return pad_kernel(np.arange(size), [before, after], mode=mode)
    count = dims_of([size + before + after]).reshape(())
    place = emit("Range", 0, count, 1) - dims_of([before]).reshape(())
    last = dims_of([size]).reshape(()) - 1
    if mode == "edge":
        return emit("Min", emit("Max", place, 0), last)
    if mode == "wrap":
        return emit("Mod", place, last + 1)
    # A triangle wave of period 2 (n - 1): 0, 1, ..., n - 1, n - 2, ..., 1, 0, ...
    return last - emit("Abs", emit("Mod", place, last * 2) - last)


def _added(g: Tensor, places: Any, axis: int, size: Dim) -> Tensor:
    """Apply the transpose of gathering `places` along `axis`."""
    order = [axis, *(i for i in range(g.rank) if i != axis)]
    moved = g.transpose(*order)
    zero = g.build.as_operand(0, g.dtype)
    base = emit("Expand", zero, dims_of([size, *moved.shape[1:]]))
    index = emit("Unsqueeze", g.build.as_operand(places), np.array([1]))
    added = emit("ScatterND", base, index, moved, reduction="add")
    return added.transpose(*map(int, np.argsort(order)))
