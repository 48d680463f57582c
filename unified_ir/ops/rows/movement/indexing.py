"""Rows that read or write by computed positions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.dims import Dim, Expr, product
from triplane.unified_ir.ir.graph import Node
from triplane.unified_ir.ir.types import (
    DTYPES,
    DType,
    ShapeError,
    TensorType,
    as_dtype,
    float16,
    float32,
    int64,
)
from triplane.unified_ir.ops import batching
from triplane.unified_ir.ops.emission import EmissionContext
from triplane.unified_ir.ops.lowering import XlaContext, positions, taken, written
from triplane.unified_ir.ops.row import Op, OpCall, OpKind
from triplane.unified_ir.ops.rows.movement.structure import (
    axes_of,
    broadcast_to,
    concat,
    same,
    unsqueeze,
    where,
    zeros,
)
from triplane.unified_ir.ops.samples import (
    apart,
    between,
    computed,
    fixed,
    ints,
    literal,
    normal,
    sample,
)
from triplane.unified_ir.ops.tensor import Tensor, TensorLike, dims_of

Types = tuple[TensorType, ...]


def _gather(call: OpCall) -> Types:
    x, index = call.type(0), call.type(1)
    axis = axes_of(x.rank, [call.attrs["axis"]])[0]
    return (x.with_shape((*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])),)


def _gather_vjp(g: Tensor, y: Tensor, x: Tensor, index: Tensor, *, axis: int) -> Any:
    """Add each slice of `g` to its row of zeros like `x`."""
    axis %= x.rank
    front = list(range(axis, axis + index.rank))
    rest = [i for i in range(g.rank) if i not in front]
    # ScatterND writes along the first axes, so the gathered axis goes first and back again.
    moved = g.transpose(*front, *rest) if axis else g
    order = [axis, *[i for i in range(x.rank) if i != axis]]
    base = zeros([x.shape[i] for i in order], x.dtype)
    added = scatter_nd(base, unsqueeze(index.cast(int64), -1), moved, reduction="add")
    return (added.transpose(*map(int, np.argsort(order))) if axis else added, None)


def _gather_xla(k: XlaContext, x: Any, index: Any, *, axis: int) -> Any:
    axis %= x.ndim
    at = positions(k, index, x.shape[axis])
    if isinstance(at, np.ndarray) and not at.ndim:
        return k.lax.index_in_dim(x, int(at), axis, keepdims=False)
    return taken(k, x, (*[slice(None)] * axis, at))


gather = Op(
    name="Gather",
    kind=OpKind.INDEXING,
    batch=batching.gathered,
    infer=_gather,
    reference=lambda x, index, axis: np.take(x, index, axis),
    xla=_gather_xla,
    vjp=_gather_vjp,
    samples=(
        sample(normal(4, 3), ints(0, 4, 2, 2)),
        sample(normal(2, 5, 3), ints(0, 5, 4), axis=1),
        sample(normal(4, 3), fixed(-1)),
    ),
)


Take = Callable[[Tensor], Tensor]
"""Reads at the positions that a scatter writes to."""
Put = Callable[..., Tensor]
"""put(base, updates, reduction): that scatter again, of other values."""


def _scatter_vjp(
    g: Tensor, y: Tensor, x: Tensor, updates: Tensor, *,
    reduction: str, take: Take, put: Put, stays: Callable[[], Tensor],
) -> tuple[Tensor, None, Tensor]:  # fmt: skip
    """Return cotangents of x and of the updates. Extremes that tie share equally, as in PyTorch.

    stays: which updates were not overwritten, in a shape that broadcasts to theirs.
    """
    if reduction == "add":
        return g, None, take(g)
    if reduction == "none":
        # With duplicate positions one update survives; the cotangent belongs to that one alone.
        return put(g, updates * 0.0, "none"), None, where(stays(), take(g), 0.0)
    if reduction == "mul":
        ones = broadcast_to(x.build.as_operand(1, x.dtype), x.shape)
        # y = x prod(u), so dy/dx = prod(u) and dy/du_k = x times the product of the other updates.
        d_x, d_y = g * put(ones, updates, "mul"), take(g * x)
        return d_x, None, d_y * _other_updates(ones, updates, take, put)
    hit = (x == y).cast(g.dtype)
    hits = (updates == take(y)).cast(g.dtype)
    # The number of ties at a position: x itself, if it is the extreme, and all updates equal to it.
    share = g / put(hit, hits, "add")
    return share * hit, None, take(share) * hits


def _other_updates(ones: Tensor, updates: Tensor, take: Take, put: Put) -> Tensor:
    """Return the product of all other updates of a position: a quotient unless one of them is 0."""
    zero = updates == 0.0
    nonzero = where(zero, 1.0, updates)
    # Zeros per position. With one zero, only the update that is zero has a product other than 0;
    # with two or more, none has.
    count = take(put(ones * 0.0, zero.cast(updates.dtype), "add"))
    quotient = take(put(ones, updates, "mul")) / nonzero
    alone = where((count == 1.0) & zero, take(put(ones, nonzero, "mul")), 0.0)
    return where(count == 0.0, quotient, alone)


def _scatter_nd_vjp(
    g: Tensor, y: Tensor, x: Tensor, index: Tensor, updates: Tensor, *, reduction: str
) -> Any:
    def put(base: Tensor, values: Tensor, how: str) -> Tensor:
        return scatter_nd(base, index, values, reduction=how)

    def take(t: Tensor) -> Tensor:
        return gather_nd(t, index)

    def stays() -> Tensor:
        count, depth = index.shape[:-1], int(index.shape[-1])  # type: ignore[arg-type]
        # Writing the number of each update and reading it back shows which one the engine wrote
        # last.
        number = _numbers(count)
        written = scatter_nd(zeros(x.shape[:depth], int64), index, number)
        last = gather_nd(written, index) == number
        return last.reshape((*count, *[1] * (updates.rank - len(count))))

    return _scatter_vjp(g, y, x, updates, reduction=reduction, take=take, put=put, stays=stays)


def _numbers(shape: tuple[Dim, ...]) -> Tensor:
    """Number the elements of a shape: scattering them shows which update of a position was last."""
    return arange(product(shape)).reshape(shape)


def _written(call: OpCall, wanted: tuple[Dim, ...]) -> Types:
    """Return the type of x; refuse updates of another shape than the positions need."""
    updates = call.type(2)
    pairs = zip(updates.shape, wanted, strict=False)
    if updates.rank != len(wanted) or any(
        isinstance(a, int) and isinstance(b, int) and a != b for a, b in pairs
    ):
        shown = ",".join(map(str, wanted))
        raise ShapeError(f"{call.row} needs updates [{shown}] at these positions, got {updates}")
    return same(call)


def _scatter_nd(call: OpCall) -> Types:
    x, index = call.type(0), call.type(1)
    depth = index.shape[-1] if index.rank else None
    if not isinstance(depth, int) or depth > x.rank:
        raise ShapeError(f"ScatterND into {x} needs positions (..., {x.rank} at most), got {index}")
    return _written(call, (*index.shape[:-1], *x.shape[depth:]))


def _scatter_elements(call: OpCall) -> Types:
    x, index = call.type(0), call.type(1)
    axes_of(x.rank, [call.attrs["axis"]])
    if x.rank != index.rank:
        raise ShapeError(f"ScatterElements needs positions of {x.rank} axes for {x}, got {index}")
    return _written(call, index.shape)


def _reduces(node: Node, opset: int) -> bool:
    """Return whether the opset has the reduction; maxima and minima came with opset 18."""
    return opset >= 18 or node.attrs.get("reduction") not in {"max", "min"}


_NARROW: Final = frozenset({float16, DTYPES["bfloat16"]})


def _emit_scatter(context: EmissionContext, node: Node) -> None:
    """Accumulate 16-bit types in float32: onnxruntime 1.31 has no kernels for them."""
    dtype = node.outputs[0].type.dtype
    if dtype not in _NARROW or node.attrs.get("reduction", "none") == "none":
        context.plain(node)
        return
    x, index, updates = context.inputs(node)
    wide = [context.emit("Cast", v, to=float32.onnx) for v in (x, updates)]
    scattered = context.emit(node.op.name, wide[0], index, wide[1], **node.attrs)
    context.add("Cast", [scattered], context.output_names(node), to=dtype.onnx)


def _scatter_nd_batch(call: batching.BatchedCall) -> tuple[Tensor, ...]:
    """Make the number of the slice the first part of each position."""
    x, index, updates = call.all()
    return call.apply([x, _with_batch(index, 1), updates])


def _scatter_nd_xla(k: XlaContext, x: Any, index: Any, updates: Any, *, reduction: str) -> Any:
    depth = index.shape[-1]
    if not depth:  # each update is one of the whole tensor
        at = (np.zeros(index.shape[:-1], np.int32),)
        return written(k, k.np.expand_dims(x, 0), at, updates, reduction)[0]
    at = tuple(positions(k, index[..., i], x.shape[i]) for i in range(depth))
    return written(k, x, at, updates, reduction)


scatter_nd = Op(
    name="ScatterND",
    kind=OpKind.INDEXING,
    emit=_emit_scatter,
    batch=_scatter_nd_batch,
    infer=_scatter_nd,
    xla=_scatter_nd_xla,
    vjp=_scatter_nd_vjp,
    native=_reduces,
    samples=(
        sample(normal(5, 2), fixed([[1], [3], [1]]), normal(3, 2), reduction="add"),
        sample(normal(5), fixed([[1], [3]]), normal(2)),
        sample(normal(5, 2), fixed([[1], [-2], [1]]), normal(3, 2), reduction="mul"),
        sample(apart(5, 2), fixed([[1], [-2], [1]]), between(0.01, 0.09, 3, 2), reduction="max"),
        sample(apart(5, 2), fixed([[1], [-2], [1]]), between(0.01, 0.09, 3, 2), reduction="min"),
        sample(normal(5, 2), fixed([[1], [-2], [3], [1]]), normal(4, 2)),
    ),
)


def _gather_nd(call: OpCall) -> Types:
    x, index = call.type(0), call.type(1)
    depth, b = index.shape[-1], call.attrs["batch_dims"]
    if not isinstance(depth, int) or b + depth > x.rank:
        raise InvalidInput(
            f"GatherND of {x} needs an index whose last axis is static and at most {x.rank - b} "
            f"long, got {index}"
        )
    if x.shape[:b] != index.shape[:b]:
        raise ShapeError(f"GatherND needs equal first {b} axes, got {x} and index {index}")
    return (x.with_shape((*index.shape[:-1], *x.shape[b + depth :])),)


def _gather_nd_vjp(g: Tensor, y: Tensor, x: Tensor, index: Tensor, *, batch_dims: int) -> Any:
    base = zeros(x.shape, x.dtype)
    return scatter_nd(base, _with_batch(index, batch_dims), g, reduction="add"), None


def _with_batch(index: Tensor, batch_dims: int) -> Tensor:
    """Return positions with those of the batch axes, which they leave out, in front."""
    index = index.cast(int64)
    lead = index.shape[:-1]
    own = [batching.new_axes(arange(lead[k]), 1, len(lead) - k - 1) for k in range(batch_dims)]
    wide = [unsqueeze(broadcast_to(i, lead), -1) for i in own]
    return concat([*wide, index], -1) if wide else index


def _gather_nd_xla(k: XlaContext, x: Any, index: Any, *, batch_dims: int) -> Any:
    count, depth = index.shape[:-1], index.shape[-1]
    if not depth:  # each position is that of a whole slice
        wide = k.np.expand_dims(x, tuple(range(batch_dims, len(count))))
        return k.np.broadcast_to(wide, (*count, *x.shape[batch_dims:]))
    lead = np.ogrid[tuple(slice(n) for n in count)][:batch_dims]
    own = [positions(k, index[..., i], x.shape[batch_dims + i]) for i in range(depth)]
    return taken(k, x, (*lead, *own))


gather_nd = Op(
    name="GatherND",
    kind=OpKind.INDEXING,
    batch=lambda call: call.apply(call.all(), batch_dims=call.attrs.get("batch_dims", 0) + 1),
    infer=_gather_nd,
    xla=_gather_nd_xla,
    vjp=_gather_nd_vjp,
    samples=(
        sample(normal(4, 3), fixed([[0, 1], [3, 2]])),
        sample(normal(4, 3), fixed([[1]])),
        sample(normal(2, 4, 3), ints(0, 4, 2, 5, 1), batch_dims=1),
        sample(normal(2, 3, 4), ints(-4, 4, 2, 3, 1), batch_dims=2),
    ),
)


def _gather_elements(call: OpCall) -> Types:
    x, index = call.type(0), call.type(1)
    axis = axes_of(x.rank, [call.attrs["axis"]])[0]
    sizes = [p for i, p in enumerate(zip(x.shape, index.shape, strict=False)) if i != axis]
    if x.rank != index.rank or any(_exceeds(n, d) for d, n in sizes):
        raise ShapeError(
            f"GatherElements along axis {axis} needs an index within x on all other axes, got {x} "
            f"and {index}"
        )
    return (x.with_shape(index.shape),)


def _exceeds(n: Dim, d: Dim) -> bool:
    """Return whether an index of n rows may read more than d; symbols may have any size."""
    if isinstance(n, int) and isinstance(d, int):
        return n > d
    return isinstance(n, Expr) and isinstance(d, Expr) and n != d


def _gather_elements_kernel(x: Any, index: Any, *, axis: int) -> Any:
    """Read elements; the index may be shorter than x on the other axes."""
    at = axis % x.ndim
    read = tuple(slice(None if i == at else n) for i, n in enumerate(index.shape))
    return np.take_along_axis(x[read], index, at)


def _gather_elements_xla(k: XlaContext, x: Any, index: Any, *, axis: int) -> Any:
    return taken(k, x, _element_positions(k, x, index, axis))


def _element_positions(k: XlaContext, x: Any, index: Any, axis: int) -> tuple[Any, ...]:
    """Return, for each element of an index along `axis`, its positions, which broadcast to it."""
    axis %= x.ndim
    sides = np.ogrid[tuple(slice(n) for n in index.shape)]
    at = [index if i == axis else sides[i] for i in range(x.ndim)]
    return tuple(positions(k, a, n) for a, n in zip(at, x.shape, strict=True))


def _gather_elements_vjp(g: Tensor, y: Tensor, x: Tensor, index: Tensor, *, axis: int) -> Any:
    base = zeros(x.shape, x.dtype)
    return scatter_elements(base, index, g, axis=axis, reduction="add"), None


gather_elements = Op(
    name="GatherElements",
    kind=OpKind.INDEXING,
    batch=batching.axis_shifted,
    infer=_gather_elements,
    reference=_gather_elements_kernel,
    xla=_gather_elements_xla,
    vjp=_gather_elements_vjp,
    samples=(
        sample(normal(3, 4), ints(0, 4, 3, 2), axis=1),
        sample(normal(3, 4, 2), ints(-3, 3, 5, 3, 1), axis=-3),
    ),
)


def _scatter_elements_vjp(
    g: Tensor, y: Tensor, x: Tensor, index: Tensor, updates: Tensor, *, axis: int, reduction: str
) -> Any:
    def put(base: Tensor, values: Tensor, how: str) -> Tensor:
        return scatter_elements(base, index, values, axis=axis, reduction=how)

    def take(t: Tensor) -> Tensor:
        return gather_elements(t, index, axis=axis)

    def stays() -> Tensor:
        number = _numbers(updates.shape)
        return take(put(zeros(x.shape, int64), number, "none")) == number

    return _scatter_vjp(g, y, x, updates, reduction=reduction, take=take, put=put, stays=stays)


def _scatter_elements_xla(
    k: XlaContext, x: Any, index: Any, updates: Any, *, axis: int, reduction: str
) -> Any:
    return written(k, x, _element_positions(k, x, index, axis), updates, reduction)


_places = fixed([[0], [2], [-2]])

scatter_elements = Op(
    name="ScatterElements", kind=OpKind.INDEXING, emit=_emit_scatter,
    batch=batching.axis_shifted,
    infer=_scatter_elements,
    xla=_scatter_elements_xla,
    vjp=_scatter_elements_vjp,
    native=_reduces,
    samples=(
        sample(normal(3, 4), fixed([[0], [2], [2]]), normal(3, 1), axis=1, reduction="add"),
        sample(normal(3, 4), fixed([[0, 1, 1, 2]]), normal(1, 4)),
        sample(normal(3, 4), fixed([[0, 0], [2, 1], [2, 2]]), normal(3, 2), axis=1,
               reduction="mul"),
        sample(apart(3, 4), _places, between(0.01, 0.09, 3, 1), axis=1, reduction="max"),
        sample(apart(3, 4), _places, between(0.01, 0.09, 3, 1), axis=1, reduction="min"),
        sample(normal(3, 4), fixed([[0, 2, 0], [2, 2, -2]]), normal(2, 3), axis=1),
    ),
)  # fmt: skip


def _range(start: Any, limit: Any, delta: Any) -> Any:
    return start + delta * np.arange(_steps(start, limit, delta)).astype(start.dtype)


def _steps(start: Any, limit: Any, delta: Any) -> int:
    if delta == 0:
        raise InvalidInput("Range needs a step that is not 0")
    return max(0, math.ceil(float(limit - start) / float(delta)))


def _range_xla(k: XlaContext, start: Any, limit: Any, delta: Any) -> Any:
    start, limit, delta = (k.known(x, "its bounds") for x in (start, limit, delta))
    return start + delta * k.np.arange(_steps(start, limit, delta)).astype(start.dtype)


def _range_vjp(g: Tensor, y: Tensor, start: Tensor, limit: Tensor, delta: Tensor) -> Any:
    """y_i = start + i delta; the number of elements is constant almost everywhere."""
    steps = arange(g.shape[0]).cast(g.dtype)
    return g.sum(), None, (g * steps).sum()


def _range_types(call: OpCall) -> Types:
    length = _range_length(call)
    return (call.type(0).with_shape((call.opened() if length is None else length,)),)


range_row = Op(
    name="Range",
    kind=OpKind.SOURCE,
    settings=(0, 1, 2),
    data_dependent_dims=lambda call: int(_range_length(call) is None),
    infer=_range_types,
    reference=_range,
    xla=_range_xla,
    vjp=_range_vjp,
    samples=(
        sample(fixed(0), fixed(5), fixed(1)),
        sample(literal(0.5), literal(2.0), literal(0.25)),
        sample(fixed(0.5), fixed(2.1), fixed(0.3)),
        sample(computed(9), computed(2), computed(-2)),
    ),
)


def _range_length(call: OpCall) -> Dim | None:
    """Return how many steps there are, or None if only the data decide."""
    if any(k is None for k in call.known):
        return None
    start, limit, delta = (
        k[0] if isinstance(k, tuple) else np.ravel(k)[0] for k in call.known if k is not None
    )
    if not any(isinstance(d, Expr) for d in (start, limit, delta)):
        return _steps(start, limit, delta)
    return limit - int(start) if delta == 1 and not isinstance(start, Expr) else None


def arange(start: Any, stop: Any = None, step: Any = 1) -> Tensor:
    """0, 1, ..., start - 1, or start, start + step, ... before stop; bounds may be symbolic.

    Whole numbers are int64. Bounds that are computed while the graph runs leave the length open.
    """
    bounds = (0, start, 1) if stop is None else (start, stop, step)
    return range_row(*(dims_of([b]).reshape(()) if isinstance(b, Expr) else b for b in bounds))


def one_hot(labels: Tensor, depth: int, dtype: DType | str = "float32") -> Tensor:
    """labels: (...) ints -> (..., depth), 1 at the label; zeros for one outside 0..depth-1."""
    return (unsqueeze(labels.cast(int64), -1) == np.arange(depth)).cast(as_dtype(dtype))


def embedding(table: Tensor, ids: TensorLike) -> Tensor:
    """table: (V, D), ids: (...) ints -> (..., D)."""
    return gather(table, ids, axis=0)
