"""Rows that cut, repeat and rearrange, and constants whose sizes are operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.dims import Dim, ceil_div, floor_div, product
from triplane.unified_ir.ir.graph import Node
from triplane.unified_ir.ir.types import (
    DTYPES,
    ShapeError,
    TensorType,
    as_dtype,
    float32,
    int64,
    type_of,
)
from triplane.unified_ir.ops import batching
from triplane.unified_ir.ops.emission import EmissionContext
from triplane.unified_ir.ops.infer import onnx_attrs
from triplane.unified_ir.ops.lowering import XlaContext, sizes, taken
from triplane.unified_ir.ops.row import IntegerForm, Op, OpCall, OpKind, dtype_attr
from triplane.unified_ir.ops.rows.movement.indexing import arange
from triplane.unified_ir.ops.rows.movement.structure import (
    axes_of,
    cast_row,
    concat,
    same,
    unsqueeze,
    where,
    zeros,
)
from triplane.unified_ir.ops.samples import between, bools, computed, fixed, ints, normal, sample
from triplane.unified_ir.ops.tensor import Tensor

Types = tuple[TensorType, ...]


def _part(rank: int, start: int, end: int | None) -> slice:
    """Return the axes that a Shape lists: start and end are clamped, as numpy reads them."""
    return slice(*slice(start, end).indices(rank))


def _shape_types(call: OpCall) -> Types:
    rank = call.type(0).rank
    part = range(rank)[_part(rank, call.attrs["start"], call.attrs["end"])]
    return (TensorType(int64, (len(part),)),)


shape_row = Op(
    name="Shape",
    kind=OpKind.SOURCE,
    infer=_shape_types,
    reference=lambda x, start, end: np.array(x.shape[_part(x.ndim, start, end)], np.int64),
    xla=lambda k, x, start, end: np.array(x.shape[_part(x.ndim, start, end)], np.int64),
    samples=(
        sample(normal(2, 3, 4)),
        sample(normal(2, 3, 4), start=1),
        sample(normal(2, 3, 4), start=-9, end=-1),
        sample(normal(2, 3, 4), start=2, end=1),
    ),
)
"""Sizes as a vector. `ops.shape` and `x.shape` are known when the graph is built; this is not."""

size_row = Op(
    name="Size",
    kind=OpKind.SOURCE,
    infer=lambda call: (TensorType(int64, ()),),
    reference=lambda x: np.array(x.size, np.int64),
    xla=lambda k, x: np.array(x.size, np.int64),
    samples=(sample(normal(2, 3)),),
)


def _flatten(x: Tensor, *, axis: int) -> Tensor:
    if not -x.rank <= axis <= x.rank:
        raise ShapeError(f"Flatten needs an axis of {x.type}, or its rank, got {axis}")
    at = axis + x.rank if axis < 0 else axis
    return x.reshape((product(x.shape[:at]), product(x.shape[at:])))


flatten_row = Op(
    name="Flatten",
    kind=OpKind.MOVEMENT,
    integer_form=IntegerForm.COPY,
    preserves_elements=True,
    body=_flatten,
    samples=(
        sample(normal(2, 3, 4)),
        sample(normal(2, 3, 4), axis=0),
        sample(normal(2, 3, 4), axis=-1),
        sample(normal(3), axis=1),
    ),
)


def _tile_types(call: OpCall) -> Types:
    x = call.type(0)
    if call.known[1] is None:
        return (x.with_shape(call.opened(i) for i in range(x.rank)),)
    repeats = call.dims(1)
    if len(repeats) != x.rank:
        raise ShapeError(f"Tile of {x} needs {x.rank} repeats, got {len(repeats)}")
    return (x.with_shape(d * r for d, r in zip(x.shape, repeats, strict=True)),)


def _tile_vjp(g: Tensor, y: Tensor, x: Tensor, repeats: Tensor) -> Any:
    times = g.build.known(repeats)
    if times is None:
        raise InvalidInput("the gradient of Tile needs repeats that are known when it is built")
    # (r d) -> (r, d) per axis: copies come before elements, so the axes 0, 2, 4, ... are summed.
    split = [s for pair in zip(times, x.shape, strict=True) for s in pair]
    return g.reshape(split).sum(range(0, 2 * x.rank, 2)), None


tile_row = Op(
    name="Tile",
    kind=OpKind.MOVEMENT,
    data_dependent_dims=lambda call: call.type(0).rank if call.known[1] is None else 0,
    infer=_tile_types,
    reference=np.tile,
    xla=lambda k, x, repeats: k.np.tile(x, sizes(k.known(repeats, "its repeats"))),
    vjp=_tile_vjp,
    samples=(
        sample(normal(2, 3), fixed([2, 1])),
        sample(normal(2, 3), fixed([3, 2])),
        sample(normal(3), fixed([0])),
        sample(normal(2, 3), computed([1, 2]), smooth=()),
    ),
)


def split_sizes(size: Dim, parts: int) -> list[Dim]:
    """Return the sizes of `parts` pieces, equal except for a shorter last one.

    An open size is assumed to be long enough for all of them; a run in which it is not is refused.
    """
    each = ceil_div(size, parts)
    if isinstance(size, int) and isinstance(each, int):
        return [max(0, min(each, size - each * i)) for i in range(parts)]
    return [*[each] * (parts - 1), size - each * (parts - 1)]


def _split_types(call: OpCall) -> Types:
    x, n = call.type(0), call.outputs
    axis = axes_of(x.rank, [call.attrs["axis"]])[0]
    if call.has(1) and call.known[1] is None:
        sizes: Sequence[Dim] = [call.opened(i) for i in range(n)]
    elif call.has(1):
        sizes = call.dims(1)
        total: Any = sum(sizes[1:], sizes[0]) if sizes else 0
        if total != x.shape[axis] or len(sizes) != n:
            raise ShapeError(
                f"Split of axis {axis} of {x} into {n} parts needs {n} sizes that add up to it, "
                f"got {list(sizes)}"
            )
    else:
        if call.attrs["num_outputs"] != n:
            raise ShapeError(f"Split has {n} outputs but num_outputs={call.attrs['num_outputs']}")
        sizes = split_sizes(x.shape[axis], n)
    return tuple(x.with_shape(s if i == axis else d for i, d in enumerate(x.shape)) for s in sizes)


def _split(x: Any, sizes: Any = None, *, axis: int, num_outputs: int) -> Any:
    if sizes is None:
        sizes = split_sizes(x.shape[axis], num_outputs)
    return tuple(np.split(x, np.cumsum(sizes)[:-1].astype(int), axis))


def _split_xla(k: XlaContext, x: Any, parts: Any = None, *, axis: int, num_outputs: int) -> Any:
    if parts is None:
        parts = split_sizes(x.shape[axis], num_outputs)
    return k.lax.split(x, sizes(k.known(np.asarray(parts), "its sizes")), axis % x.ndim)


def _split_vjp(g: Any, y: Any, x: Tensor, sizes: Tensor | None = None, **attrs: Any) -> Any:
    gs, ys = (g, y) if isinstance(g, tuple) else ((g,), (y,))
    parts = [zeros(y.shape, y.dtype) if g is None else g for g, y in zip(gs, ys, strict=True)]
    return concat(parts, attrs["axis"]), None


def _emit_split(context: EmissionContext, node: Node) -> None:
    """Emit the sizes of the parts: before opset 18 no attribute says how many there are."""
    names = context.inputs(node)
    if len(names) == 1:
        x, axis = node.inputs[0], int(node.attrs.get("axis", 0))  # type: ignore[arg-type]
        assert x is not None
        names.append(context.dims([y.type.shape[axis % x.type.rank] for y in node.outputs]))
    context.add("Split", names, context.output_names(node), axis=node.attrs.get("axis", 0))


split_row = Op(
    name="Split",
    kind=OpKind.MOVEMENT,
    integer_form=IntegerForm.PART,
    emit=_emit_split,
    batch=batching.first_along_axis,
    data_dependent_dims=lambda call: call.outputs if call.has(1) and call.known[1] is None else 0,
    infer=_split_types,
    reference=_split,
    xla=_split_xla,
    vjp=_split_vjp,
    samples=(
        sample(normal(6, 2), fixed([1, 3, 2]), outputs=3),
        sample(normal(2, 7), outputs=3, axis=1, num_outputs=3),
        sample(normal(2, 4), outputs=2, axis=-1, num_outputs=2),
        sample(normal(2, 4), computed([1, 3]), outputs=2, axis=1, smooth=()),
    ),
)


def _depth_to_space(x: Tensor, *, blocksize: int, mode: str) -> Tensor:
    """x: (N, C b b, H, W) -> (N, C, H b, W b)."""
    n, c, h, w = _image(x, "DepthToSpace")
    b, inner = blocksize, floor_div(c, blocksize * blocksize)
    # DCR reads the channels as (b, b, C), CRD as (C, b, b).
    if mode == "DCR":
        blocks = x.reshape((n, b, b, inner, h, w)).transpose(0, 3, 4, 1, 5, 2)
    else:
        blocks = x.reshape((n, inner, b, b, h, w)).transpose(0, 1, 4, 2, 5, 3)
    return blocks.reshape((n, inner, h * b, w * b))


def _space_to_depth(x: Tensor, *, blocksize: int) -> Tensor:
    """x: (N, C, H b, W b) -> (N, C b b, H, W)."""
    n, c, h, w = _image(x, "SpaceToDepth")
    b = blocksize
    blocks = x.reshape((n, c, floor_div(h, b), b, floor_div(w, b), b))
    moved = blocks.transpose(0, 3, 5, 1, 2, 4)
    return moved.reshape((n, c * b * b, floor_div(h, b), floor_div(w, b)))


def _image(x: Tensor, name: str) -> tuple[Dim, ...]:
    if x.rank != 4:
        raise ShapeError(f"{name} takes x: (N, C, H, W), got {x.type}")
    return x.shape


depth_to_space = Op(
    name="DepthToSpace",
    kind=OpKind.MOVEMENT,
    body=_depth_to_space,
    samples=(
        sample(normal(1, 8, 2, 3), blocksize=2),
        sample(normal(1, 8, 2, 3), blocksize=2, mode="CRD"),
    ),
)
space_to_depth = Op(
    name="SpaceToDepth",
    kind=OpKind.MOVEMENT,
    body=_space_to_depth,
    samples=(sample(normal(2, 2, 4, 6), blocksize=2),),
)


def _reverse_types(call: OpCall) -> Types:
    x, lengths = call.type(0), call.type(1)
    time, batch = call.attrs["time_axis"], call.attrs["batch_axis"]
    if x.rank < 2 or {time, batch} != {0, 1}:
        raise ShapeError(f"ReverseSequence takes x: (T, B, ...) or (B, T, ...), got {x}")
    if lengths.shape != (x.shape[batch],):
        raise ShapeError(f"ReverseSequence takes one length per sequence of {x}, got {lengths}")
    return (x,)


def _reverse_xla(k: XlaContext, x: Any, lengths: Any, *, time_axis: int, batch_axis: int) -> Any:
    n = x.shape[time_axis]
    # Numpy's reading of a length beyond the axis, or below 0, as ONNX's implementation has it.
    ends = k.np.minimum(k.np.where(lengths < 0, lengths + n, lengths), n)
    ends = k.np.expand_dims(ends, time_axis)
    t = np.expand_dims(np.arange(n), batch_axis)
    at = [np.expand_dims(np.arange(x.shape[batch_axis]), time_axis)] * 2
    at[time_axis] = k.np.where(t < ends, ends - 1 - t, t)
    return taken(k, x, tuple(at))


reverse_sequence: Op = Op(
    name="ReverseSequence",
    kind=OpKind.MOVEMENT,
    infer=_reverse_types,
    xla=_reverse_xla,
    # The reversal is its own inverse and its own transpose.
    vjp=lambda g, y, x, lengths, **axes: (reverse_sequence(g, lengths, **axes), None),
    samples=(
        sample(normal(4, 3, 2), fixed([4, 1, 2])),
        sample(normal(3, 4), ints(1, 5, 3), time_axis=1, batch_axis=0),
    ),
)


_TRIANGLES: Final = frozenset({"float32", "float64", "int32", "int64", "bool"})


def _trilu_types(call: OpCall) -> Types:
    if call.type(0).rank < 2:
        raise ShapeError(f"Trilu takes matrices (..., M, N), got {call.type(0)}")
    return same(call)


def _trilu_body(x: Tensor, k: Tensor | None = None, *, upper: int) -> Tensor:
    """Return x where column minus row is at least k (upper) or at most k, else 0."""
    rows, columns = arange(x.shape[-2]), arange(x.shape[-1])
    ahead = columns - unsqueeze(rows, 1)
    limit: Any = 0 if k is None else k.reshape(())
    return where(ahead >= limit if upper else ahead <= limit, x, np.zeros((), x.dtype.numpy))


trilu_row: Op = Op(
    name="Trilu",
    kind=OpKind.ELEMENTWISE,
    batch=batching.first_elementwise,
    infer=_trilu_types,
    reference=lambda x, k=0, *, upper: (np.triu if upper else np.tril)(x, int(np.ravel(k)[0])),
    vjp=lambda g, y, x, k=None, *, upper: (trilu_row(g, k, upper=upper), None),
    body=_trilu_body,
    native=lambda node, opset: node.outputs[0].type.dtype.name in _TRIANGLES,
    samples=(
        sample(normal(3, 4)),
        sample(normal(2, 4, 3), fixed(1), upper=0),
        sample(normal(3, 4), fixed(-1)),
        sample(ints(0, 9, 3, 3, dtype="int32"), upper=0),
        sample(bools(3, 3)),
        sample(ints(0, 9, 3, 3, dtype="uint8")),
    ),
)


def _eye_types(call: OpCall) -> Types:
    x, dtype = call.type(0), call.attrs["dtype"]
    if x.rank != 2:
        raise ShapeError(f"EyeLike takes a matrix, got {x}")
    return (x if dtype is None else x.with_dtype(dtype_attr(dtype)),)


def _eye_xla(context: XlaContext, x: Any, *, dtype: int | None, k: int) -> Any:
    return context.np.eye(*x.shape, k, context.node.outputs[0].type.dtype.numpy)


eye_like_row = Op(
    name="EyeLike",
    kind=OpKind.SOURCE,
    infer=_eye_types,
    reference=lambda x, dtype, k: np.eye(x.shape[0], x.shape[1], k),
    xla=_eye_xla,
    vjp=lambda g, y, x, **_: (None,),
    samples=(sample(normal(3, 4)), sample(normal(3, 3), k=-1, dtype=1)),
)
"""1 on the k-th diagonal, else 0, in the shape of the operand."""


def _one_hot_types(call: OpCall) -> Types:
    index, values = call.type(0), call.type(2)
    axis = axes_of(index.rank + 1, [call.attrs["axis"]])[0]
    if call.type(1).size != 1 or values.shape != (2,):
        raise ShapeError(f"OneHot takes one depth and two values, got {call.type(1)}, {values}")
    depth = call.opened() if call.known[1] is None else call.dims(1)[0]
    return (values.with_shape((*index.shape[:axis], depth, *index.shape[axis:])),)


def _one_hot(index: Any, depth: Any, values: Any, *, axis: int) -> Any:
    n = np.int64(np.ravel(depth)[0])  # int64, so that a depth of 300 fits beside int8 indices
    axis %= index.ndim + 1
    # ONNX: indices in -depth..-1 count from the end; others outside the range match no position.
    wanted = np.where(index < 0, index + n, index)
    along = [-1 if i == axis else 1 for i in range(index.ndim + 1)]
    hit = np.expand_dims(wanted, axis) == np.arange(n).reshape(along)
    return np.where(hit, values[1], values[0])


def _one_hot_xla(k: XlaContext, index: Any, depth: Any, values: Any, *, axis: int) -> Any:
    n = np.int64(np.ravel(k.known(depth, "its depth"))[0])
    axis %= index.ndim + 1
    wanted = k.np.expand_dims(k.np.where(index < 0, index + n, index), axis)
    along = [-1 if i == axis else 1 for i in range(index.ndim + 1)]
    return k.np.where(wanted == np.arange(n).reshape(along), values[1], values[0])


def _one_hot_vjp(
    g: Tensor, y: Tensor, index: Tensor, depth: Tensor, values: Tensor, **axis: int
) -> Any:
    """Sum, for each of the two values, the cotangents of the places that it fills."""
    hit = one_hot_row(index, depth, np.array([0, 1], g.dtype.numpy), **axis)
    on = (g * hit).sum()
    return None, None, concat([(g.sum() - on).reshape((1,)), on.reshape((1,))])


def _emit_one_hot(context: EmissionContext, node: Node) -> None:
    """Cast positions and values to types that onnxruntime has kernels for."""
    *positions, values = context.inputs(node)
    for i in range(2):
        if node.inputs[i].type.dtype != int64:  # type: ignore[union-attr]
            positions[i] = context.emit("Cast", positions[i], to=int64.onnx)
    dtype, attrs = node.outputs[0].type.dtype, onnx_attrs(node.attrs)
    if dtype in {int64, float32}:
        context.add("OneHot", [*positions, values], context.output_names(node), **attrs)
        return
    wide = float32 if dtype.is_float else int64
    cast = context.emit("Cast", values, to=wide.onnx)
    marked = context.emit("OneHot", *positions, cast, **attrs)
    context.add("Cast", [marked], context.output_names(node), to=dtype.onnx)


one_hot_row: Op = Op(
    name="OneHot",
    kind=OpKind.INDEXING,
    settings=(2,),
    emit=_emit_one_hot,
    data_dependent_dims=lambda call: int(call.known[1] is None),
    infer=_one_hot_types,
    reference=_one_hot,
    xla=_one_hot_xla,
    vjp=_one_hot_vjp,
    samples=(
        sample(ints(0, 4, 3), fixed(4), normal(2)),
        sample(computed([[1, -1], [7, 0]]), fixed([3]), normal(2), axis=0),
        sample(ints(0, 4, 3, dtype="uint8"), fixed(4), fixed([0, 5], "uint8"), smooth=()),
        sample(ints(0, 4, 3), computed(4), normal(2), axis=1, smooth=()),
    ),
)
"""`values[1]` at the index, `values[0]` elsewhere; an index out of range marks nothing."""


def _constant_of_shape(call: OpCall) -> Types:
    value = call.attrs["value"]
    dtype = DTYPES["float32"] if value is None else type_of(value).dtype
    if call.known[0] is None:
        rank = call.type(0).shape[0]
        if not isinstance(rank, int):
            raise ShapeError(f"ConstantOfShape needs a known number of sizes, got {call.type(0)}")
        return (TensorType(dtype, tuple(call.opened(i) for i in range(rank))),)
    return (TensorType(dtype, call.dims(0)),)


def _sizes_unknown(call: OpCall) -> int:
    rank = call.type(0).shape[0]
    return rank if call.known[0] is None and isinstance(rank, int) else 0


def _filled(k: XlaContext, shape: Any, *, value: Any) -> Any:
    fill = np.float32(0) if value is None else value.reshape(())
    return k.np.full(sizes(k.known(shape, "its sizes")), fill)


constant_of_shape_row = Op(
    name="ConstantOfShape",
    kind=OpKind.SOURCE,
    data_dependent_dims=_sizes_unknown,
    infer=_constant_of_shape,
    reference=lambda sizes, value: (
        np.zeros(sizes, np.float32) if value is None else np.full(sizes, value.reshape(()))
    ),
    xla=_filled,
    samples=(
        sample(fixed([2, 3])),
        sample(fixed([2, 0]), value=np.array([7], np.int64)),
        sample(computed([2, 3]), value=np.array([True])),
    ),
)

_cast_kernel: Any = cast_row.reference

cast_like_row = Op(
    name="CastLike",
    kind=OpKind.MOVEMENT,
    infer=lambda call: (call.type(0).with_dtype(call.type(1).dtype),),
    reference=lambda x, like, **how: _cast_kernel(x, to=as_dtype(like.dtype).onnx, **how),
    body=lambda x, like, **how: (
        x if x.dtype == like.dtype else cast_row(x, to=like.dtype.onnx, **how)
    ),
    native=lambda node, opset: False,  # a Cast: the element type is known when the graph is built
    samples=(
        sample(normal(2, 3), fixed([1.0], "float32")),
        sample(ints(0, 9, 4), normal(2), smooth=()),
        sample(between(1, 5, 3), fixed([1]), smooth=()),
    ),
)
