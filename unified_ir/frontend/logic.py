"""`and`, `or`, `not`, chained comparisons and `a if c else b`, with or without tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from triplane.unified_ir.frontend.branches import as_condition, branch, is_symbolic, truth
from triplane.unified_ir.frontend.loops import is_harmless
from triplane.unified_ir.frontend.variables import VariableAccess
from triplane.unified_ir.ops.build import region
from triplane.unified_ir.ops.rows.arithmetic import elementwise
from triplane.unified_ir.ops.tensor import Tensor, as_tensor

Thunk = Callable[[], Any]
_COMPARE: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "Eq": operator.eq,
    "NotEq": operator.ne,
    "Lt": operator.lt,
    "LtE": operator.le,
    "Gt": operator.gt,
    "GtE": operator.ge,
    "Is": operator.is_,
    "IsNot": operator.is_not,
    "In": lambda a, b: a in b,
    "NotIn": lambda a, b: a not in b,
}


def and_(*parts: Thunk) -> Any:
    """Evaluate `a and b and ...` as Python does; with a tensor the result is a bool scalar."""
    return _shortcut(parts, VariableAccess(depth=2), stops_at=False)


def or_(*parts: Thunk) -> Any:
    """Evaluate `a or b or ...`; see `and_`."""
    return _shortcut(parts, VariableAccess(depth=2), stops_at=True)


def _shortcut(parts: Sequence[Thunk], state: VariableAccess, *, stops_at: bool) -> Any:
    first = parts[0]()
    for i, part in enumerate(parts[1:], 1):
        if is_symbolic(first):
            return _tensor_shortcut(first, parts[i:], state, stops_at=stops_at)
        if truth(first) is stops_at:
            return first
        first = part()
    return first


def _tensor_shortcut(
    first: Tensor, parts: Sequence[Thunk], state: VariableAccess, *, stops_at: bool
) -> Tensor:
    def rest() -> Tensor:
        value = _shortcut(parts, state, stops_at=stops_at)
        return as_condition(value) if isinstance(value, Tensor) else as_tensor(truth(value))

    flag = as_condition(first)
    with state.refusing_changes("`and` or `or`", *parts):
        scratch, _ = region("probe", [], lambda _: rest())
    # Operators that cannot fail may run even where Python would have skipped them: a logical
    # operator is cheaper than a Cond node.
    if is_harmless(scratch):
        row = elementwise.logical_or if stops_at else elementwise.logical_and
        return row(flag, rest())
    sides: tuple[Thunk, Thunk] = (lambda: True, rest) if stops_at else (rest, lambda: False)
    joined: Tensor = branch(flag, *sides, state)
    return joined


def not_(x: Any) -> Any:
    """Evaluate `not x`."""
    return elementwise.logical_not(as_condition(x)) if is_symbolic(x) else not truth(x)


def chain(left: Any, names: Sequence[str], *rights: Thunk) -> Any:
    """Evaluate `a < b <= c`; each operand is computed once, in order.

    As in Python, a comparison that is false ends the chain; where a tensor decides, the operands
    after it are computed in any case, since the graph needs them.
    """
    # The last operand computed, which the next comparison reads again.
    value: list[Any] = [left]

    def link(name: str, right: Thunk) -> Thunk:
        def compare() -> Any:
            before, after = value[-1], right()
            value.append(after)
            return _COMPARE[name](before, after)

        return compare

    links = map(link, names, rights)
    verdict = next(links)()
    for step in links:
        if is_symbolic(verdict):
            following = step()
            second = as_condition(following) if isinstance(following, Tensor) else truth(following)
            verdict = elementwise.logical_and(as_condition(verdict), as_tensor(second))
        elif not truth(verdict):
            return verdict
        else:
            verdict = step()
    return verdict


def if_expression(test: Any, then: Thunk, otherwise: Thunk) -> Any:
    """Evaluate `then if test else otherwise`."""
    if not is_symbolic(test):
        return then() if truth(test) else otherwise()
    return branch(test, then, otherwise, VariableAccess(depth=2))
