"""XLA as lowering rules see it, and rules that several rows share.

A rule is a column of its row (`Op.xla`) and computes the outputs of one node with `jax.numpy` while
JAX traces. It takes what the row's reference kernel takes, after the context through which it
reaches JAX, so `ops` imports no JAX and needs no layer above it. An operand is a tracer, or a numpy
array where its contents are known while tracing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Protocol

import numpy as np

from triplane.unified_ir.ir.graph import Array, Node

Rule = Callable[..., Any]
"""(context, *operands, **attributes) -> the output, or a tuple of outputs; NotImplemented: use the
row's body."""
Region = Callable[..., tuple[list[Any], Any]]
"""(*arguments) -> (results, which requirement failed inside: int32, 0 if none)."""


class XlaContext(Protocol):
    """JAX, and the trace of the function around a node."""

    np: Any
    """`jax.numpy`."""
    lax: Any
    """`jax.lax`."""

    @property
    def node(self) -> Node:
        """The node that the rule lowers."""

    def known(self, x: Any, what: str) -> Array:
        """Return contents that must be known while tracing; refuse a tracer, naming it `what`."""

    def require(self, holds: Any, why: str) -> None:
        """Refuse the run unless all of `holds` (bool) is true; state then stays as it was."""

    def region(self, i: int) -> Region:
        """Return region `i` of the node as a function of traced arguments."""

    def batch_statistics(self, x: Any, axes: tuple[int, ...]) -> tuple[Any, Any]:
        """Return mean and variance over axes, also of rows that other devices have."""

    def merge(self, failed: Any) -> None:
        """Take over what failed inside a region that has run: int32, 0 if nothing."""

    def attention(self, q: Any, k: Any, v: Any, *, causal: bool, scale: float) -> Any:
        """Return attention by the device's own kernel; NotImplemented if it has none for these."""

    def attention_gradient(
        self, g: Any, q: Any, k: Any, v: Any, *, causal: bool, scale: float
    ) -> Any:
        """Return the gradients for q, k and v; NotImplemented likewise."""


def by_name(name: str) -> Rule:
    """Return the rule that calls the function of `jax.numpy` on the operands."""
    return lambda k, *xs: getattr(k.np, name)(*xs)


def folded(name: str) -> Rule:
    """Return the rule that folds the operands with a function of `jax.numpy` of two."""

    def rule(k: XlaContext, first: Any, *others: Any) -> Any:
        f = getattr(k.np, name)
        for x in others:
            first = f(first, x)
        return first

    return rule


def in_numpy(kernel: Callable[..., Any], *what: str) -> Rule:
    """Return the rule that runs a kernel of numpy, whose operands must be known; `what`: names."""

    def rule(k: XlaContext, *xs: Any, **attrs: Any) -> Any:
        return kernel(*(k.known(x, name) for x, name in zip(xs, what, strict=True)), **attrs)

    return rule


def axes_of(axes: Any, rank: int) -> tuple[int, ...]:
    """Return axes as numbers from 0."""
    return tuple(int(a) % rank for a in axes) if rank else ()


def sizes(x: Iterable[Any]) -> tuple[int, ...]:
    """Return sizes as Python numbers."""
    return tuple(int(d) for d in x)


def positions(k: XlaContext, index: Any, size: int) -> Any:
    """Return indices -size..size-1 into an axis as positions from 0; refuse the run of others.

    XLA moves an index beyond an axis to its end without a word. Below 2^31 elements positions are
    int32, with which a GPU computes faster.
    """
    inside = (index >= -size) & (index < size)
    at = index + size * (index < 0)
    is_known = isinstance(index, np.ndarray)
    if not is_known or not inside.all():
        k.require(inside, f"an index is outside an axis of {size}")
    if is_known:  # valid also where it fails, perhaps in a branch that never runs
        at = np.where(inside, at, 0)
    return at.astype(np.int32) if size < 2**31 else at


_IN_BOUNDS: Final[Mapping[str, Any]] = {
    "mode": "promise_in_bounds",
    "wrap_negative_indices": False,
}


def taken(k: XlaContext, x: Any, at: tuple[Any, ...]) -> Any:
    """Return `x[at]` for slices and `positions`."""
    return k.np.asarray(x).at[at].get(**_IN_BOUNDS)


_WRITES: Final[Mapping[str, str]] = {
    "add": "add",
    "mul": "multiply",
    "max": "max",
    "min": "min",
}
"""The method of an indexed JAX array for each reduction of ONNX."""


def written(k: XlaContext, x: Any, at: tuple[Any, ...], updates: Any, reduction: str) -> Any:
    """Return `x` with updates at `positions` along its first axes; without reduction the last wins.

    at: arrays that broadcast to (...); updates: (..., the other axes of x).
    """
    depth, rest = x.shape[: len(at)], x.shape[len(at) :]
    # One number for each position: XLA scatters by it 1.5 times as fast as by several.
    size, flat = math.prod(depth), _flat(at, depth).reshape(-1)
    target = k.np.asarray(x).reshape(size, *rest)
    new = k.np.reshape(updates, (flat.size, *rest))
    if reduction == "none":
        # XLA writes duplicates in any order: all but the last go beyond the end and are dropped.
        flat = k.np.where(_is_last(k, flat, size), flat, size)
        y = target.at[flat].set(new, mode="drop", unique_indices=True, wrap_negative_indices=False)
    else:
        y = getattr(target.at[flat], _WRITES[reduction])(new, **_IN_BOUNDS)
    return y.reshape(x.shape)


def _flat(at: tuple[Any, ...], sizes: tuple[int, ...]) -> Any:
    """Return positions along several axes as positions in one."""
    wide = np.int32 if math.prod(sizes) < 2**31 else np.int64
    flat = at[0].astype(wide)
    for a, n in zip(at[1:], sizes[1:], strict=True):
        flat = flat * wide(n) + a.astype(wide)
    return flat


def _is_last(k: XlaContext, flat: Any, size: int) -> Any:
    """Return whether no later element is at the same position."""
    number = np.arange(flat.size, dtype=np.int32)
    if isinstance(flat, np.ndarray):
        latest = np.zeros(size, np.int32)
        latest[flat] = number  # numpy writes in order
        return latest[flat] == number
    return (
        taken(k, k.np.zeros(size, np.int32).at[flat].max(number, **_IN_BOUNDS), (flat,)) == number
    )


def truncated(k: XlaContext, x: Any, dtype: Any) -> Any:
    """Convert floats to int32 or int64; what the type does not hold becomes its smallest number.

    So do numpy and onnxruntime on x86. XLA alone would take the nearest number, and 0 for NaN.
    """
    if x.dtype.itemsize < 4:  # the limit is infinite in float16
        x = k.lax.convert_element_type(x, np.float32)
    least = np.iinfo(dtype).min
    limit = -float(least)
    holds = (x >= -limit) & (x < limit)
    return k.np.where(holds, k.lax.convert_element_type(x, dtype), np.asarray(least, dtype))


def to_uint64(k: XlaContext, x: Any) -> Any:
    """Convert floats as an x86 processor does: in two halves, each by way of int64."""
    if x.dtype.itemsize < 4:  # 2^63 is infinite in float16
        x = k.lax.convert_element_type(x, np.float32)
    half = 2.0**63
    is_upper = x >= half
    low = truncated(k, k.np.where(is_upper, x - half, x), np.int64)
    upper = np.uint64(1 << 63)
    bits = k.lax.convert_element_type(low, np.uint64)
    return k.np.where(is_upper, bits ^ upper, bits)
