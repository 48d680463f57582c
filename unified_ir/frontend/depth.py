"""The position of a trace: the cell whose nodes are recorded, and the depth of recursion.

A function that calls itself under a condition that a tensor decides would be recorded endlessly,
since both sides of such a condition are recorded. Each level adds a graph, so levels are counted by
graphs; recursion over Python values is left to Python's own limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.frontend.binding import current_or_none
from triplane.unified_ir.ops.recorder import recorder, stack

MAX_LEVELS: Final = 16
"""How many nested graphs one function may open by calling itself."""
_calls: ContextVar[tuple[tuple[Any, int], ...]] = ContextVar("triplane_calls", default=())


@contextmanager
def entered(function: Any, owner: Any = None) -> Iterator[None]:
    """One recorded call of `function` (of the cell `owner`)."""
    key = (function, id(owner))
    depth = len(stack.get())
    calls = _calls.get()
    levels = {d for k, d in calls if k == key} | {depth}
    if len(levels) > MAX_LEVELS:
        name = getattr(function, "__qualname__", str(function))
        raise InvalidInput(
            f"{name} calls itself where a tensor decides whether it does, {MAX_LEVELS} levels "
            "deep, and recording it would not end; write a `while` loop, make the call the whole "
            "`return` of a @graph function (it becomes a loop), or run in mode('eager')"
        )
    token = _calls.set((*calls, (key, depth)))
    try:
        yield
    finally:
        _calls.reset(token)


@contextmanager
def within(cell: Any) -> Iterator[None]:
    """Within the block, recorded nodes have the cell's path as their scope."""
    binding, build = current_or_none(), recorder()
    path = None if binding is None else binding.paths.get(cell)
    if path is None:
        yield
        return
    before, build.scope = build.scope, path
    try:
        yield
    finally:
        build.scope = before
