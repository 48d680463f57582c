"""`if` on a tensor: both sides are recorded as regions of one `Cond` node.

The outputs of the node are the value of the sides, every variable that may differ after them, and
every buffer that either side assigned. A variable without a common form on both sides has no value
afterwards, and reading it raises an error with the reason. A condition on a Python value is decided
while recording; a condition on a tensor is decided when the graph runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.frontend.binding import Parameter, current
from triplane.unified_ir.frontend.merge import (
    UNBOUND,
    NoCommonForm,
    describe,
    fill_form,
    fillers,
    merge,
    slots,
    varying,
)
from triplane.unified_ir.frontend.variables import (
    VariableAccess,
    VariableSnapshot,
    collecting,
    reason_of,
    unbind,
)
from triplane.unified_ir.ir.types import DType, bool_
from triplane.unified_ir.ops.build import Build, region
from triplane.unified_ir.ops.rows.arithmetic.elementwise import logical_not
from triplane.unified_ir.ops.rows.control.conditional import cond_node
from triplane.unified_ir.ops.rows.movement.structure import zeros
from triplane.unified_ir.ops.tensor import Tensor

Thunk = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class LoopExit:
    """The outcome of one trip of a loop.

    `broken`: the loop ends. `returned`: the function ends too, with `value`. Each flag is a bool,
    or a bool tensor where a tensor decided.
    """

    broken: bool | Tensor = False
    returned: bool | Tensor = False
    value: Any = None

    def parts(self) -> tuple[Any, Any, Any]:
        """Return the three parts as a tree."""
        return self.broken, self.returned, self.value


NEXT: Final = LoopExit()
BREAK: Final = LoopExit(broken=True)


def returned(value: Any) -> LoopExit:
    """Return the outcome of a trip that ends with `return value`."""
    return LoopExit(broken=True, returned=True, value=value)


def is_symbolic(x: Any) -> bool:
    """Return whether `x` is a tensor without a value, of a graph that is being recorded."""
    return isinstance(x, Tensor) and x.build.arrays is None


def truth(x: Any) -> bool:
    """Return the truth of anything that has a value now."""
    if isinstance(x, Tensor):
        _one_value(x)
    return bool(x)


def as_condition(x: Tensor) -> Tensor:
    """Return a bool scalar: whether the one element of `x` is not zero."""
    _one_value(x)
    flag = x if x.dtype == bool_ else logical_not(x == 0)
    return flag.reshape(()) if flag.rank else flag


def _one_value(x: Tensor) -> None:
    if x.type.size != 1:
        raise InvalidInput(
            f"a condition is one truth value, got {x.type}; reduce it, e.g. with "
            'ops.where, or `mask.cast("int64").sum() > 0` for "any"'
        )


@dataclass(frozen=True, slots=True)
class _Side:
    """One recorded branch: its graph, its value, and the assignments after it."""

    build: Build
    value: Any
    after: VariableSnapshot


_Rows = list[tuple[Any, Any, DType]]
"""The outputs of the node under construction: each side's value and the dtype they share."""


def _rows(form: Any, a: Any, b: Any) -> _Rows:
    dtypes = (s.type.dtype for s in slots(form))
    return list(zip(fillers(form, a), fillers(form, b), dtypes, strict=True))


def branch(
    test: Tensor,
    then: Thunk,
    otherwise: Thunk,
    state: VariableAccess,
    *,
    live: Sequence[str] | None = None,
) -> Any:
    """Record both sides; return their value and leave the variables as the test decides.

    live: the variables that are read afterwards; all of them by default.
    """
    flag = as_condition(test)
    yes, no = _sides(then, otherwise, state)
    try:
        value = merge(yes.value, no.value)
    except NoCommonForm as differ:
        raise InvalidInput(
            f"the branches at {state.here} give {differ.a} and {differ.b}; give the same type in "
            "both (a branch without `return` gives None)"
        ) from None
    return _joined(flag, yes, no, value, state, state.names if live is None else live)


def branch_exits(test: Tensor, then: Thunk, otherwise: Thunk, state: VariableAccess) -> LoopExit:
    """Record both sides like `branch`, where each gives a `LoopExit`."""
    flag = as_condition(test)
    yes, no = _sides(then, otherwise, state)
    first, second = yes.value or NEXT, no.value or NEXT
    first = _with_value(yes.build, first, like=second)
    second = _with_value(no.build, second, like=first)
    yes, no = replace(yes, value=first.parts()), replace(no, value=second.parts())
    try:
        form = merge(yes.value, no.value)
    except NoCommonForm as differ:
        raise InvalidInput(
            f"the branches at {state.here} return {differ.a} and {differ.b}; return the same type "
            "everywhere"
        ) from None
    return LoopExit(*_joined(flag, yes, no, form, state, state.names))


def _with_value(build: Build, mine: LoopExit, *, like: LoopExit) -> LoopExit:
    """Return zeros for the value of a side that does not return, so that both sides have one."""
    if mine.returned is not False or like.returned is False:
        return mine
    form = varying(like.value)
    with build:
        padding = [zeros(s.type.shape, s.type.dtype) for s in slots(form)]
    return replace(mine, value=fill_form(form, padding))


def _sides(then: Thunk, otherwise: Thunk, state: VariableAccess) -> tuple[_Side, _Side]:
    before = state.snapshot()
    sides = []
    with state.refusing_changes("a branch", then, otherwise):
        for name, f in (("then", then), ("else", otherwise)):
            state.restore(before)

            # The default argument binds `f` now; a closure would see its last value.
            def record(_: Any, f: Thunk = f) -> Any:
                with collecting():
                    return f()

            build, value = region(name, [], record)
            sides.append(_Side(build, value, state.snapshot()))
        state.restore(before)
    return sides[0], sides[1]


def _joined(
    flag: Tensor, yes: _Side, no: _Side, value: Any, state: VariableAccess, live: Sequence[str]
) -> Any:
    # `rows` collects the outputs in the order value, variables, buffers, and `fill_form` below
    # takes them from the front in that same order.
    rows = _rows(value, yes.value, no.value)
    variables = {
        n: _variable(n, yes.after.variables[n], no.after.variables[n], rows, state) for n in live
    }
    buffers = _buffers(yes.after.buffers, no.after.buffers, rows)
    outputs: list[Tensor] = []
    if rows:
        results = (
            [yes.build.as_operand(a, dtype) for a, _, dtype in rows],
            [no.build.as_operand(b, dtype) for _, b, dtype in rows],
        )
        outputs = list(cond_node(flag, [], (yes.build, no.build), results))
    merged = fill_form(value, outputs)
    after = state.snapshot().variables
    after |= {n: fill_form(form, outputs) for n, form in variables.items()}
    state.restore(VariableSnapshot(after, {p: fill_form(f, outputs) for p, f in buffers.items()}))
    return merged


def _variable(name: str, a: Any, b: Any, rows: _Rows, state: VariableAccess) -> Any:
    """Return the variable's form after the branches, or UNBOUND with a recorded reason."""
    if a is UNBOUND and b is UNBOUND:
        return UNBOUND
    if a is UNBOUND or b is UNBOUND:
        when = "does not hold" if a is UNBOUND else "holds"
        reason = reason_of(name) or (
            f"it is assigned only when the condition at {state.here} {when}; "
            "give it a value before the `if`"
        )
        return unbind(name, reason)
    try:
        form = merge(a, b)
    except NoCommonForm:
        return unbind(
            name,
            f"it is {describe(a)} when the condition at {state.here} holds and {describe(b)} when "
            "it does not; give it one type in both branches",
        )
    rows += _rows(form, a, b)
    return form


def _buffers(
    yes: dict[Parameter, Tensor], no: dict[Parameter, Tensor], rows: _Rows
) -> dict[Parameter, Any]:
    """Return the forms of buffers that either side assigned; the other side keeps its old value."""
    forms: dict[Parameter, Any] = {}
    for parameter in {**yes, **no}:
        start = current().tensors[parameter]
        a, b = yes.get(parameter, start), no.get(parameter, start)
        # Cannot fail: `Binding.assign` made sure that both have the buffer's type.
        forms[parameter] = merge(a, b)
        rows += _rows(forms[parameter], a, b)
    return forms
