"""XLA as lowering rules see it, and rules that several rows share.

A rule is a column of its row (`Op.xla`) and computes the outputs of one node with `jax.numpy` while
JAX traces. It takes what the row's reference kernel takes, after the context through which it
reaches JAX, so `ops` imports no JAX and needs no layer above it. An operand is a tracer, or a numpy
array where its contents are known while tracing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from triplane.unified_ir.ir.graph import Array, Node

Rule = Callable[..., Any]
"""(context, *operands, **attributes) -> the output, or a tuple of outputs."""
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

    def merge(self, failed: Any) -> None:
        """Take over what failed inside a region that has run: int32, 0 if nothing."""


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


def sizes(x: Sequence[Any]) -> tuple[int, ...]:
    """Return sizes as Python numbers."""
    return tuple(int(d) for d in x)
