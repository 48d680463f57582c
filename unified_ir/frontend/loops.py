"""Loops over tensors: one trip is recorded as the region of a `Loop` or `Scan` node.

Carried from trip to trip are the variables and buffers that a trip changes, and, where the loop may
be left early, a flag and the value to return. What has no common form from trip to trip is not
carried: it has no value at the start of a trip and after the loop, and reading it says why. The
carry is found by recording trips into graphs that are thrown away until it stays the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.frontend.binding import Parameter, current
from triplane.unified_ir.frontend.branches import branch
from triplane.unified_ir.frontend.exits import NEXT, Exit
from triplane.unified_ir.frontend.merge import (
    UNBOUND,
    Differ,
    Slot,
    describe,
    filled,
    fillers,
    merge,
    same,
    slots,
    varying,
)
from triplane.unified_ir.frontend.truth import as_condition, is_symbolic, truth
from triplane.unified_ir.frontend.variables import (
    VariableAccess,
    VariableSnapshot,
    collecting,
    reason_of,
    unbind,
)
from triplane.unified_ir.ir.types import TensorType, bool_, int64
from triplane.unified_ir.ops.build import Build, region
from triplane.unified_ir.ops.control import fori_loop, scan, while_loop
from triplane.unified_ir.ops.elementwise import and_, not_
from triplane.unified_ir.ops.structure import zeros
from triplane.unified_ir.ops.tensor import Tensor, as_tensor, dims_of, emit

Trip = Callable[..., Exit | None]
MAX_ATTEMPTS: Final = 64
"""Recordings of one loop before its carry must have settled."""
_HARMLESS: Final = frozenset(
    {"Abs", "Add", "And", "Cast", "Constant", "Equal", "Greater", "GreaterOrEqual", "Identity"}
    | {"Less", "LessOrEqual", "Mul", "Neg", "Not", "Or", "ReduceMax", "ReduceSum", "Reshape", "Sub"}
)
"""Operators that fail on no input, so they may run where Python would not run them."""


class _Again(Exception):
    """The carry changed its form; the trip must be recorded anew."""


class _Carry:
    """What goes from trip to trip, in a form that grows until a trip keeps it."""

    def __init__(self, state: VariableAccess, start: Exit) -> None:
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

    def learn(self, left: Exit) -> bool:
        """Widens the form by what one trip left behind; whether that changed it."""
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

    def _learn_exit(self, left: Exit) -> bool:
        changed = (left.broken is not False and not self.breaks) or (
            left.returned is not False and not self.returns
        )
        self.breaks |= left.broken is not False
        if left.returned is False:
            return changed
        mine = varying(left.value)
        try:
            wider = merge(self.value, mine) if self.returns else mine
        except Differ as differ:
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
        except Differ:
            return unbind(
                name,
                f"it is {describe(self.before.variables[name])} before the loop at {here} and "
                f"{describe(seen)} after a trip; a variable keeps its type from trip to trip",
            )

    def slots(self) -> list[Slot]:
        """Types of the carried tensors, in order."""
        found = [s for form in self.variables.values() for s in slots(form)]
        found += [Slot(p.type) for p in self._ordered()]
        flags = [Slot(TensorType(bool_, ()))]
        found += flags if self.breaks else []
        return found + (flags + slots(self.value) if self.returns else [])

    def _ordered(self) -> list[Parameter]:
        return [p for p in current().tensors if p in self.buffers] if self.buffers else []

    def initial(self) -> list[Tensor]:
        """The carry before the first trip."""
        given: list[Any] = []
        for name, form in self.variables.items():
            given += fillers(form, self.before.variables[name])
        given += [self.before.buffers.get(p, current().tensors[p]) for p in self._ordered()]
        given += [self.start.broken] if self.breaks else []
        if self.returns:
            given.append(self.start.returned)
            if self.start.returned is False:
                given += [zeros(s.type.shape, s.type.dtype) for s in slots(self.value)]
            else:
                given += fillers(self.value, self.start.value)
        return self._admitted(given)

    def _admitted(self, values: Sequence[Any]) -> list[Tensor]:
        return [as_tensor(x, s.type.dtype) for x, s in zip(values, self.slots(), strict=True)]

    def load(self, tensors: Sequence[Tensor]) -> Exit:
        """Lets the carried tensors be the variables and buffers."""
        rest = list(tensors)
        after = {n: filled(form, rest) for n, form in self.variables.items()}
        buffers = dict(self.before.buffers)
        buffers.update({p: rest.pop(0) for p in self._ordered()})
        self.entered = buffers
        self.state.restore(VariableSnapshot(after, buffers))
        broken: Any = rest.pop(0) if self.breaks else False
        if not self.returns:
            return Exit(broken)
        return Exit(broken, rest.pop(0), filled(self.value, rest))

    def unload(self, entered: Exit, left: Exit) -> list[Tensor]:
        """The carry after a trip; raises `_Again` if it does not fit the form."""
        if self.learn(left):
            raise _Again
        seen = self.state.snapshot()
        given: list[Any] = []
        for name, form in self.variables.items():
            given += fillers(form, seen.variables[name])
        given += [seen.buffers[p] for p in self._ordered()]
        given += [left.broken] if self.breaks else []
        if self.returns:
            given.append(left.returned)
            kept = entered.value if left.returned is False else left.value
            given += fillers(self.value, kept)
        return self._admitted(given)


def while_tensor(
    test: Callable[[], Any], body: Trip, state: VariableAccess, start: Exit = NEXT
) -> Exit:
    """`while test(): body()`, from the variables as they are now."""

    def record(carry: _Carry) -> list[Tensor]:
        made: list[Tensor] = while_loop(
            lambda ts: _go(carry.load(ts), test, state),
            lambda ts: _tripped(carry, ts, body),
            carry.initial(),
        )
        return made

    return _settled(state, start, (), lambda _: body(), record)


def count_tensor(
    count: Tensor, item: Callable[[Tensor], Any], body: Trip, state: VariableAccess
) -> Exit:
    """`for k in range(count): body(item(k))`."""

    def trip(k: Tensor) -> Exit | None:
        return body(item(k))

    return _settled(
        state,
        NEXT,
        [TensorType(int64, ())],
        lambda params: trip(params[0]),
        lambda carry: _counted(carry, count, trip),
    )


def walk_tensor(
    xs: Sequence[Tensor], item: Callable[..., Any], body: Trip, state: VariableAccess
) -> Exit:
    """`for x in xs: body(item(x))` along the first axis: a scan, counted if it may be left."""

    def at(k: Tensor) -> Exit | None:
        return body(item(*(emit("Gather", x, k, axis=0) for x in xs)))

    def record(carry: _Carry) -> list[Tensor]:
        if carry.breaks:
            return _counted(carry, dims_of([xs[0].shape[0]]).reshape(()), at)

        def trip(tensors: list[Tensor], slices: list[Tensor]) -> tuple[list[Tensor], list[Any]]:
            return _tripped(carry, tensors, lambda: body(item(*slices))), []

        made: list[Tensor] = scan(trip, carry.initial(), list(xs))[0]
        return made

    types = [x.type.with_shape(x.shape[1:]) for x in xs]
    return _settled(state, NEXT, types, lambda params: body(item(*params)), record)


def _tripped(
    carry: _Carry, tensors: Sequence[Tensor], body: Callable[[], Exit | None]
) -> list[Tensor]:
    """The carry after one trip from `tensors`."""
    entered = carry.load(tensors)
    with collecting():
        left = body() or NEXT
    return carry.unload(entered, left)


def _counted(carry: _Carry, count: Tensor, body: Callable[[Tensor], Exit | None]) -> list[Tensor]:
    """A loop over 0, 1, ... below `count`, or until it is left."""
    if not carry.breaks:
        made: list[Tensor] = fori_loop(
            count, lambda k, ts: _tripped(carry, ts, lambda: body(k)), carry.initial()
        )
        return made

    def goes_on(ts: list[Tensor]) -> Tensor:
        left = carry.load(ts[1:]).broken
        return and_(not_(as_condition(as_tensor(left))), ts[0] < count)

    def trip(ts: list[Tensor]) -> list[Tensor]:
        return [ts[0] + 1, *_tripped(carry, ts[1:], lambda: body(ts[0]))]

    start = [as_tensor(0, int64), *carry.initial()]
    return list(while_loop(goes_on, trip, start))[1:]


def _settled(
    state: VariableAccess,
    start: Exit,
    types: Sequence[TensorType],
    probe: Callable[[list[Tensor]], Exit | None],
    record: Callable[[_Carry], list[Tensor]],
) -> Exit:
    """Records trips until the carry keeps its form; the loop's outcome."""
    state.refuse_odd("a loop")
    carry = _Carry(state, start)
    with state.refusing_changes("a loop", probe):
        _, left = region("probe", types, lambda params: _probed(probe, params))
        carry.learn(left)
        state.restore(carry.before)
    for _ in range(MAX_ATTEMPTS):
        state.restore(carry.before)
        if not carry.slots():
            return _without_carry(carry, types)
        try:
            outputs = record(carry)
        except _Again:
            continue
        return carry.load(outputs)
    raise InvalidInput(f"the variables of the loop at {state.here} change form with every trip")


def _probed(probe: Callable[[list[Tensor]], Exit | None], params: list[Tensor]) -> Exit:
    with collecting():
        return probe(params) or NEXT


def _without_carry(carry: _Carry, types: Sequence[TensorType]) -> Exit:
    """A `for` that changes nothing does nothing; a `while` would never end."""
    if types:
        return NEXT
    for name, form in carry.variables.items():
        if form is UNBOUND and carry.before.variables[name] is not UNBOUND:
            raise InvalidInput(f"{name!r} cannot be carried: {reason_of(name)}")
    raise InvalidInput(
        f"no trip of the loop at {carry.state.here} changes a variable, so it would run "
        "for ever or not at all; assign what its condition reads"
    )


def _go(left: Exit, test: Callable[[], Any], state: VariableAccess) -> Tensor:
    """`not broken and test()`; the test is computed after a break only where it cannot fail."""
    if left.broken is False:
        value = test()
        return as_condition(value) if isinstance(value, Tensor) else as_tensor(bool(value))
    on = not_(as_condition(as_tensor(left.broken)))
    scratch, value = region("probe", [], lambda _: test())
    if not is_symbolic(value):
        return on if truth(value) else as_tensor(np.array(False))
    if is_harmless(scratch):
        return and_(on, as_condition(test()))
    found: Tensor = branch(on, lambda: as_condition(test()), lambda: False, state)
    return found


def is_harmless(build: Build) -> bool:
    """Whether a recorded graph may run where Python would not have computed it."""
    return all(n.op.name in _HARMLESS and not n.regions for n in build.nodes)


def _equal(a: Any, b: Any) -> bool:
    """Whether two forms carry the same tensors."""
    if isinstance(a, Slot) and isinstance(b, Slot):
        return a.type == b.type
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    if isinstance(a, (tuple, list)) and type(a) is type(b):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    return same(a, b)
