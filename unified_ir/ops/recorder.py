"""The graphs under construction, innermost last; operators add their nodes to the last one."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from triplane.proto.errors import InvalidInput

if TYPE_CHECKING:
    from triplane.unified_ir.ops.build import Build

stack: ContextVar[tuple[Build, ...]] = ContextVar("triplane_recorders", default=())


def recorder() -> Build:
    """Return the graph being recorded."""
    builds = stack.get()
    if not builds:
        raise InvalidInput(
            "an operator was called outside a graph; call it in a Cell's construct or in a "
            "function decorated with @graph, and call that with arrays"
        )
    return builds[-1]


def recording() -> bool:
    """Return whether a graph is being recorded in this context."""
    return bool(stack.get())


def with_shard(function: Callable[..., Any], name: str) -> Callable[..., Callable[..., Any]]:
    """Return the method `shard` of an operator: it takes a strategy and returns the operator."""

    def shard(*strategy: Any) -> Callable[..., Any]:
        """Return the operator with a strategy: for each tensor of the call, slices of each axis."""

        def call(*args: Any, **kwargs: Any) -> Any:
            return recorder().sharded(function, name, strategy, args, kwargs)

        return call

    return shard
