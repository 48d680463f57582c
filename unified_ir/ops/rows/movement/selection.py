"""Rows that choose elements by value: largest, distinct, non-zero, marked.

Except for TopK with a known k, only the data decide how many elements there are; such a size is a
symbol that the node introduces.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from triplane.unified_ir.ir.dims import Dim
from triplane.unified_ir.ir.types import ShapeError, TensorType, TypeMismatch, bool_, int64
from triplane.unified_ir.ops import batching
from triplane.unified_ir.ops.lowering import XlaContext
from triplane.unified_ir.ops.row import Op, OpCall, OpKind
from triplane.unified_ir.ops.rows.arithmetic.products import cumsum_row
from triplane.unified_ir.ops.rows.movement.indexing import gather, scatter_elements
from triplane.unified_ir.ops.rows.movement.shape_assertions import assume_shape
from triplane.unified_ir.ops.rows.movement.structure import axes_of, pad_row, where, zeros
from triplane.unified_ir.ops.samples import apart, bools, computed, fixed, ints, normal, sample
from triplane.unified_ir.ops.tensor import Tensor, dims_of

Types = tuple[TensorType, ...]


def _top_k_types(call: OpCall) -> Types:
    x = call.type(0)
    axis = axes_of(x.rank, [call.attrs["axis"]])[0]
    if call.type(1).size != 1:
        raise ShapeError(f"TopK takes one number k, got {call.type(1)}")
    k = call.opened() if call.known[1] is None else call.dims(1)[0]
    size = x.shape[axis]
    if isinstance(k, int) and (k < 0 or (isinstance(size, int) and k > size)):
        raise ShapeError(f"TopK of {k} along axis {axis} of {x}: k must be from 0 to {size}")
    y = x.with_shape(k if i == axis else d for i, d in enumerate(x.shape))
    return (y, y.with_dtype(int64))[: call.outputs]


def _top_k(x: Any, k: Any, *, axis: int, largest: int, sorted: int) -> Any:
    """Order equal elements by rising position, as ONNX asks."""
    order = np.argsort(x, axis=axis, kind="stable")
    if largest:
        # A stable sort from small to large, read backwards, would reverse ties. Sorting the
        # reversed axis first makes the positions of ties fall, so that reading backwards makes them
        # rise.
        flipped = np.argsort(np.flip(x, axis), axis=axis, kind="stable")
        order = x.shape[axis] - 1 - np.flip(flipped, axis)
    index = np.take(order, np.arange(int(np.ravel(k)[0])), axis)
    return np.take_along_axis(x, index, axis), index.astype(np.int64)


def _top_k_xla(k: XlaContext, x: Any, count: Any, *, axis: int, largest: int, sorted: int) -> Any:
    n = int(np.ravel(k.known(count, "how many it gives"))[0])
    key = k.np.moveaxis(x, axis, -1)
    is_float = k.np.issubdtype(x.dtype, np.floating)
    if is_float:  # XLA puts -0 below 0, where ONNX goes by position
        key = k.np.where(key == 0, np.zeros((), x.dtype), key)
    # ~x reverses the order of integers, also of unsigned ones.
    if largest:
        values, index = k.lax.top_k(key, n)
    else:
        values, index = k.lax.top_k(-key if is_float else ~key, n)
        values = -values if is_float else ~values
    return k.np.moveaxis(values, -1, axis), k.np.moveaxis(index, -1, axis)


def _top_k_vjp(g: Any, y: Any, x: Tensor, k: Tensor, **attrs: Any) -> Any:
    if isinstance(g, tuple):
        g, index = g[0], y[1]
    else:
        index = top_k_row.all_outputs(x, k, outputs=2, **attrs)[1]
    if g is None:
        return (None, None)
    base = zeros(x.shape, x.dtype)
    index = assume_shape(index, g.shape)  # its length is open where `k` is computed
    return scatter_elements(base, index, g, axis=attrs["axis"], reduction="add"), None


def _coarse(rng: np.random.Generator) -> Any:
    return np.round(rng.standard_normal((3, 8)))


top_k_row: Op = Op(
    name="TopK",
    kind=OpKind.INDEXING,
    batch=batching.first_along_axis,
    data_dependent_dims=lambda call: int(call.known[1] is None),
    infer=_top_k_types,
    reference=_top_k,
    xla=_top_k_xla,
    vjp=_top_k_vjp,
    samples=(
        sample(apart(3, 5), fixed([2]), outputs=2),
        sample(apart(4, 3), fixed([3]), axis=0, largest=0),
        sample(_coarse, fixed([4]), outputs=2, smooth=()),
        sample(_coarse, fixed([4]), outputs=2, smooth=(), largest=0),
        sample(apart(3, 5), computed([2]), outputs=2, smooth=()),
    ),
)
"""Values and positions of the k largest (or least) along an axis, in order."""


non_zero = Op(
    name="NonZero",
    kind=OpKind.INDEXING,
    data_dependent_dims=1,
    infer=lambda call: (TensorType(int64, (call.type(0).rank, call.opened())),),
    reference=lambda x: np.array(np.nonzero(x), np.int64).reshape(x.ndim, -1),
    samples=(
        sample(lambda rng: np.round(rng.standard_normal((3, 4)))),
        sample(bools(7)),
    ),
)
"""Positions of the elements that are not zero: (rank, how many), in row-major order."""


def _selected(call: OpCall) -> tuple[TensorType, Dim]:
    """Return the type of some elements along the attribute `axis` (or of all), and of how many."""
    x, axis = call.type(0), call.attrs["axis"]
    if axis is None:
        return x.with_shape((call.opened(),)), x.size
    axis = axes_of(x.rank, [axis])[0]
    shape = (call.opened() if i == axis else d for i, d in enumerate(x.shape))
    return x.with_shape(shape), x.shape[axis]


def _compress_types(call: OpCall) -> Types:
    marks = call.type(1)
    if marks.dtype != bool_ or marks.rank != 1:
        raise TypeMismatch(f"Compress takes a bool vector of marks, got {marks}")
    y, size = _selected(call)
    count = marks.shape[0]
    if isinstance(size, int) and isinstance(count, int) and count > size:
        raise ShapeError(f"Compress has {count} marks for the {size} elements of {call.type(0)}")
    return (y,)


def _compress_vjp(g: Tensor, y: Tensor, x: Tensor, marks: Tensor, *, axis: int | None) -> Any:
    """Let each marked element read its place in g, and the others a zero after the end of g."""
    flat = x if axis is not None else x.reshape((-1,))
    at = 0 if axis is None else axis % x.rank
    size, count = flat.shape[at], marks.shape[0]
    marked = marks.cast(int64)
    if count != size:
        marked = pad_row(marked, dims_of([0, size - count]))
    # The k-th marked element is element k - 1 of g; -1 is the zero that is appended below.
    place = where(marked == 1, cumsum_row(marked, 0) - 1, -1)
    behind = [0] * g.rank + [int(i == at) for i in range(g.rank)]
    return gather(pad_row(g, dims_of(behind)), place, axis=at).reshape(x.shape), None


compress_row = Op(
    name="Compress",
    kind=OpKind.INDEXING,
    data_dependent_dims=1,
    infer=_compress_types,
    reference=lambda x, marks, *, axis: np.compress(marks, x, axis),
    vjp=_compress_vjp,
    samples=(
        sample(normal(4, 3), fixed([True, False, True, True]), axis=0),
        sample(normal(3, 4), fixed([False, True, True]), axis=-1),
        sample(normal(2, 3), fixed([False, True, True, False, True])),
    ),
)
"""The elements along an axis (of all, in row-major order) whose mark is true."""


def _unique_types(call: OpCall) -> Types:
    y, size = _selected(call)
    positions = TensorType(int64, (call.opened(),))
    return (y, positions, positions.with_shape((size,)), positions)[: call.outputs]


def _unique(x: Any, *, axis: int | None, sorted: int) -> Any:
    """Return distinct elements in order of value, or of first occurrence."""
    y, index, inverse, counts = np.unique(x, True, True, True, axis=axis)
    inverse = inverse.reshape(-1)
    if not sorted:
        # numpy sorts by value; `index` has the first occurrences, and `back` maps old ranks to new
        # ones.
        order = np.argsort(index)
        back = np.argsort(order)
        y = np.take(y, order, 0 if axis is None else axis)
        index, inverse, counts = index[order], back[inverse], counts[order]
    return y, index, inverse, counts


def _unique_vjp(g: Any, y: Any, x: Tensor, *, axis: int | None, sorted: int) -> Any:
    """Share the cotangent of a distinct element equally among its occurrences."""
    first = g[0] if isinstance(g, tuple) else g
    if first is None:
        return (None,)
    at = 0 if axis is None else axis % x.rank
    _, _, inverse, counts = unique_row.all_outputs(x, outputs=4, axis=axis, sorted=sorted)
    shares = gather(counts, inverse).cast(first.dtype)
    spread = gather(first, inverse, axis=at)
    around = [-1 if i == at else 1 for i in range(spread.rank)]
    return ((spread / shares.reshape(around)).reshape(x.shape),)


unique_row: Op = Op(
    name="Unique",
    kind=OpKind.INDEXING,
    data_dependent_dims=1,
    infer=_unique_types,
    reference=_unique,
    vjp=_unique_vjp,
    samples=(
        sample(apart(3, 4), outputs=4),
        sample(apart(3, 2), axis=1),
        sample(apart(3, 2), axis=0, outputs=3),
        sample(ints(0, 4, 9), outputs=4, sorted=0),
        sample(ints(0, 2, 6, 2), outputs=4, axis=0),
    ),
)
"""Distinct elements (or slices along an axis); the first position, the index and count of each."""


def top_k(x: Tensor, k: int, axis: int = -1, *, largest: bool = True) -> tuple[Tensor, Tensor]:
    """Return values and int64 positions of the k largest (or least) along `axis`, in order."""
    values, index = top_k_row.all_outputs(
        x, np.array([k]), outputs=2, axis=axis, largest=int(largest)
    )
    return values, index


def nonzero(x: Tensor) -> Tensor:
    """Return positions of the elements that are not zero: (rank, how many), int64."""
    return non_zero(x)


def unique(x: Tensor) -> Tensor:
    """Return the distinct elements in rising order, a vector."""
    return unique_row(x)


def compress(x: Tensor, marks: Tensor, axis: int | None = None) -> Tensor:
    """Return the elements along `axis` (by default of all, in order) where a vector is true."""
    return compress_row(x, marks, axis=axis)


def masked_select(x: Tensor, mask: Tensor) -> Tensor:
    """Return the elements of x where `mask`, of the same shape, is true: a vector."""
    return compress_row(x, mask.reshape((-1,)))
