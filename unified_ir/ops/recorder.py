"""The graphs under construction, innermost last; operators add their nodes to the last one."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

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
