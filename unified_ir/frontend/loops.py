"""Loops over tensors: one trip is recorded as the region of a `Loop` or `Scan` node.

The variables and buffers that a trip changes are carried from trip to trip. Where the loop may be
left early, a flag and the value to return are carried too. A variable without a common form from
trip to trip is not carried: it has no value at the start of a trip and after the loop, and reading
it raises an error with the reason. To find the form of the carry, trips are recorded into graphs
that are discarded, until the form no longer changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.frontend.binding import Parameter, current
from triplane.unified_ir.frontend.branches import (
    NEXT,
    LoopExit,
    as_condition,
    branch,
    is_symbolic,
    truth,
)
from triplane.unified_ir.frontend.merge import (
    UNBOUND,
    NoCommonForm,
    Slot,
    describe,
    fill_form,
    fillers,
    merge,
    same,
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
from triplane.unified_ir.ir.types import TensorType, bool_, int64
from triplane.unified_ir.ops.build import Build, region
from triplane.unified_ir.ops.rows.arithmetic.elementwise import logical_and, logical_not
from triplane.unified_ir.ops.rows.control.looping import fori_loop, while_loop
from triplane.unified_ir.ops.rows.control.scanning import scan
from triplane.unified_ir.ops.rows.movement.structure import zeros
from triplane.unified_ir.ops.tensor import Tensor, as_tensor, dims_of, emit

Trip = Callable[..., LoopExit | None]
MAX_ATTEMPTS: Final = 64
"""Number of times that one loop is recorded while looking for the form of its carry."""


class _CarryChanged(Exception):
    """The carry changed its form; the trip must be recorded again."""


class _Carry:
    """The values carried from trip to trip, in a form that widens until a trip keeps it."""

    def __init__(self, state: VariableAccess, start: LoopExit) -> None:
        self.state = state
        self.before = state.snapshot()
        self.start = start
        self.entered = self.before.buffers
        self.variables: dict[str, Any] = dict(self.before.variables)
        for name, value in self.variables.items():
            if value is UNBOUND and reason_of(name) is None:
                unbind(
                    name,
                    f"it is assigned only inside the loop at {state.here}, which may make no "
                    "trip, and is not carried from one trip to the next; give it a value before",
                )
        self.buffers: set[Parameter] = set()
        self.breaks = start.broken is not False
        self.returns = start.returned is not False
        self.value: Any = varying(start.value)

    def learn(self, left: LoopExit) -> bool:
        """Widen the form by the values after one trip; return whether that changed it."""
        seen = self.state.snapshot()
        changed = False
        for name, form in self.variables.items():
            wider = self._widened(name, form, seen.variables[name])
            changed |= not _equal(wider, form)
            self.variables[name] = wider
        assigned = {p for p, t in seen.buffers.items() if t is not self.entered.get(p)}
        changed |= not assigned <= self.buffers
        self.buffers |= assigned
        return self._learn_exit(left) or changed

    def _learn_exit(self, left: LoopExit) -> bool:
        breaks, returns = left.broken is not False, left.returned is not False
        # True > False: a flag that the carry did not have before.
        changed = breaks > self.breaks or returns > self.returns
        self.breaks |= breaks
        if not returns:
            return changed
        mine = varying(left.value)
        try:
            wider = merge(self.value, mine) if self.returns else mine
        except NoCommonForm as differ:
            raise InvalidInput(
                f"the loop at {self.state.here} returns {differ.a} and {differ.b}; return one "
                "type everywhere"
            ) from None
        changed |= self.returns and not _equal(wider, self.value)
        self.returns, self.value = True, wider
        return changed

    def _widened(self, name: str, form: Any, seen: Any) -> Any:
        here = self.state.here
        if form is UNBOUND:
            return UNBOUND
        if seen is UNBOUND:
            return unbind(name, reason_of(name) or f"the loop at {here} deletes it")
        try:
            return merge(form, seen)
        except NoCommonForm:
            return unbind(
                name,
                f"it is {describe(self.before.variables[name])} before the loop at {here} and "
                f"{describe(seen)} after a trip; a variable keeps its type from trip to trip",
            )

    def slots(self) -> list[Slot]:
        """Return the types of the carried tensors, in order."""
        carried = [s for form in self.variables.values() for s in slots(form)]
        carried += [Slot(p.type) for p in self._ordered()]
        flags = [Slot(TensorType(bool_, ()))]
        carried += flags if self.breaks else []
        return carried + (flags + slots(self.value) if self.returns else [])

    def _ordered(self) -> list[Parameter]:
        # In the order of the binding: a set has no order of its own, and the graph must be
        # reproducible.
        return [p for p in current().tensors if p in self.buffers] if self.buffers else []

    def initial(self) -> list[Tensor]:
        """Return the carry before the first trip."""
        if self.start.returned is False:
            # A placeholder: the value is read only where `returned` is true.
            value = [zeros(s.type.shape, s.type.dtype) for s in slots(self.value)]
        else:
            value = fillers(self.value, self.start.value)
        return self._tensors(self.before, self.start, value)

    def _tensors(self, now: VariableSnapshot, left: LoopExit, value: list[Any]) -> list[Tensor]:
        """Return the carry with the values of a snapshot, after a trip that ended as in `left`."""
        values = [f for n, form in self.variables.items() for f in fillers(form, now.variables[n])]
        values += [now.buffers.get(p, current().tensors[p]) for p in self._ordered()]
        values += [left.broken] if self.breaks else []
        values += [left.returned, *value] if self.returns else []
        return [as_tensor(x, s.type.dtype) for x, s in zip(values, self.slots(), strict=True)]

    def load(self, tensors: Sequence[Tensor]) -> LoopExit:
        """Restore the variables and buffers from the carried tensors."""
        rest = list(tensors)
        after = {n: fill_form(form, rest) for n, form in self.variables.items()}
        buffers = dict(self.before.buffers)
        buffers.update({p: rest.pop(0) for p in self._ordered()})
        self.entered = buffers
        self.state.restore(VariableSnapshot(after, buffers))
        broken: Any = rest.pop(0) if self.breaks else False
        if not self.returns:
            return LoopExit(broken)
        return LoopExit(broken, rest.pop(0), fill_form(self.value, rest))

    def unload(self, entered: LoopExit, left: LoopExit) -> list[Tensor]:
        """Return the carry after a trip; raise `_CarryChanged` if it does not fit the form."""
        if self.learn(left):
            raise _CarryChanged
        # A trip that did not return passes on the placeholder with which it was entered.
        value = entered.value if left.returned is False else left.value
        return self._tensors(self.state.snapshot(), left, fillers(self.value, value))


def while_tensor(
    test: Callable[[], Any], body: Trip, state: VariableAccess, start: LoopExit = NEXT
) -> LoopExit:
    """Record `while test(): body()`, starting from the current variables."""

    def record(carry: _Carry) -> list[Tensor]:
        carried: list[Tensor] = while_loop(
            lambda ts: _go(carry.load(ts), test, state),
            lambda ts: _after_trip(carry, ts, body),
            carry.initial(),
        )
        return carried

    return _repeat_until_stable(state, start, (), lambda _: body(), record)


def count_tensor(
    count: Tensor, item: Callable[[Tensor], Any], body: Trip, state: VariableAccess
) -> LoopExit:
    """Record `for k in range(count): body(item(k))`."""

    def trip(k: Tensor) -> LoopExit | None:
        return body(item(k))

    types = [TensorType(int64, ())]
    return _repeat_until_stable(
        state,
        NEXT,
        types,
        lambda ts: trip(*ts),
        lambda carry: _record_counted_loop(carry, count, trip),
    )


def walk_tensor(
    xs: Sequence[Tensor], item: Callable[..., Any], body: Trip, state: VariableAccess
) -> LoopExit:
    """Record `for x in xs: body(item(x))` along the first axis; counted if it may be left."""

    def at(k: Tensor) -> LoopExit | None:
        return body(item(*(emit("Gather", x, k, axis=0) for x in xs)))

    def record(carry: _Carry) -> list[Tensor]:
        # A Scan always runs to the end of its inputs, so a loop that may be left early is a Loop
        # that gathers one slice per trip.
        if carry.breaks:
            return _record_counted_loop(carry, dims_of([xs[0].shape[0]]).reshape(()), at)

        def trip(tensors: list[Tensor], slices: list[Tensor]) -> tuple[list[Tensor], list[Any]]:
            return _after_trip(carry, tensors, lambda: body(item(*slices))), []

        carried: list[Tensor] = scan(trip, carry.initial(), list(xs))[0]
        return carried

    types = [x.type.with_shape(x.shape[1:]) for x in xs]
    return _repeat_until_stable(state, NEXT, types, lambda params: body(item(*params)), record)


def _after_trip(
    carry: _Carry, tensors: Sequence[Tensor], body: Callable[[], LoopExit | None]
) -> list[Tensor]:
    """Return the carry after one trip from `tensors`."""
    entered = carry.load(tensors)
    with collecting():
        left = body() or NEXT
    return carry.unload(entered, left)


def _record_counted_loop(
    carry: _Carry, count: Tensor, body: Callable[[Tensor], LoopExit | None]
) -> list[Tensor]:
    """Record a loop over 0, 1, ... below `count`, or until it is left."""
    # Without an early exit the number of trips is known when the loop starts.
    if not carry.breaks:
        carried: list[Tensor] = fori_loop(
            count, lambda k, ts: _after_trip(carry, ts, lambda: body(k)), carry.initial()
        )
        return carried

    def goes_on(ts: list[Tensor]) -> Tensor:
        left = carry.load(ts[1:]).broken
        return logical_and(logical_not(as_condition(as_tensor(left))), ts[0] < count)

    def trip(ts: list[Tensor]) -> list[Tensor]:
        return [ts[0] + 1, *_after_trip(carry, ts[1:], lambda: body(ts[0]))]

    start = [as_tensor(0, int64), *carry.initial()]
    return list(while_loop(goes_on, trip, start))[1:]


def _repeat_until_stable(
    state: VariableAccess,
    start: LoopExit,
    types: Sequence[TensorType],
    probe: Callable[[list[Tensor]], LoopExit | None],
    record: Callable[[_Carry], list[Tensor]],
) -> LoopExit:
    """Record trips until the carry keeps its form; return the outcome of the loop."""
    state.refuse_odd("a loop")
    carry = _Carry(state, start)

    def probed(params: list[Tensor]) -> LoopExit:
        with collecting():
            return probe(params) or NEXT

    with state.refusing_changes("a loop", probe):
        # The first trip runs into a scratch graph: until it has run, nothing is known about what it
        # assigns or returns. Side effects are refused here, before any trip is recorded for good.
        carry.learn(region("probe", types, probed)[1])
        state.restore(carry.before)
    for _ in range(MAX_ATTEMPTS):
        state.restore(carry.before)
        if not carry.slots():
            return _without_carry(carry, types)
        try:
            outputs = record(carry)
        except _CarryChanged:
            continue
        return carry.load(outputs)
    raise InvalidInput(f"the variables of the loop at {state.here} change type with every trip")


def _without_carry(carry: _Carry, types: Sequence[TensorType]) -> LoopExit:
    """Handle a loop that changes nothing: a `for` is dropped, a `while` would never end."""
    if types:
        return NEXT
    for name, form in carry.variables.items():
        if form is UNBOUND and carry.before.variables[name] is not UNBOUND:
            raise InvalidInput(f"{name!r} cannot be carried: {reason_of(name)}")
    raise InvalidInput(
        f"no trip of the loop at {carry.state.here} changes a variable, so it would run "
        "forever or not at all; assign what its condition reads"
    )


def _go(left: LoopExit, test: Callable[[], Any], state: VariableAccess) -> Tensor:
    """Return `not broken and test()`; after a break the test is computed only if it cannot fail."""
    if left.broken is False:
        value = test()
        return as_condition(value) if isinstance(value, Tensor) else as_tensor(bool(value))
    # A Loop node computes its condition after every trip, also after a `break`, where Python would
    # not evaluate the test.
    on = logical_not(as_condition(as_tensor(left.broken)))
    scratch, value = region("probe", [], lambda _: test())
    if not is_symbolic(value):
        return on if truth(value) else as_tensor(np.array(False))
    if is_harmless(scratch):
        return logical_and(on, as_condition(test()))
    goes_on: Tensor = branch(on, lambda: as_condition(test()), lambda: False, state)
    return goes_on


def is_harmless(build: Build) -> bool:
    """Return whether a recorded graph may run where Python would not have run it."""
    return all(build.table[n.op.domain, n.op.name].total for n in build.nodes)


def _equal(a: Any, b: Any) -> bool:
    """Return whether two forms carry the same tensors."""
    if isinstance(a, Slot) and isinstance(b, Slot):
        return a.type == b.type
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    if isinstance(a, (tuple, list)) and type(a) is type(b):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    return same(a, b)
