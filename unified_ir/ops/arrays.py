"""Functions that numpy, PyTorch and MindSpore users look for by name, composed of rows.

`ops` exports every function defined here.
"""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.dims import Dim
from triplane.unified_ir.ir.types import DType, ShapeError, as_dtype, float32
from triplane.unified_ir.ops.rows.arithmetic.activations import swish
from triplane.unified_ir.ops.rows.arithmetic.elementwise import (
    exp,
    hard_tanh,
    is_inf,
    is_nan,
    log,
    logical_not,
    maximum,
    softplus,
)
from triplane.unified_ir.ops.rows.arithmetic.equations import einsum
from triplane.unified_ir.ops.rows.arithmetic.products import cumprod_row, cumsum_row
from triplane.unified_ir.ops.rows.arithmetic.reductions import (
    reduce_l1_row,
    reduce_l2_row,
    reduce_log_sum_exp_row,
)
from triplane.unified_ir.ops.rows.movement.indexing import arange, gather
from triplane.unified_ir.ops.rows.movement.selection import top_k_row
from triplane.unified_ir.ops.rows.movement.shapes import split_row, split_sizes, tile_row, trilu_row
from triplane.unified_ir.ops.rows.movement.slicing import slice_row
from triplane.unified_ir.ops.rows.movement.structure import (
    axes_of,
    broadcast_to,
    full,
    slice_axis,
    squeeze,
    unsqueeze,
    where,
)
from triplane.unified_ir.ops.tensor import (
    Axes,
    Tensor,
    TensorLike,
    as_tensor,
    axes_operand,
    dims_of,
    reduce,
    whole_numbers,
)


def sum(x: Tensor, axis: Axes = None, *, keepdims: bool = False) -> Tensor:
    """Sum over `axis`: one, several, all by default."""
    return x.sum(axis, keepdims=keepdims)


def mean(x: Tensor, axis: Axes = None, *, keepdims: bool = False) -> Tensor:
    """Return the mean over `axis`: one, several, all by default."""
    return x.mean(axis, keepdims=keepdims)


def amax(x: Tensor, axis: Axes = None, *, keepdims: bool = False) -> Tensor:
    """Return the maximum over `axis`; ties share the gradient equally."""
    return x.max(axis, keepdims=keepdims)


def amin(x: Tensor, axis: Axes = None, *, keepdims: bool = False) -> Tensor:
    """Return the minimum over `axis`; ties share the gradient equally."""
    return x.min(axis, keepdims=keepdims)


def prod(x: Tensor, axis: Axes = None, *, keepdims: bool = False) -> Tensor:
    """Return the product over `axis`; its gradient is exact at zeros."""
    return x.prod(axis, keepdims=keepdims)


def any(x: Tensor, axis: Axes = None, *, keepdims: bool = False) -> Tensor:
    """Return whether any element is not zero, over `axis`."""
    return x.any(axis, keepdims=keepdims)


def all(x: Tensor, axis: Axes = None, *, keepdims: bool = False) -> Tensor:
    """Return whether every element is not zero, over `axis`."""
    return x.all(axis, keepdims=keepdims)


def var(x: Tensor, axis: Axes = None, *, correction: int = 0, keepdims: bool = False) -> Tensor:
    """Return the mean square distance from the mean; PyTorch's default is `correction=1`."""
    return x.var(axis, correction=correction, keepdims=keepdims)


def std(x: Tensor, axis: Axes = None, *, correction: int = 0, keepdims: bool = False) -> Tensor:
    """Return the square root of `var`."""
    return x.std(axis, correction=correction, keepdims=keepdims)


def vector_norm(
    x: Tensor, order: float = 2, axis: Axes = None, *, keepdims: bool = False
) -> Tensor:
    """(sum |x|^order)^(1/order) over `axis`; infinity gives the largest |x|, 0 has slope 0."""
    if order in {1, 2}:
        row = reduce_l1_row if order == 1 else reduce_l2_row
        return row(x, axes_operand(axis), keepdims=int(keepdims))
    if order == float("inf"):
        return abs(x).max(axis, keepdims=keepdims)
    if not order > 0.0:
        raise InvalidInput(f"vector_norm takes an order above 0, got {order}")
    size = abs(x)
    # Below order 1 the slope at 0 is infinite; it is 0 here, as in PyTorch.
    inside = size if order >= 1.0 else where(size == 0.0, 1.0, size)
    powers = inside ** float(order)
    total = (powers if order >= 1.0 else where(size == 0.0, 0.0, powers)).sum(
        axis, keepdims=keepdims
    )
    return where(total == 0.0, 0.0, where(total == 0.0, 1.0, total) ** (1.0 / order))


def logsumexp(x: Tensor, axis: Axes = None, *, keepdims: bool = False) -> Tensor:
    """log(sum(exp(x))) over `axis`, without overflow."""
    return reduce(reduce_log_sum_exp_row.name, x, axis, keepdims=keepdims)


def cumsum(x: Tensor, axis: int, *, exclusive: bool = False, reverse: bool = False) -> Tensor:
    """Return running sums along `axis`; exclusive: without the element; reverse: from the end."""
    return cumsum_row(x, axis, exclusive=int(exclusive), reverse=int(reverse))


def cumprod(x: Tensor, axis: int, *, exclusive: bool = False, reverse: bool = False) -> Tensor:
    """Return running products along `axis`; its gradient is exact at zeros."""
    return cumprod_row(x, axis, exclusive=int(exclusive), reverse=int(reverse))


def sort(x: Tensor, axis: int = -1, *, descending: bool = False) -> Tensor:
    """Sort elements along `axis`; equal ones keep their order."""
    return _ordered(x, axis, descending=descending)[0]


def argsort(x: Tensor, axis: int = -1, *, descending: bool = False) -> Tensor:
    """Return positions that sort the elements along `axis`, int64; equal ones keep their order."""
    return _ordered(x, axis, descending=descending)[1]


def _ordered(x: Tensor, axis: int, *, descending: bool) -> tuple[Tensor, ...]:
    # Stable in both directions: TopK puts the lower index first among equal elements.
    count = dims_of([x.shape[axes_of(x.rank, [axis])[0]]])
    return top_k_row.all_outputs(x, count, outputs=2, axis=axis, largest=int(descending))


def flip(x: Tensor, *axes: int) -> Tensor:
    """Reverse the order of elements along the given axes, all by default."""
    wanted = axes_of(x.rank, list(axes) or None)
    far = [2**62] * len(wanted)
    # Slicing with step -1 stops before its end, so the first element needs an end before it.
    ends = [-(2**62)] * len(wanted)
    return slice_row(x, *(np.array(v) for v in (far, ends, wanted, [-1] * len(wanted))))


def roll(x: Tensor, shift: int, axis: int) -> Tensor:
    """Move elements `shift` places along `axis`; those beyond the end reappear at the start."""
    size = x.shape[axes_of(x.rank, [axis])[0]]
    index = (arange(size) - shift) % maximum(
        dims_of([size]).reshape(()), 1
    )  # an empty axis has no remainders
    return gather(x, index, axis=axis)


def tile(x: Tensor, repeats: int | Sequence[int]) -> Tensor:
    """Repeat `x` along each axis; fewer numbers apply to the last axes, more add axes in front."""
    counts = _repeats(repeats)
    times = [1] * (x.rank - len(counts)) + counts
    wide = x.reshape((*[1] * (len(times) - x.rank), *x.shape))
    return tile_row(wide, np.array(times, np.int64))


def repeat(x: Tensor, times: int, axis: int) -> Tensor:
    """Repeat each element `times` along `axis`, as numpy's `repeat` does."""
    at = axes_of(x.rank, [axis])[0]
    counts = _repeats(times)
    if len(counts) != 1:
        raise InvalidInput(f"repeat takes one number of repeats for all elements, got {times}")
    if counts == [0]:  # ONNX's Reshape would read the 0 as the size that was there
        return slice_axis(x, at, 0, 0)
    wide = unsqueeze(x, at + 1)
    spread = broadcast_to(wide, (*x.shape[: at + 1], times, *x.shape[at + 1 :]))
    return spread.reshape((*x.shape[:at], x.shape[at] * times, *x.shape[at + 1 :]))


def _repeats(repeats: int | Sequence[int]) -> list[int]:
    counts = list(whole_numbers(repeats, "a number of repeats"))
    if builtins.any(isinstance(n, int) and n < 0 for n in counts):
        raise InvalidInput(f"repeats must be at least 0, got {repeats}")
    return counts


def split(x: Tensor, sizes: int | Sequence[Dim], axis: int = 0) -> tuple[Tensor, ...]:
    """Split along `axis`: into these sizes, or into a number of equal pieces but for the last."""
    if isinstance(sizes, int):
        sizes = split_sizes(x.shape[axes_of(x.rank, [axis])[0]], sizes)
    return split_row.all_outputs(x, dims_of(sizes), outputs=len(sizes), axis=axis)


def unstack(x: Tensor, axis: int = 0) -> tuple[Tensor, ...]:
    """Return the slices along `axis`, without that axis."""
    size = x.shape[axes_of(x.rank, [axis])[0]]
    if not isinstance(size, int):
        raise ShapeError(f"unstack needs a fixed axis, got {axis} of {x.type}; loop over it")
    parts = split(x, [1] * size, axis)
    return tuple(squeeze(part, axis) for part in parts)


def triu(x: Tensor, k: int = 0) -> Tensor:
    """Set elements of x: (..., M, N) below the k-th diagonal to 0."""
    return trilu_row(x, np.array(k), upper=1)


def tril(x: Tensor, k: int = 0) -> Tensor:
    """Set elements of x: (..., M, N) above the k-th diagonal to 0."""
    return trilu_row(x, np.array(k), upper=0)


def eye(n: Dim, m: Dim | None = None, dtype: DType | str = "float32") -> Tensor:
    """Return an (n, m) matrix: 1 on the diagonal, 0 elsewhere; square by default."""
    rows, columns = arange(n), arange(n if m is None else m)
    return (unsqueeze(rows, 1) == columns).cast(as_dtype(dtype))


def diagonal(x: Tensor) -> Tensor:
    """Return the diagonal; x: (..., M, M) -> (..., M)."""
    return einsum("...ii->...i", x)


def trace(x: Tensor) -> Tensor:
    """Return the sum of the diagonal; x: (..., M, M) -> (...)."""
    return einsum("...ii->...", x)


def diag(x: Tensor) -> Tensor:
    """Return diagonal matrices; x: (..., M) -> (..., M, M)."""
    return unsqueeze(x, -1) * eye(x.shape[-1], dtype=x.dtype)


def outer(a: Tensor, b: Tensor) -> Tensor:
    """Return every product of two elements; a: (M,), b: (N,) -> (M, N)."""
    return unsqueeze(a, 1) * b


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Return the sum of products; a, b: (N,) -> ()."""
    return (a * b).sum()


def swapaxes(x: Tensor, a: int, b: int) -> Tensor:
    """Exchange the axes `a` and `b`."""
    return x.swapaxes(a, b)


def moveaxis(x: Tensor, source: int, target: int) -> Tensor:
    """Move the axis `source` to `target`; the others keep their order."""
    at, to = (axes_of(x.rank, [a])[0] for a in (source, target))
    order = [i for i in range(x.rank) if i != at]
    order.insert(to, at)
    return x.transpose(*order)


def linspace(start: float, stop: float, n: int, dtype: DType | str = float32) -> Tensor:
    """Return n evenly spaced numbers from `start` to `stop`, both included."""
    return as_tensor(np.linspace(start, stop, n, dtype=as_dtype(dtype).numpy))


def zeros_like(x: Tensor) -> Tensor:
    """Return zeros in the shape and element type of `x`."""
    return full(x.shape, 0, x.dtype)


def ones_like(x: Tensor) -> Tensor:
    """Return ones in the shape and element type of `x`."""
    return full(x.shape, 1, x.dtype)


def full_like(x: Tensor, value: float) -> Tensor:
    """Return one repeated value in the shape and element type of `x`."""
    return full(x.shape, value, x.dtype)


def masked_fill(x: Tensor, mask: TensorLike, value: TensorLike) -> Tensor:
    """Return `value` where `mask` is true, and `x` elsewhere."""
    return where(mask, value, x)


def square(x: Tensor) -> Tensor:
    """x * x."""
    return x * x


def rsqrt(x: Tensor) -> Tensor:
    """1 / sqrt(x)."""
    return x**-0.5


def log2(x: Tensor) -> Tensor:
    """Return the logarithm to the base 2."""
    return log(x) * float(1 / np.log(2))


def log10(x: Tensor) -> Tensor:
    """Return the logarithm to the base 10."""
    return log(x) * float(1 / np.log(10))


def exp2(x: Tensor) -> Tensor:
    """Return 2 to the power x."""
    return exp(x * float(np.log(2)))


def is_finite(x: Tensor) -> Tensor:
    """Return where x is neither infinite nor NaN."""
    return logical_not(is_inf(x) | is_nan(x))


def silu(x: Tensor) -> Tensor:
    """x sigmoid(x)."""
    return swish(x)


def log_sigmoid(x: Tensor) -> Tensor:
    """log(sigmoid(x)), stable for any x."""
    return -softplus(-x)


def relu6(x: Tensor) -> Tensor:
    """Limit x to 0..6; the slope at both ends is 0, as in PyTorch."""
    return hard_tanh(x, low=0.0, high=6.0)


def count_nonzero(x: Tensor, axis: Axes = None) -> Tensor:
    """Count the elements over `axis` that are not zero; int64."""
    return x.cast("bool").cast("int64").sum(axis)


def meshgrid(*xs: Tensor) -> tuple[Tensor, ...]:
    """Return coordinates of a grid, one tensor per vector, in matrix order (`ij`)."""
    shape = tuple(x.shape[0] for x in xs)
    return tuple(
        broadcast_to(x.reshape([d if i == k else 1 for i, d in enumerate(shape)]), shape)
        for k, x in enumerate(xs)
    )


if not TYPE_CHECKING:
    # Type checkers see that `import *` takes what is defined here; at run time it would take what
    # is imported here, too.
    __all__ = [
        name
        for name, value in globals().items()
        if getattr(value, "__module__", None) == __name__ and not name.startswith("_")
    ]
