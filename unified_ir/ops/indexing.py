"""Rows that read or write by computed positions, and extremes, whose gradient is such a write."""

from __future__ import annotations

from typing import Any

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.dims import Dim
from triplane.unified_ir.ir.types import DType, ShapeError, TensorType, as_dtype, int64
from triplane.unified_ir.ops import batching
from triplane.unified_ir.ops.row import Call, Op
from triplane.unified_ir.ops.samples import given, ints, normal, sample
from triplane.unified_ir.ops.settings import settled
from triplane.unified_ir.ops.structure import (
    axes_of,
    reshape,
    same,
    unsqueeze,
    zeros,
)
from triplane.unified_ir.ops.tensor import Tensor, TensorLike, dims_of

Types = tuple[TensorType, ...]


def _gather(call: Call) -> Types:
    x, index = call.type(0), call.type(1)
    axis = axes_of(x.rank, [call.attrs["axis"]])[0]
    return (x.with_shape((*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])),)


def _gather_vjp(g: Tensor, y: Tensor, x: Tensor, index: Tensor, *, axis: int) -> Any:
    """Adds each slice of `g` at its row of zeros like `x`."""
    axis %= x.rank
    front = list(range(axis, axis + index.rank))
    rest = [i for i in range(g.rank) if i not in front]
    moved = g.transpose(*front, *rest) if axis else g
    order = [axis, *[i for i in range(x.rank) if i != axis]]
    base = zeros([x.shape[i] for i in order], x.dtype)
    added = scatter_nd(base, unsqueeze(index.cast(int64), -1), moved, reduction="add")
    return (added.transpose(*map(int, np.argsort(order))) if axis else added, None)


gather = Op(
    name="Gather",
    batch=batching.gathered,
    infer=_gather,
    reference=lambda x, index, axis: np.take(x, index, axis),
    vjp=_gather_vjp,
    samples=(
        sample(normal(4, 3), ints(0, 4, 2, 2)),
        sample(normal(2, 5, 3), ints(0, 5, 4), axis=1),
        sample(normal(4, 3), given(-1)),
    ),
)


def _scatter_nd_vjp(
    g: Tensor, y: Tensor, x: Tensor, index: Tensor, updates: Tensor, *, reduction: str
) -> Any:
    if reduction == "add":
        return g, None, gather_nd(g, index)
    if reduction == "none":
        return scatter_nd(g, index, updates * 0.0), None, gather_nd(g, index)
    raise InvalidInput(f"ScatterND with reduction {reduction!r} has no gradient; use 'add'")


scatter_nd = Op(
    name="ScatterND",
    infer=same,
    vjp=_scatter_nd_vjp,
    samples=(
        sample(normal(5, 2), given([[1], [3], [1]]), normal(3, 2), reduction="add"),
        sample(normal(5), given([[1], [3]]), normal(2)),
    ),
)


def _gather_nd(call: Call) -> Types:
    x, index = call.type(0), call.type(1)
    depth, b = index.shape[-1], call.attrs["batch_dims"]
    if not isinstance(depth, int) or b + depth > x.rank:
        raise InvalidInput(f"GatherND reads {x} with index {index}: its last axis must be static")
    return (x.with_shape((*index.shape[:-1], *x.shape[b + depth :])),)


def _gather_nd_vjp(g: Tensor, y: Tensor, x: Tensor, index: Tensor, *, batch_dims: int) -> Any:
    if batch_dims:
        raise InvalidInput("GatherND with batch_dims has no gradient; use gather_elements")
    return scatter_nd(zeros(x.shape, x.dtype), index, g, reduction="add"), None


gather_nd = Op(
    name="GatherND",
    infer=_gather_nd,
    vjp=_gather_nd_vjp,
    samples=(sample(normal(4, 3), given([[0, 1], [3, 2]])), sample(normal(4, 3), given([[1]]))),
)


def _gather_elements(call: Call) -> Types:
    x, index = call.type(0), call.type(1)
    axis = axes_of(x.rank, [call.attrs["axis"]])[0]
    others = [[d for i, d in enumerate(t.shape) if i != axis] for t in (x, index)]
    if x.rank != index.rank or others[0] != others[1]:
        raise ShapeError(f"GatherElements along axis {axis} needs equal other axes: {x}, {index}")
    return (x.with_shape(index.shape),)


def _gather_elements_vjp(g: Tensor, y: Tensor, x: Tensor, index: Tensor, *, axis: int) -> Any:
    base = zeros(x.shape, x.dtype)
    return scatter_elements(base, index, g, axis=axis, reduction="add"), None


gather_elements = Op(
    name="GatherElements",
    batch=batching.axis_shifted,
    infer=_gather_elements,
    reference=lambda x, index, axis: np.take_along_axis(x, index, axis),
    vjp=_gather_elements_vjp,
    samples=(sample(normal(3, 4), ints(0, 4, 3, 2), axis=1),),
)


def _scatter_elements_vjp(
    g: Tensor, y: Tensor, x: Tensor, index: Tensor, updates: Tensor, *, axis: int, reduction: str
) -> Any:
    taken = gather_elements(g, index, axis=axis)
    if reduction == "add":
        return g, None, taken
    if reduction == "none":
        return scatter_elements(g, index, updates * 0.0, axis=axis), None, taken
    raise InvalidInput(f"ScatterElements with reduction {reduction!r} has no gradient; use 'add'")


scatter_elements = Op(
    name="ScatterElements",
    batch=batching.axis_shifted,
    infer=same,
    vjp=_scatter_elements_vjp,
    samples=(
        sample(normal(3, 4), given([[0], [2], [2]]), normal(3, 1), axis=1, reduction="add"),
        sample(normal(3, 4), given([[0, 1, 1, 2]]), normal(1, 4)),
    ),
)


range_row = Op(
    name="Range",
    **settled(
        lambda call: (call.type(0).with_shape((_range_length(call),)),), lambda _: [None], 0, 1, 2
    ),
    reference=lambda start, limit, delta: np.arange(start, limit, delta),
    samples=(sample(given(0), given(5), given(1)),),
)


def _range_length(call: Call) -> Any:
    start, limit, delta = (call.dims(i)[0] for i in range(3))
    if delta == 1 and not (isinstance(start, int) and isinstance(limit, int)):
        return limit - start
    if all(isinstance(d, int) for d in (start, limit, delta)):
        start, limit, delta = (int(d) for d in (start, limit, delta))  # type: ignore[arg-type]
        return max(0, -(-(limit - start) // delta))
    raise InvalidInput(f"Range with a symbolic length needs delta 1, got {delta}")


def arange(n: Dim) -> Tensor:
    """0, 1, ..., n - 1 as int64; `n` may be symbolic."""
    limit = n if isinstance(n, int) else reshape(dims_of([n]), ())
    return range_row(0, limit, 1)


def one_hot(labels: Tensor, depth: int, dtype: DType | str = "float32") -> Tensor:
    """labels: (...) ints -> (..., depth), 1 at the label."""
    wanted = as_dtype(dtype)
    hit = unsqueeze(labels.cast(int64), -1) == np.arange(depth)
    return hit.cast(wanted)


def embedding(table: Tensor, ids: TensorLike) -> Tensor:
    """table: (V, D), ids: (...) ints -> (..., D)."""
    return gather(table, ids, axis=0)
