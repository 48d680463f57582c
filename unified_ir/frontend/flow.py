"""Functions that rewritten code calls; each chooses, while tracing, between Python and the graph.

Where a tensor without a value decides (a graph is being recorded), control flow becomes nodes;
otherwise it runs as in Python. `syntax` writes the names of this module into rewritten functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.frontend.branches import (
    BREAK,  # noqa: F401 - read by generated code, as are the names below
    NEXT,
    LoopExit,
    branch,
    branch_exits,
    is_symbolic,
    returned,
    truth,
)
from triplane.unified_ir.frontend.logic import and_, chain, if_expression, not_, or_  # noqa: F401
from triplane.unified_ir.frontend.loops import count_tensor, walk_tensor, while_tensor
from triplane.unified_ir.frontend.merge import UNBOUND  # noqa: F401
from triplane.unified_ir.frontend.variables import VariableAccess
from triplane.unified_ir.ir.dims import Expr
from triplane.unified_ir.ir.types import int64
from triplane.unified_ir.ops.rows.arithmetic.elementwise import div, maximum
from triplane.unified_ir.ops.rows.movement.indexing import arange
from triplane.unified_ir.ops.rows.movement.structure import constant
from triplane.unified_ir.ops.tensor import Tensor, as_tensor

Thunk = Callable[[], Any]


def _run_if(
    test: Any, then: Thunk, otherwise: Thunk, state: VariableAccess, record: Callable[..., Any]
) -> Any:
    """Run one side of an `if`, or record both if a tensor decides."""
    if not is_symbolic(test):
        return (then if truth(test) else otherwise)()
    state.refuse_odd("a branch")
    return record(test, then, otherwise, state)


def if_(test: Any, then: Thunk, otherwise: Thunk, state: VariableAccess) -> None:
    """Run an `if` in which no branch returns, breaks or continues."""
    _run_if(test, then, otherwise, state, branch)


def return_if(test: Any, then: Thunk, otherwise: Thunk, state: VariableAccess) -> Any:
    """Run an `if` with a `return` and the rest of the function; return the function's result."""
    # No variable is live: the statements after the `if` were moved into its branches.
    return _run_if(test, then, otherwise, state, partial(branch, live=()))


def leave_loop_if(test: Any, then: Thunk, otherwise: Thunk, state: VariableAccess) -> LoopExit:
    """Run an `if` that may leave a trip, and the rest of the trip; return how the trip ended."""
    return _run_if(test, then, otherwise, state, branch_exits) or NEXT


def return_from_loop(left: LoopExit, rest: Thunk, state: VariableAccess, always: bool) -> Any:  # noqa: FBT001 - generated calls
    """Return the value with which a loop returned, or the result of the rest of the function."""
    if left.returned is False:
        return rest()
    # `always`: the loop is a `while True` without `break`, so the statements after it cannot run.
    if left.returned is True or always:
        return left.value
    return branch(left.returned, lambda: left.value, rest, state, live=())


def leave_outer_loop(left: LoopExit, rest: Thunk, state: VariableAccess, always: bool) -> LoopExit:  # noqa: FBT001 - generated calls
    """Return how the outer trip ends after an inner loop that may have returned."""
    if left.returned is False:
        return rest() or NEXT
    out = returned(left.value)
    if left.returned is True or always:
        return out
    return branch_exits(left.returned, lambda: out, rest, state)


def while_(test: Thunk, body: Callable[[], LoopExit | None], state: VariableAccess) -> LoopExit:
    """Run `while test(): body()`; it becomes a loop of the graph once a tensor decides the test."""
    left = NEXT
    while not is_symbolic(left.broken):
        if left.broken:
            return left
        go_on = test()
        if is_symbolic(go_on):
            return while_tensor(test, body, state)
        if not truth(go_on):
            return left
        left = body() or NEXT
    return while_tensor(test, body, state, left)


def for_(iterable: Any, body: Callable[[Any], LoopExit | None], state: VariableAccess) -> LoopExit:
    """Run `for item in iterable: body(item)`; over tensors a loop of the graph, else unrolled."""
    if isinstance(iterable, Tensor):
        iterable = _LoopSlices([iterable], lambda _, x: x)
    if isinstance(iterable, (_Range, _LoopSlices)) and not iterable.is_eager():
        return iterable.loop(body, state)
    left = NEXT
    for item in iterable:
        if is_symbolic(left.broken):
            left = _unless_left(left, body, item, state)
        elif left.broken:
            break
        else:
            left = body(item) or NEXT
    return left


def _unless_left(
    left: LoopExit, body: Callable[[Any], LoopExit | None], item: Any, state: VariableAccess
) -> LoopExit:
    """Record one more trip of an unrolled loop that a tensor may have ended already."""
    state.refuse_odd("a loop that a tensor may leave")
    gone = LoopExit(broken=True, returned=left.returned, value=left.value)
    assert isinstance(left.broken, Tensor)
    return branch_exits(left.broken, lambda: gone, lambda: body(item), state)


@dataclass(frozen=True, slots=True)
class _Range:
    """`range` with a tensor or a symbolic size among its bounds; yields int64 scalars."""

    start: Any
    stop: Any
    step: int

    def is_eager(self) -> bool:
        return not any(is_symbolic(as_tensor(x)) for x in (self.start, self.stop))

    def __iter__(self) -> Iterator[Tensor]:
        start, stop = (int(as_tensor(x).numpy().reshape(())) for x in (self.start, self.stop))
        return (constant(i, int64) for i in range(start, stop, self.step))

    def loop(self, body: Callable[[Any], LoopExit | None], state: VariableAccess) -> LoopExit:
        start, stop = (as_tensor(x).cast(int64).reshape(()) for x in (self.start, self.stop))
        width = abs(self.step)
        span = stop - start if self.step > 0 else start - stop
        # count = max(ceil(span / width), 0), in integers
        count = maximum(span if width == 1 else div(span + (width - 1), width), as_tensor(0, int64))
        return count_tensor(count, lambda k: start + k * self.step, body, state)


@dataclass(frozen=True, slots=True)
class _LoopSlices:
    """Tensors iterated together along their first axis; `for` assigns `item(k, *slices)`."""

    xs: list[Tensor]
    item: Callable[..., Any]
    start: Any = None
    """The start of the counter `k`; None where nothing is counted."""

    def is_eager(self) -> bool:
        return not any(is_symbolic(x) for x in self.xs)

    def __iter__(self) -> Iterator[Any]:
        length = min(x.numpy().shape[0] for x in self.xs)
        for k in range(length):
            number = None if self.start is None else constant(self.start + k, int64)
            yield self.item(number, *(x[k] for x in self.xs))

    def loop(self, body: Callable[[Any], LoopExit | None], state: VariableAccess) -> LoopExit:
        if self.start is None:
            return walk_tensor(self.xs, lambda *s: self.item(None, *s), body, state)
        numbers = arange(self.xs[0].shape[0]) + self.start
        return walk_tensor([numbers, *self.xs], self.item, body, state)


def over(iterator: Any) -> Any:
    """Replace `range`, `enumerate` or `zip` of a `for` by a version that also accepts tensors."""
    return {range: _range, enumerate: _enumerate, zip: _zip}.get(iterator, iterator)


def _range(*args: Any) -> Any:
    if not any(isinstance(a, (Tensor, Expr)) for a in args):
        return range(*args)
    start, stop, step = (0, *args, 1) if len(args) == 1 else (*args, 1)[:3]
    if not isinstance(step, int) or step == 0:
        raise InvalidInput(f"range over tensors takes an int step that is not 0, got {step!r}")
    return _Range(start, stop, step)


def _enumerate(iterable: Any, start: int = 0) -> Any:
    if isinstance(iterable, Tensor):
        return _LoopSlices([iterable], lambda k, x: (k, x), start)
    return enumerate(iterable, start)


def _zip(*iterables: Any, strict: bool = False) -> Any:
    tensors = [x for x in iterables if isinstance(x, Tensor)]
    if tensors and len(tensors) == len(iterables):
        sizes = {x.shape[0] for x in tensors}
        if len(sizes) > 1:
            raise InvalidInput(f"zip needs tensors of the same length, got {list(sizes)}")
        return _LoopSlices(tensors, lambda _, *xs: xs)
    return zip(*iterables, strict=strict)


def plain(test: Any, what: str) -> Any:
    """Check a condition that stays Python: a tensor may not decide it."""
    if is_symbolic(test):
        raise InvalidInput(
            f"a tensor decides {what} ({VariableAccess(depth=2).here}), which cannot become part "
            "of a graph; use ops.where or ops.cond, move the condition out of it, or run in "
            "mode('eager')"
        )
    return test


def plain_iterable(iterable: Any, what: str) -> Iterable[Any]:
    """Check the iterable of a loop that stays Python."""
    symbolic = isinstance(iterable, (_Range, _LoopSlices)) and not iterable.is_eager()
    if symbolic or is_symbolic(iterable):
        raise InvalidInput(
            f"a tensor bounds {what} ({VariableAccess(depth=2).here}), which cannot become part of "
            "a graph; move the loop out of it, or run in mode('eager')"
        )
    return iterable  # type: ignore[no-any-return]
