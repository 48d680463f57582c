"""Rows that move or select elements without computing, and sums, which are their transposes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.dims import Dim, Expr, floor_div, is_open, product
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
from triplane.unified_ir.ops.emission import emit_broadcast
from triplane.unified_ir.ops.infer import broadcast
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
from triplane.unified_ir.ops.rows.movement.emit_movement import (
    emit_constant,
    emit_dims,
    emit_expand,
    emit_reshape,
)
from triplane.unified_ir.ops.rows.movement.padding import (
    emit_pad,
    has_pad,
    pad_body,
    pad_kernel,
    pad_vjp,
    padded_type,
)
from triplane.unified_ir.ops.rows.movement.shape_assertions import assume_shape
from triplane.unified_ir.ops.samples import bools, computed, fixed, ints, normal, sample
from triplane.unified_ir.ops.settings import all_open, length, settled
from triplane.unified_ir.ops.tensor import Tensor, TensorLike, as_tensor, dims_of, emit

Types = tuple[TensorType, ...]


def same(call: OpCall) -> Types:
    """One output, typed like the first operand."""
    return (call.type(0),)


def sum_to(g: Tensor, like: Tensor) -> Tensor:
    """The transpose of broadcasting `like` to the shape of `g`: sums the repeated axes.

    An axis of a size that only the data decide is repeated where `like` has one element, else it is
    as long as that of `like`, as a broadcast leaves it; the run compares.
    """
    if g.shape == like.shape:
        return g
    lead = g.rank - like.rank
    pairs = [*zip(like.shape, g.shape[lead:], strict=True)]
    open_ = [a not in {1, b} and is_open(b) for a, b in pairs]
    inner = [
        lead + i
        for i, ((a, b), kept) in enumerate(zip(pairs, open_, strict=True))
        if a != b and not kept
    ]
    if lead or inner:
        g = g.sum([*range(lead), *inner])
        g = g.reshape([b if kept else a for (a, b), kept in zip(pairs, open_, strict=True)])
    return assume_shape(g, like.shape)


def axes_of(rank: int, axes: Sequence[int] | None) -> tuple[int, ...]:
    """Axes as sorted non-negative ints; all of them for None."""
    if axes is None:
        return tuple(range(rank))
    bad = [a for a in axes if not -rank <= a < rank]
    if bad:
        raise ShapeError(f"axis {bad[0]} is outside a tensor of {rank} axes")
    normalized = sorted({int(a) % rank for a in axes})
    if len(normalized) != len(axes):
        raise ShapeError(f"axes {tuple(map(int, axes))} of {rank} name one twice; name each once")
    return tuple(normalized)


def _constant(call: OpCall) -> Types:
    return (type_of(call.attrs["value"]),)


constant_row = Op(
    name="Constant",
    kind=OpKind.SOURCE,
    total=True,
    emit=emit_constant,
    infer=_constant,
    reference=lambda value, **_: value,
)


dims_row = Op(
    name="Dims",
    kind=OpKind.SOURCE,
    emit=emit_dims,
    domain=DOMAIN,
    attrs={"dims": AttrSpec("DIMS", required=True)},
    infer=lambda call: (TensorType(int64, (len(call.attrs["dims"]),)),),
    reference=lambda dims: np.array(dims, np.int64),
)
"""Sizes of the scope's symbols as an int64 vector; lowers to Shape and integer arithmetic."""


identity = Op(
    name="Identity", kind=OpKind.MOVEMENT, total=True,
    batch=batching.elementwise,
    preserves_elements=True,
    infer=same,
    reference=lambda x: x,
    vjp=lambda g, y, x: (g,),
    samples=(sample(normal(2, 3)),),
)  # fmt: skip


stop_gradient = Op(
    name="StopGradient",
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
"""The operand itself; no gradient passes."""


def _cast_reference(x: Any, *, to: int, **_: Any) -> Any:
    return x.astype(dtype_attr(to).numpy)


cast_row = Op(
    name="Cast",
    kind=OpKind.MOVEMENT,
    total=True,
    batch=batching.elementwise,
    infer=lambda call: (call.type(0).with_dtype(dtype_attr(call.attrs["to"])),),
    reference=_cast_reference,
    vjp=lambda g, y, x, **_: (g.cast(x.dtype) if x.dtype.is_float and y.dtype.is_float else None,),
    samples=(
        sample(normal(2, 3), to=1),
        sample(normal(2, 3), to=9, smooth=()),
        sample(ints(0, 9, 4), to=1, smooth=()),
    ),
)


def _reshape(call: OpCall) -> Types:
    """Sizes are held to when the graph runs where numbers or the data's own meet symbols."""
    x, wanted = call.type(0), list(call.dims(1))
    if not call.attrs["allowzero"]:
        if any(d == 0 for d in wanted[x.rank :]):
            raise ShapeError(f"Reshape of {x} to {wanted} keeps the size of an axis it has not")
        wanted = [x.shape[i] if d == 0 else d for i, d in enumerate(wanted)]
    if wanted.count(-1) > 1:
        raise ShapeError(f"Reshape takes one -1 at most, got {wanted}")
    rest = product([d for d in wanted if d != -1])
    if -1 in wanted:
        if rest == 0:
            shown = ", ".join(map(str, wanted))
            raise ShapeError(
                f"Reshape of {x} to ({shown}): beside an empty axis -1 may be any size; write it"
            )
        wanted[wanted.index(-1)] = floor_div(x.size, rest)
    held = isinstance(x.size, Expr) and isinstance(rest, int) and rest > 0
    held = held or is_open(x.size) or is_open(rest)
    if product(wanted) != x.size and not held:
        shown = ", ".join(map(str, call.dims(1)))
        raise ShapeError(
            f"Reshape of {x} to ({shown}) changes the element count "
            f"from {x.size} to {product(wanted)}"
        )
    return (x.with_shape(wanted),)


def _reshape_reference(x: Any, shape: Any, *, allowzero: int) -> Any:
    copied = {i for i, d in enumerate(shape) if d == 0 and not allowzero}
    wanted = [x.shape[i] if i in copied else int(d) for i, d in enumerate(shape)]
    if not x.size and -1 in wanted:  # numpy finds no size beside a 0, ONNX leaves copied axes out
        whole = math.prod(d for i, d in enumerate(x.shape) if i not in copied)
        part = math.prod(d for i, d in enumerate(wanted) if i not in copied and d != -1)
        wanted = [(whole // part if part else 0) if d == -1 else d for d in wanted]
    return x.reshape(wanted)


reshape_row = Op(
    name="Reshape",
    kind=OpKind.MOVEMENT,
    integer_form=IntegerForm.COPY,
    total=True,
    emit=emit_reshape,
    batch=batching.reshaped,
    preserves_elements=True,
    **settled(_reshape, all_open(lambda call: length(call, 1)), 1),
    reference=_reshape_reference,
    vjp=lambda g, y, x, shape, **_: (g.reshape(x.shape), None),
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


def _transpose_vjp(g: Tensor, y: Tensor, x: Tensor, *, perm: Any) -> tuple[Tensor]:
    return (g.transpose(*map(int, np.argsort(perm)) if perm else ()),)


transpose = Op(
    name="Transpose",
    kind=OpKind.MOVEMENT,
    integer_form=IntegerForm.COPY,
    batch=batching.transposed,
    infer=_transpose,
    reference=lambda x, perm: x.transpose(perm),
    vjp=_transpose_vjp,
    samples=(sample(normal(2, 3, 4), perm=(1, 2, 0)), sample(normal(2, 3))),
)


def _expanded(call: OpCall) -> Types:
    x = call.type(0)
    return (x.with_shape(broadcast(call.row, x.shape, call.dims(1))),)


expand_row = Op(
    name="Expand", kind=OpKind.MOVEMENT, emit=emit_expand,
    batch=batching.expanded,
    **settled(_expanded, all_open(lambda call: max(call.type(0).rank, length(call, 1))), 1),
    reference=lambda x, shape: x * np.ones(shape, x.dtype) if x.dtype.kind == "f"
    else np.broadcast_to(x, np.broadcast_shapes(x.shape, tuple(shape))),
    vjp=lambda g, y, x, shape: (sum_to(g, x), None),
    samples=(sample(normal(3, 1), fixed([2, 3, 4])),),
)  # fmt: skip


def known_ints(x: Tensor) -> list[int]:
    """The contents of a constant int vector."""
    contents = recorder().known(x)
    if contents is None:
        raise InvalidInput(f"{x!r} must be constant here")
    return [int(i) for i in np.atleast_1d(np.asarray(contents))]


def broadcast_to(x: Tensor, shape: Sequence[Dim]) -> Tensor:
    """`x` repeated to `shape`; `x` itself where nothing is repeated."""
    return x if tuple(shape) == x.shape else expand_row(x, dims_of(shape))


def size_of(dims: Sequence[Dim], dtype: DType) -> Tensor | float:
    """The product of sizes as a number: a Python float where static, else a scalar tensor."""
    n = product(list(dims))
    return float(n) if isinstance(n, int) else dims_of([n]).reshape(()).cast(dtype)


def _unsqueeze(call: OpCall) -> Types:
    x = call.type(0)
    new = axes_of(x.rank + len(call.dims(1)), call.ints(1))
    dims = iter(x.shape)
    return (x.with_shape(1 if i in new else next(dims) for i in range(x.rank + len(new))),)


unsqueeze_row = Op(
    name="Unsqueeze",
    kind=OpKind.MOVEMENT,
    integer_form=IntegerForm.COPY,
    batch=batching.reshaped,
    preserves_elements=True,
    **settled(_unsqueeze, all_open(lambda call: call.type(0).rank + length(call, 1)), 1),
    reference=lambda x, axes: np.expand_dims(x, tuple(int(a) for a in axes)),
    vjp=lambda g, y, x, axes: (g.reshape(x.shape), None),
    samples=(
        sample(normal(2, 3), fixed([0, -1])),
        sample(normal(2, 3), computed([0, -1]), smooth=()),
    ),
)


def _squeeze(call: OpCall) -> Types:
    x = call.type(0)
    if call.has(1) and call.dims(1):
        axes = axes_of(x.rank, call.ints(1))
    elif all(isinstance(d, int) for d in x.shape):
        axes = tuple(i for i, d in enumerate(x.shape) if d == 1)
    else:
        raise ShapeError(f"Squeeze of {x} needs axes: a symbolic size may turn out to be 1")
    wide = [i for i in axes if x.shape[i] != 1]
    if wide:
        raise ShapeError(f"Squeeze of axis {wide[0]} of {x}, whose size is not 1")
    return (x.with_shape(d for i, d in enumerate(x.shape) if i not in axes),)


squeeze_row = Op(
    name="Squeeze",
    kind=OpKind.MOVEMENT,
    integer_form=IntegerForm.COPY,
    batch=batching.reshaped,
    preserves_elements=True,
    **settled(_squeeze, all_open(lambda call: call.type(0).rank - length(call, 1)), 1),
    reference=lambda x, axes=None: np.squeeze(
        x, None if axes is None or not len(axes) else tuple(int(a) for a in axes)
    ),
    vjp=lambda g, y, x, axes=None: (g.reshape(x.shape), None),
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
    start: Dim = 0
    parts = []
    for x in xs:
        end = start + x.shape[axis]
        parts.append(slice_axis(g, axis, start, end))
        start = end
    return parts


concat_row = Op(
    name="Concat",
    kind=OpKind.MOVEMENT,
    integer_form=IntegerForm.MIX,
    batch=batching.axis_shifted,
    infer=_concat,
    reference=lambda *xs, axis: np.concatenate(xs, axis),
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
    emit=emit_pad,
    batch=batching.padded,
    **settled(padded_type, all_open(lambda call: call.type(0).rank), 1, 3),
    reference=pad_kernel,
    vjp=pad_vjp,
    body=pad_body,
    native=has_pad,
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
    return (
        None,
        sum_to(where(condition, g, 0.0), a),
        sum_to(where(condition, 0.0, g), b),
    )


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
    """The same numbers in another element type."""
    return as_tensor(x).cast(as_dtype(dtype))


def reshape(x: TensorLike, shape: Sequence[Dim | int]) -> Tensor:
    """The same elements in another shape; one size may be -1, and 0 is an empty axis."""
    return as_tensor(x).reshape(tuple(shape))


def flatten(x: Tensor, start: int = 1) -> Tensor:
    """x: (B, ...) -> (B, product of the rest): axes from `start` on become one."""
    if not 0 <= start < max(x.rank, 1):
        raise ShapeError(f"flatten from axis {start} of {x.type}")
    return x.reshape((*x.shape[:start], product(list(x.shape[start:]))))


def expand(x: TensorLike, shape: Sequence[Dim | int]) -> Tensor:
    """`x` broadcast to `shape`."""
    return expand_row(x, dims_of(list(shape)))


def squeeze(x: Tensor, *axes: int) -> Tensor:
    """Drops the given axes, which have size 1; all of size 1 by default."""
    return squeeze_row(x, np.array(axes, np.int64) if axes else None)


def unsqueeze(x: Tensor, *axes: int) -> Tensor:
    """Inserts axes of size 1 at the given positions of the result."""
    return unsqueeze_row(x, np.array(axes, np.int64))


def concat(xs: Sequence[TensorLike], axis: int = 0) -> Tensor:
    """Joins tensors along an existing axis."""
    return concat_row(*xs, axis=axis)


def stack(xs: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Joins tensors along a new axis."""
    parts = [unsqueeze(x, axis) for x in xs]
    return parts[0] if len(parts) == 1 else concat(parts, axis)


def pad(x: TensorLike, pads: Sequence[int], value: float = 0.0) -> Tensor:
    """Pads with a constant; `pads`: amounts before each axis, then amounts after each."""
    return pad_row(x, dims_of(list(pads)), value or None)


def shape(x: Tensor) -> Tensor:
    """Sizes of `x` as an int64 vector; symbolic sizes stay symbolic."""
    return dims_of(x.shape)


def constant(value: Any, dtype: DType | str | None = None) -> Tensor:
    """A constant of the graph; arrays keep their element type, Python floats are float32."""
    if dtype is None and not isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value)
        value = array.astype(np.float32) if array.dtype == np.float64 else array
    return as_tensor(np.asarray(value), None if dtype is None else as_dtype(dtype))


def zeros(shape: Sequence[Dim | int], dtype: DType | str = DTYPES["float32"]) -> Tensor:
    """A tensor of zeros; sizes may be symbolic."""
    return full(shape, 0, dtype)


def ones(shape: Sequence[Dim | int], dtype: DType | str = DTYPES["float32"]) -> Tensor:
    """A tensor of ones; sizes may be symbolic."""
    return full(shape, 1, dtype)


def full(shape: Sequence[Dim | int], value: float, dtype: DType | str) -> Tensor:
    """A tensor of one repeated value; sizes may be symbolic."""
    return broadcast_to(constant(np.asarray(value, as_dtype(dtype).numpy)), tuple(shape))
