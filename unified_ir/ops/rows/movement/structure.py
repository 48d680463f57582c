"""Rows that move or select elements without computing, and the sums that transpose them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.dims import Dim, Expr, floor_div, is_open, product
from triplane.unified_ir.ir.graph import Node
from triplane.unified_ir.ir.types import (
    DTYPES,
    DType,
    ShapeError,
    TensorType,
    as_dtype,
    bool_,
    int64,
    type_of,
)
from triplane.unified_ir.ops import batching
from triplane.unified_ir.ops.emission import EmissionContext, emit_broadcast, first_number
from triplane.unified_ir.ops.infer import broadcast
from triplane.unified_ir.ops.lowering import XlaContext, sizes, to_uint64, truncated
from triplane.unified_ir.ops.recorder import recorder
from triplane.unified_ir.ops.row import (
    DOMAIN,
    AttrSpec,
    IntegerForm,
    Op,
    OpCall,
    OpKind,
    dtype_attr,
)
from triplane.unified_ir.ops.rows.movement import padding
from triplane.unified_ir.ops.rows.movement.shape_assertions import assume_shape
from triplane.unified_ir.ops.samples import bools, computed, fixed, ints, normal, sample
from triplane.unified_ir.ops.settings import all_open, length, settled
from triplane.unified_ir.ops.tensor import Tensor, TensorLike, as_tensor, dims_of, emit

Types = tuple[TensorType, ...]


def same(call: OpCall) -> Types:
    """Infer one output, typed like the first operand."""
    return (call.type(0),)


def sum_to(g: Tensor, like: Tensor) -> Tensor:
    """Apply the transpose of broadcasting `like` to the shape of `g`: sum the repeated axes.

    An axis of a size that only the data decide was repeated if `like` has one element there;
    otherwise it is as long as that of `like`, which is checked when the graph runs.
    """
    if g.shape == like.shape:
        return g
    lead = g.rank - like.rank
    sizes: list[Dim] = []
    summed = [*range(lead)]
    for axis, (a, b) in enumerate(zip(like.shape, g.shape[lead:], strict=True), lead):
        stays = a == b or (a != 1 and is_open(b))
        sizes.append(b if stays else a)
        summed += [] if stays else [axis]
    if summed:
        g = g.sum(summed).reshape(sizes)
    return assume_shape(g, like.shape)


def axes_of(rank: int, axes: Sequence[int] | None) -> tuple[int, ...]:
    """Return axes as sorted non-negative ints; all of them for None."""
    if axes is None:
        return tuple(range(rank))
    bad = [a for a in axes if not -rank <= a < rank]
    if bad:
        raise ShapeError(f"axis {bad[0]} is outside a tensor of {rank} axes")
    normalized = sorted({int(a) % rank for a in axes})
    if len(normalized) != len(axes):
        raise ShapeError(f"axes {tuple(map(int, axes))} of {rank} name one twice; name each once")
    return tuple(normalized)


def _emit_constant(context: EmissionContext, node: Node) -> None:
    value: Any = node.attrs["value"]
    context.names[node.outputs[0]] = context.constant(value)


constant_row = Op(
    name="Constant",
    kind=OpKind.SOURCE,
    total=True,
    emit=_emit_constant,
    infer=lambda call: (type_of(call.attrs["value"]),),
    reference=lambda value, **_: value,
    xla=lambda k, value, **_: value,
)


def _emit_dims(context: EmissionContext, node: Node) -> None:
    """Emit sizes as integer arithmetic on shapes."""
    context.names[node.outputs[0]] = context.dims(node.attrs["dims"])  # type: ignore[arg-type]


dims_row = Op(
    name="Dims",
    computes="the sizes of the graph's symbols, `dims`, as an int64 vector",
    kind=OpKind.SOURCE,
    emit=_emit_dims,
    domain=DOMAIN,
    attrs={"dims": AttrSpec("DIMS", required=True)},
    infer=lambda call: (TensorType(int64, (len(call.attrs["dims"]),)),),
    reference=lambda dims: np.array(dims, np.int64),
    xla=lambda k, dims: np.array(dims, np.int64),
)


identity = Op(
    name="Identity", kind=OpKind.MOVEMENT, total=True,
    batch=batching.elementwise,
    preserves_elements=True,
    infer=same,
    reference=lambda x: x,
    xla=lambda k, x: x,
    vjp=lambda g, y, x: (g,),
    samples=(sample(normal(2, 3)),),
)  # fmt: skip


stop_gradient = Op(
    name="StopGradient",
    computes="x; no gradient passes",
    kind=OpKind.ELEMENTWISE,
    batch=batching.elementwise,
    domain=DOMAIN,
    operands=("T",),
    infer=same,
    reference=lambda x: x,
    body=lambda x: identity(x),
    vjp=lambda g, y, x: (None,),
    samples=(sample(normal(2, 3), smooth=()),),
)


def _emit_barrier(context: EmissionContext, node: Node) -> None:
    """Reshape x to its own shape, computed with a zero that depends on `after`.

    The memory stays where it is. No runtime simplifies it: 0 times a number is not 0 for NaN, so
    the product has to be computed; the cast to an integer then makes it 0 for NaN too.
    """
    x, after = context.inputs(node)
    number = first_number(context, after)
    zero = context.emit(
        "Mul", context.emit("Cast", number, to=int64.onnx), context.constant(np.array(0))
    )
    shape = context.emit("Add", context.emit("Shape", x), zero)
    context.add("Reshape", [x, shape], context.output_names(node))


barrier = Op(
    name="Barrier",
    computes="x, but not before `after` is known, whose values do not matter",
    kind=OpKind.MOVEMENT,
    preserves_elements=True,
    emit=_emit_barrier,
    domain=DOMAIN,
    operands=("T", "U"),
    infer=same,
    reference=lambda x, after: x,
    xla=lambda k, x, after: k.lax.optimization_barrier((x, after))[0],
    vjp=lambda g, y, x, after: (g, None),
    samples=(
        sample(normal(2, 3), normal(4)),
        sample(normal(), normal(2, 2)),
        sample(normal(0, 3), normal(0)),
    ),
)
"""What keeps a runtime from computing too early; `after` is a float tensor.

A runtime orders nodes as it likes and merges equal ones, so it would compute a value that is
recomputed to save memory early, once, and keep it. Behind a barrier it is computed late.
"""


def _cast_xla(k: XlaContext, x: Any, *, to: int, **_: Any) -> Any:
    """Convert; a float outside a short or unsigned integer type wraps around, as in numpy."""
    dtype = dtype_attr(to).numpy
    if k.np.issubdtype(x.dtype, np.floating) and k.np.issubdtype(dtype, np.integer):
        if x.dtype == DTYPES["float4e2m1"].numpy:  # XLA 0.10 makes 3, 4 and 6 infinite
            x = k.lax.reduce_precision(k.lax.convert_element_type(x, np.float32), 8, 23)
        if dtype_attr(to).bits < 32:
            x = truncated(k, x, np.int32)
        elif dtype == np.uint32:
            x = truncated(k, x, np.int64)
        elif dtype == np.uint64:
            return to_uint64(k, x)
        else:
            x = truncated(k, x, dtype)
    return k.lax.convert_element_type(x, dtype)


cast_row = Op(
    name="Cast",
    kind=OpKind.MOVEMENT,
    total=True,
    batch=batching.elementwise,
    infer=lambda call: (call.type(0).with_dtype(dtype_attr(call.attrs["to"])),),
    reference=lambda x, to, **_: x.astype(dtype_attr(to).numpy),
    xla=_cast_xla,
    vjp=lambda g, y, x, **_: (g.cast(x.dtype) if x.dtype.is_float and y.dtype.is_float else None,),
    samples=(
        sample(normal(2, 3), to=1),
        sample(normal(2, 3), to=9, smooth=()),
        sample(ints(0, 9, 4), to=1, smooth=()),
    ),
)


def _reshape(call: OpCall) -> Types:
    """Infer the type; counts that cannot be compared here, such as 6 and N, are compared later."""
    x, wanted = call.type(0), list(call.dims(1))
    if not call.attrs["allowzero"]:
        if any(d == 0 for d in wanted[x.rank :]):
            raise ShapeError(
                f"Reshape of {x} to {wanted}: a 0 keeps the size of an axis, but {x} has only "
                f"{x.rank} axes"
            )
        # Without allowzero a 0 copies the size of the same axis.
        wanted = [x.shape[i] if d == 0 else d for i, d in enumerate(wanted)]
    if wanted.count(-1) > 1:
        raise ShapeError(f"Reshape takes at most one -1, got {wanted}")
    shown = ", ".join(map(str, call.dims(1)))
    rest = product([d for d in wanted if d != -1])
    if -1 in wanted:
        if rest == 0:
            raise ShapeError(
                f"Reshape of {x} to ({shown}): next to an empty axis -1 may be any size; write it"
            )
        wanted[wanted.index(-1)] = floor_div(x.size, rest)
    compared_later = isinstance(x.size, Expr) and isinstance(rest, int) and rest > 0
    if product(wanted) != x.size and not (compared_later or is_open(x.size) or is_open(rest)):
        raise ShapeError(
            f"Reshape of {x} to ({shown}) changes the element count "
            f"from {x.size} to {product(wanted)}"
        )
    return (x.with_shape(wanted),)


def _new_shape(x: Any, shape: Any, *, allowzero: int) -> list[int]:
    """Return the sizes that a Reshape asks for, of which one may be -1."""
    copied = {i for i, d in enumerate(shape) if d == 0 and not allowzero}
    wanted = [x.shape[i] if i in copied else int(d) for i, d in enumerate(shape)]
    if not x.size and -1 in wanted:  # numpy finds no size beside a 0, ONNX leaves copied axes out
        whole = math.prod(d for i, d in enumerate(x.shape) if i not in copied)
        part = math.prod(d for i, d in enumerate(wanted) if i not in copied and d != -1)
        wanted = [(whole // part if part else 0) if d == -1 else d for d in wanted]
    return wanted


def _emit_reshape(context: EmissionContext, node: Node) -> None:
    """Emit a single symbolic size as -1, which needs no Shape arithmetic at run time."""
    shape = node.outputs[0].type.shape
    wanted = [-1 if isinstance(d, Expr) else d for d in shape]
    # Next to a size 0, -1 has no unique value.
    if wanted.count(-1) > 1 or 0 in shape:
        context.plain(node)
        return
    inputs = [context.inputs(node)[0], context.constant(np.array(wanted, np.int64))]
    context.add("Reshape", inputs, context.output_names(node))


_SAME_ELEMENTS: Final[Mapping[str, Any]] = {
    "kind": OpKind.MOVEMENT,
    "integer_form": IntegerForm.COPY,
    "batch": batching.reshaped,
    "preserves_elements": True,
    "vjp": lambda g, y, x, *_, **__: (g.reshape(x.shape), None),
}
"""Columns of the rows that give the same elements another shape."""

reshape_row = Op(
    name="Reshape",
    **_SAME_ELEMENTS,
    total=True,
    emit=_emit_reshape,
    **settled(_reshape, all_open(lambda call: length(call, 1)), 1),
    reference=lambda x, shape, **how: x.reshape(_new_shape(x, shape, **how)),
    xla=lambda k, x, shape, **how: k.np.reshape(
        x, _new_shape(x, k.known(shape, "its sizes"), **how)
    ),
    samples=(
        sample(normal(2, 6), fixed([3, -1])),
        sample(normal(2, 6), fixed([0, 3, 2])),
        sample(normal(2, 6), computed([4, -1]), smooth=()),
    ),
)


def _transpose(call: OpCall) -> Types:
    x = call.type(0)
    perm = call.attrs["perm"] or tuple(reversed(range(x.rank)))
    if sorted(perm) != list(range(x.rank)):
        raise ShapeError(f"Transpose of {x} needs each axis once, got perm={perm}")
    return (x.with_shape(x.shape[p] for p in perm),)


transpose = Op(
    name="Transpose",
    kind=OpKind.MOVEMENT,
    integer_form=IntegerForm.COPY,
    batch=batching.transposed,
    infer=_transpose,
    reference=lambda x, perm: x.transpose(perm),
    xla=lambda k, x, perm: k.np.transpose(x, perm),
    # argsort of a permutation is its inverse.
    vjp=lambda g, y, x, perm: (g.transpose(*np.argsort(perm) if perm else ()),),
    samples=(sample(normal(2, 3, 4), perm=(1, 2, 0)), sample(normal(2, 3))),
)


def _expanded(call: OpCall) -> Types:
    x = call.type(0)
    return (x.with_shape(broadcast(call.row, x.shape, call.dims(1))),)


def _emit_expand(context: EmissionContext, node: Node) -> None:
    """Emit an empty result as a constant: onnxruntime 1.31 drops an Expand of 1 to 0."""
    type_ = node.outputs[0].type
    if 0 in type_.shape and not type_.symbols:
        empty = np.zeros(type_.concrete({}), type_.dtype.numpy)
        context.names[node.outputs[0]] = context.constant(empty)
    else:
        context.plain(node)


expand_row = Op(
    name="Expand", kind=OpKind.MOVEMENT, emit=_emit_expand,
    batch=batching.expanded,
    **settled(_expanded, all_open(lambda call: max(call.type(0).rank, length(call, 1))), 1),
    reference=lambda x, shape: x * np.ones(shape, x.dtype) if x.dtype.kind == "f"
    else np.broadcast_to(x, np.broadcast_shapes(x.shape, tuple(shape))),
    xla=lambda k, x, shape: k.np.broadcast_to(
        x, np.broadcast_shapes(x.shape, sizes(k.known(shape, "its sizes")))
    ),
    vjp=lambda g, y, x, shape: (sum_to(g, x), None),
    samples=(sample(normal(3, 1), fixed([2, 3, 4])),),
)  # fmt: skip


def known_ints(x: Tensor) -> list[int]:
    """Return the contents of a constant int vector."""
    contents = recorder().known(x)
    if contents is None:
        raise InvalidInput(f"the contents of {x!r} must be known when the graph is built")
    return [int(i) for i in np.atleast_1d(np.asarray(contents))]


def broadcast_to(x: Tensor, shape: Sequence[Dim]) -> Tensor:
    """Return `x` repeated to `shape`; `x` itself if nothing is repeated."""
    return x if tuple(shape) == x.shape else expand_row(x, dims_of(shape))


def size_of(dims: Sequence[Dim], dtype: DType) -> Tensor | float:
    """Return the product of sizes: a Python float if static, else a scalar tensor."""
    n = product(list(dims))
    return float(n) if isinstance(n, int) else dims_of([n]).reshape(()).cast(dtype)


def _unsqueeze(call: OpCall) -> Types:
    x = call.type(0)
    new = axes_of(x.rank + len(call.dims(1)), call.ints(1))
    dims = iter(x.shape)
    return (x.with_shape(1 if i in new else next(dims) for i in range(x.rank + len(new))),)


unsqueeze_row = Op(
    name="Unsqueeze",
    **_SAME_ELEMENTS,
    **settled(_unsqueeze, all_open(lambda call: call.type(0).rank + length(call, 1)), 1),
    reference=lambda x, axes: np.expand_dims(x, tuple(int(a) for a in axes)),
    xla=lambda k, x, axes: k.np.expand_dims(x, sizes(k.known(axes, "its axes"))),
    samples=(
        sample(normal(2, 3), fixed([0, -1])),
        sample(normal(2, 3), computed([0, -1]), smooth=()),
    ),
)


def _squeeze(call: OpCall) -> Types:
    x = call.type(0)
    # ONNX: without axes all axes of size 1 are removed, which a symbolic size cannot decide.
    if call.has(1) and call.dims(1):
        axes = axes_of(x.rank, call.ints(1))
    elif all(isinstance(d, int) for d in x.shape):
        axes = tuple(i for i, d in enumerate(x.shape) if d == 1)
    else:
        raise ShapeError(f"Squeeze of {x} needs axes: a symbolic size may turn out to be 1")
    wide = [i for i in axes if x.shape[i] != 1]
    if wide:
        raise ShapeError(f"Squeeze needs axes of size 1, got axis {wide[0]} of {x}")
    return (x.with_shape(d for i, d in enumerate(x.shape) if i not in axes),)


squeeze_row = Op(
    name="Squeeze",
    **_SAME_ELEMENTS,
    **settled(_squeeze, all_open(lambda call: call.type(0).rank - length(call, 1)), 1),
    reference=lambda x, axes=None: np.squeeze(
        x, None if axes is None or not len(axes) else tuple(int(a) for a in axes)
    ),
    xla=lambda k, x, axes=None: k.np.squeeze(
        x, None if axes is None or not len(axes) else sizes(k.known(axes, "its axes"))
    ),
    samples=(
        sample(normal(1, 3, 1), fixed([0])),
        sample(normal(1, 3)),
        sample(normal(3, 1, 2), computed([1]), smooth=()),
    ),
)


def _concat(call: OpCall) -> Types:
    first = call.type(0)
    axis = axes_of(first.rank, [call.attrs["axis"]])[0]
    total: Dim = 0
    for i in range(len(call.types)):
        t = call.type(i)
        others = [d for k, d in enumerate(t.shape) if k != axis]
        if t.rank != first.rank or others != [d for k, d in enumerate(first.shape) if k != axis]:
            raise ShapeError(f"Concat on axis {axis} needs equal other axes, got {first} and {t}")
        total = total + t.shape[axis]
    return (first.with_shape(total if k == axis else d for k, d in enumerate(first.shape)),)


def _concat_vjp(g: Tensor, y: Tensor, *xs: Tensor, axis: int) -> list[Tensor]:
    ends = [*accumulate((x.shape[axis] for x in xs), initial=0)]
    return [slice_axis(g, axis, start, end) for start, end in pairwise(ends)]


concat_row = Op(
    name="Concat",
    kind=OpKind.MOVEMENT,
    integer_form=IntegerForm.MIX,
    batch=batching.axis_shifted,
    infer=_concat,
    reference=lambda *xs, axis: np.concatenate(xs, axis),
    xla=lambda k, *xs, axis: k.np.concatenate(xs, axis),
    vjp=_concat_vjp,
    samples=(sample(normal(2, 3), normal(2, 1), normal(2, 2), axis=1),),
)


def slice_axis(x: Tensor, axis: int, start: Dim, end: Dim, step: int = 1) -> Tensor:
    """`x[..., start:end:step, ...]` along one axis; bounds may be symbolic."""
    return emit("Slice", x, dims_of([start]), dims_of([end]), np.array([axis]), np.array([step]))


pad_row = Op(
    name="Pad",
    kind=OpKind.MOVEMENT,
    settings=(2,),
    emit=padding.emit_pad,
    batch=batching.padded,
    **settled(padding.padded_type, all_open(lambda call: call.type(0).rank), 1, 3),
    reference=padding.pad_kernel,
    xla=padding.pad_xla,
    vjp=padding.pad_vjp,
    body=padding.pad_body,
    native=padding.has_pad,
    samples=(
        sample(normal(2, 3), fixed([1, 0, 0, 2])),
        sample(normal(2, 3), fixed([-1, 2, 1, -2])),
        sample(normal(2, 3), fixed([1, 2]), normal(), fixed([-1])),
        sample(normal(4, 3), fixed([1, 2, 2, 0]), mode="reflect"),
        sample(normal(2, 3), fixed([1, 2, 0, 3]), mode="edge"),
        sample(normal(4, 3), fixed([1, 2, 2, 3]), mode="wrap"),
        sample(normal(2, 3), fixed([1, 1]), None, fixed([1]), mode="reflect"),
        sample(ints(0, 9, 2, 3), fixed([1, 0, 0, 2]), fixed(7)),
    ),
)


def _where(call: OpCall) -> Types:
    if call.type(0).dtype != bool_:
        raise ShapeError(f"Where needs a bool condition, got {call.type(0)}")
    shapes = [call.type(i).shape for i in range(3)]
    return (call.type(1).with_shape(broadcast(call.row, *shapes)),)


def _where_vjp(g: Tensor, y: Tensor, condition: Tensor, a: Tensor, b: Tensor) -> Any:
    return None, sum_to(where(condition, g, 0.0), a), sum_to(where(condition, 0.0, g), b)


where = Op(
    name="Where",
    kind=OpKind.ELEMENTWISE,
    emit=emit_broadcast,
    batch=batching.elementwise,
    infer=_where,
    reference=np.where,
    vjp=_where_vjp,
    samples=(sample(bools(2, 3), normal(2, 3), normal(3)),),
)


def cast(x: TensorLike, dtype: DType | str) -> Tensor:
    """Return the same numbers in another element type."""
    return as_tensor(x).cast(as_dtype(dtype))


def sizes_of(shape: Sequence[Dim | int] | Dim) -> tuple[Dim, ...]:
    """Return the sizes of a shape; one number is the size of a vector, as in numpy."""
    sizes = tuple(shape) if isinstance(shape, Iterable) else (shape,)
    if not all(isinstance(d, (int, np.integer, Expr)) for d in sizes):
        raise InvalidInput(f"a shape is one or several whole numbers, got {shape!r:.80}")
    return tuple(d if isinstance(d, Expr) else int(d) for d in sizes)


def reshape(x: TensorLike, shape: Sequence[Dim | int] | Dim) -> Tensor:
    """Return the same elements in another shape; one size may be -1, and 0 is an empty axis."""
    return as_tensor(x).reshape(sizes_of(shape))


def flatten(x: Tensor, start: int = 1) -> Tensor:
    """x: (B, ...) -> (B, product of the rest): axes from `start` on become one."""
    if not 0 <= start < max(x.rank, 1):
        raise ShapeError(f"flatten needs an axis of {x.type} to start from, got {start}")
    return x.reshape((*x.shape[:start], product(list(x.shape[start:]))))


def expand(x: TensorLike, shape: Sequence[Dim | int] | Dim) -> Tensor:
    """Broadcast `x` to `shape`."""
    return expand_row(x, dims_of(sizes_of(shape)))


def squeeze(x: Tensor, *axes: int) -> Tensor:
    """Remove the given axes, which have size 1; by default all axes of size 1."""
    return squeeze_row(x, np.array(axes, np.int64) if axes else None)


def unsqueeze(x: Tensor, *axes: int) -> Tensor:
    """Insert axes of size 1 at the given positions of the result."""
    return unsqueeze_row(x, np.array(axes, np.int64))


def concat(xs: Sequence[TensorLike], axis: int = 0) -> Tensor:
    """Join tensors along an existing axis."""
    return concat_row(*xs, axis=axis)


def stack(xs: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Join tensors along a new axis."""
    parts = [unsqueeze(x, axis) for x in xs]
    return parts[0] if len(parts) == 1 else concat(parts, axis)


def pad(x: TensorLike, pads: Sequence[int], value: float = 0.0) -> Tensor:
    """Pad with a constant; `pads`: amounts before each axis, then amounts after each."""
    return pad_row(x, dims_of(list(pads)), value or None)


def shape(x: Tensor) -> Tensor:
    """Return the sizes of `x` as an int64 vector; symbolic sizes stay symbolic."""
    return dims_of(x.shape)


def constant(value: Any, dtype: DType | str | None = None) -> Tensor:
    """Return a constant of the graph; arrays keep their element type, Python floats are float32."""
    if dtype is None and not isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value)
        value = array.astype(np.float32) if array.dtype == np.float64 else array
    return as_tensor(np.asarray(value), None if dtype is None else as_dtype(dtype))


def zeros(shape: Sequence[Dim | int] | Dim, dtype: DType | str = DTYPES["float32"]) -> Tensor:
    """Return a tensor of zeros; sizes may be symbolic."""
    return full(shape, 0, dtype)


def ones(shape: Sequence[Dim | int] | Dim, dtype: DType | str = DTYPES["float32"]) -> Tensor:
    """Return a tensor of ones; sizes may be symbolic."""
    return full(shape, 1, dtype)


def full(shape: Sequence[Dim | int] | Dim, value: float, dtype: DType | str) -> Tensor:
    """Return a tensor of one repeated value; sizes may be symbolic."""
    return broadcast_to(constant(np.asarray(value, as_dtype(dtype).numpy)), sizes_of(shape))
