"""Running sums and products along an axis, whose gradients of every order are exact at zeros.

The product of all other elements is built of products, never as a quotient, so it can be
differentiated where elements are zero. It takes log2(n) passes along a fixed axis of n elements,
and one pass over n x n elements along a symbolic one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from triplane.unified_ir.ir.types import TensorType
from triplane.unified_ir.ops import batching
from triplane.unified_ir.ops.lowering import Rule, XlaContext
from triplane.unified_ir.ops.row import Op, OpCall, OpKind
from triplane.unified_ir.ops.rows.arithmetic.elementwise import mul
from triplane.unified_ir.ops.rows.movement.structure import (
    axes_of,
    known_ints,
    pad_row,
    same,
    slice_axis,
    unsqueeze,
    where,
)
from triplane.unified_ir.ops.samples import fixed, ints, normal, sample
from triplane.unified_ir.ops.tensor import Tensor, dims_of, emit


def _running_type(call: OpCall) -> tuple[TensorType, ...]:
    if call.known[1] is not None:
        axes_of(call.type(0).rank, call.ints(1))
    return same(call)


def _running_kernel(f: Any, start: int) -> Any:
    def kernel(x: Any, axis: Any, *, exclusive: int, reverse: int) -> Any:
        axis = int(np.ravel(axis)[0])
        if reverse:
            x = np.flip(x, axis)
        y = f(x, axis=axis, dtype=x.dtype)
        if exclusive:
            y = np.roll(y, 1, axis)
            y.swapaxes(0, axis)[:1] = start
        return np.flip(y, axis) if reverse else y

    return kernel


def _running_xla(name: str, start: int) -> Rule:
    def rule(k: XlaContext, x: Any, axis: Any, *, exclusive: int, reverse: int) -> Any:
        at = axes_of(x.ndim, [int(np.ravel(k.known(axis, "its axis"))[0])])[0]
        if exclusive and x.shape[at]:
            # The first element (the last, in reverse) is the start, and all others move by one.
            pads = [(0, 0, 0)] * x.ndim
            pads[at] = (-1, 1, 0) if reverse else (1, -1, 0)
            x = k.lax.pad(x, np.array(start, x.dtype), pads)
        return getattr(k.lax, name)(x, at, reverse=bool(reverse))

    return rule


def _running_uses(**more: Any) -> Any:
    return (
        sample(normal(2, 5), fixed(1), **more),
        sample(normal(5, 2), fixed(0), exclusive=1, **more),
        sample(normal(2, 5), fixed(-1), reverse=1, **more),
        sample(normal(2, 3, 4), fixed([1]), exclusive=1, reverse=1, **more),
        sample(ints(-3, 4, 2, 5), fixed(1), **more),
    )


cumsum_row: Op = Op(
    name="CumSum",
    kind=OpKind.REDUCTION,
    batch=batching.first_along_operand,
    infer=_running_type,
    reference=_running_kernel(np.cumsum, 0),
    xla=_running_xla("cumsum", 0),
    # y_i = sum over j <= i of x_j, so dx_j = sum over i >= j of g_i: the running sum from the other
    # end.
    vjp=lambda g, y, x, axis, *, exclusive, reverse: (
        cumsum_row(g, axis, exclusive=exclusive, reverse=1 - reverse),
        None,
    ),
    samples=_running_uses(),
)


cumprod_row = Op(
    name="CumProd",
    kind=OpKind.REDUCTION,
    batch=batching.first_along_operand,
    infer=_running_type,
    reference=_running_kernel(np.cumprod, 1),
    xla=_running_xla("cumprod", 1),
    body=lambda x, axis, *, exclusive, reverse: running_product(
        x, axes_of(x.rank, known_ints(axis))[0], exclusive=bool(exclusive), reverse=bool(reverse)
    ),
    samples=_running_uses(),
)


def running_product(x: Tensor, axis: int, *, exclusive: bool, reverse: bool) -> Tensor:
    """Multiply all elements along `axis` up to each one, or (exclusive) before it."""
    size = x.shape[axis]
    if not isinstance(size, int):
        return _masked_product(x, axis, _ADMITS[exclusive, reverse])
    if exclusive:
        x = _shifted(x, axis, size, 1, reverse=reverse)
    # Hillis and Steele (1986): after k rounds each element holds the product of the last 2^k.
    step = 1
    while step < size:
        x = mul(x, _shifted(x, axis, size, step, reverse=reverse))
        step *= 2
    return x


def product_of_others(x: Tensor, axes: Sequence[int]) -> Tensor:
    """Multiply all other elements over `axes`, for each element: the gradient of the product."""
    rest = [i for i in range(x.rank) if i not in axes]
    order = [*rest, *axes]
    moved = x.transpose(*order)
    flat = moved.reshape((*(x.shape[i] for i in rest), -1)) if len(axes) != 1 else moved
    last = len(rest)
    if isinstance(flat.shape[last], int):
        # Product of all before times product of all after; a division by x would fail at 0.
        before = running_product(flat, last, exclusive=True, reverse=False)
        product = before * running_product(flat, last, exclusive=True, reverse=True)
    else:
        product = _masked_product(flat, last, lambda i, j: i != j)
    return product.reshape(moved.shape).transpose(*map(int, np.argsort(order)))


_ADMITS: Final[Mapping[tuple[bool, bool], Callable[[Tensor, Tensor], Tensor]]] = {
    (False, False): lambda i, j: j <= i,
    (False, True): lambda i, j: j >= i,
    (True, False): lambda i, j: j < i,
    (True, True): lambda i, j: j > i,
}
"""Which positions j count at position i, by (exclusive, reverse)."""


def _shifted(x: Tensor, axis: int, size: int, by: int, *, reverse: bool) -> Tensor:
    """Move elements `by` positions along `axis` towards the end, and fill with ones."""
    if size == 0:
        return x
    by = min(by, size)
    kept = slice_axis(x, axis, by, size) if reverse else slice_axis(x, axis, 0, size - by)
    amount = [by if i == axis else 0 for i in range(x.rank)]
    none = [0] * x.rank
    pads = [*none, *amount] if reverse else [*amount, *none]
    return pad_row(kept, dims_of(pads), np.array(1, x.dtype.numpy))


def _masked_product(x: Tensor, axis: int, admits: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Multiply, at each position i of a symbolic axis, the elements j for which admits(i, j)."""
    count = dims_of([x.shape[axis]]).reshape(())
    j = emit("Range", 0, count, 1)
    i = unsqueeze(j, 1)
    order = [*(k for k in range(x.rank) if k != axis), axis]
    rows = unsqueeze(x.transpose(*order), -2)
    ones = np.array(1, x.dtype.numpy)
    # Without keepdims and a reshape onnxruntime 1.31 keeps the axis if the result is empty.
    kept = emit("ReduceProd", where(admits(i, j), rows, ones), np.array([-1]), keepdims=1)
    product = kept.reshape([x.shape[k] for k in order])
    return product.transpose(*map(int, np.argsort(order)))
