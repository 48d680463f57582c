"""Programs of XLA, one for each combination of sizes, and loops whose state stays on the device."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.engines.protocol import by_position, check_donated, check_state
from triplane.unified_ir.engines.reference import ReferenceProgram
from triplane.unified_ir.engines.xla.door import exact, jax, jnp
from triplane.unified_ir.engines.xla.lower import Requirements, Trace, check
from triplane.unified_ir.ir.graph import Array, Function, Value
from triplane.unified_ir.ops.evaluate import check_argument
from triplane.unified_ir.ops.rows.control.custom_ops import with_kernels
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.ops.values import HostValue, bind
from triplane.unified_ir.runtime.session import check_rows

MAX_SHAPES: Final = 32
"""Combinations of sizes whose programs are kept at once."""


class Compiled:
    """A function traced for one combination of sizes: (state, batch) -> (results, state, failed).

    failed: int32, which requirement failed, 0 if none; the new state is then the old one.
    """

    def __init__(self, function: Function, donate: Sequence[str]) -> None:
        self.requirements = Requirements()
        self._function = function
        self._donate = donate
        self.call: Callable[..., Any] = jax.jit(self._traced, donate_argnums=0, keep_unused=True)

    def _traced(self, state: Sequence[Any], batch: Sequence[Any]) -> Any:
        function, trace = self._function, Trace(self.requirements, {})
        named = dict(zip(self._donate, state, strict=True))
        fed = iter(batch)
        args = [named[n] if n in named else next(fed) for n in function.param_names]
        results = [jnp.asarray(r) for r in trace.run(function, args)]
        by_name = dict(zip(function.result_names, results, strict=True))
        moved = [by_name.pop(n, named[n]) for n in self._donate]
        failed = trace.failed
        if failed is None:
            return list(by_name.values()), moved, None
        # The update reads the old state anyway, so the selection costs no pass of its own.
        pairs = zip(self._donate, moved, strict=True)
        kept = [jnp.where(failed == 0, new, named[n]) for n, new in pairs]
        return list(by_name.values()), kept, failed


class XlaProgram:
    """A function compiled by XLA, for each combination of the sizes of its symbols."""

    def __init__(self, function: Function, donate: Collection[str]) -> None:
        check_donated(function, donate)
        check(function)
        self.function = function
        self._donate = tuple(donate)
        self._compiled: OrderedDict[Any, Compiled] = OrderedDict()
        self.batch = tuple(p for p in function.params if p.name not in self._donate)
        """The parameters that are not donated."""
        self.results = tuple(n for n in function.result_names if n not in self._donate)
        """The names of the results that are not state."""

    def __call__(self, *args: HostValue) -> tuple[Array, ...]:
        """See `Program`."""
        feeds = _checked(self.function.params, by_position(self.function, args))
        state, results = self._run([feeds[n] for n in self._donate], feeds)
        named = dict(zip(self.results, results, strict=True))
        named |= dict(zip(self._donate, state, strict=True))
        return tuple(np.array(named[n]) for n in self.function.result_names)

    def loop(self, state: Mapping[str, Array]) -> XlaLoop:
        """See `Program`."""
        check_state(self._donate, state)
        return XlaLoop(self, state)

    def run(self, state: Sequence[Any], feeds: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
        """Return the new state and the results; the arrays of `state` are given away.

        Refused where the data do not meet a requirement: it has the state, which is as it was.
        """
        batch = [feeds[p.name] for p in self.batch]
        compiled = self._for_shapes(tuple(x.shape for x in batch))
        with exact():
            try:
                results, state, failed = compiled.call(state, batch)
                number = 0 if failed is None else int(failed)
            except jax.errors.JaxRuntimeError as error:
                raise InvalidInput(f"XLA could not run {self.function.name}: {error}") from error
        if number:
            raise Refused(compiled.requirements.error(number), state)
        return state, results

    def explained(self, refused: Refused, feeds: Mapping[str, Any]) -> InvalidInput:
        """Return the error of the reference engine, which shows operands; else the plain one."""
        state = dict(zip(self._donate, map(np.asarray, refused.state), strict=True))
        values = {**feeds, **state}
        try:
            ReferenceProgram(self.function, ())(*(values[n] for n in self.function.param_names))
        except InvalidInput as error:
            return error
        return refused.error

    def _run(self, state: Sequence[Any], feeds: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
        try:
            return self.run(state, feeds)
        except Refused as refused:
            raise self.explained(refused, feeds) from None

    def _for_shapes(self, shapes: tuple[tuple[int, ...], ...]) -> Compiled:
        """Return the program for a batch of these shapes; the one unused longest gives way."""
        if shapes in self._compiled:
            self._compiled.move_to_end(shapes)
            return self._compiled[shapes]
        made = self._compiled[shapes] = Compiled(self.function, self._donate)
        if len(self._compiled) > MAX_SHAPES:
            self._compiled.popitem(last=False)
        return made


class Refused(Exception):
    """Data that a program refused. state: as it was before."""

    def __init__(self, error: InvalidInput, state: Sequence[Any]) -> None:
        super().__init__(str(error))
        self.error, self.state = error, state


class XlaLoop:
    """See `EngineLoop`: state in arrays of the device, each step's replacing those of the last."""

    def __init__(self, program: XlaProgram, state: Mapping[str, Array]) -> None:
        self._program = program
        self._params = {n: program.function.param(n) for n in state}
        self._state = self._placed(state)
        self._names = frozenset(p.name for p in program.batch)

    def step(self, **batch: Array) -> dict[str, Array]:
        """See `EngineLoop.step`."""
        program = self._program
        if batch.keys() != self._names:
            wrong = sorted(batch.keys() ^ self._names)
            raise InvalidInput(f"step takes {', '.join(sorted(self._names))}; wrong: {wrong}")
        feeds = _checked(program.batch, batch)
        check_rows(feeds)
        names = self._state.keys()
        try:
            state, results = program.run(list(self._state.values()), feeds)
        except Refused as refused:
            self._state = dict(zip(names, refused.state, strict=True))
            raise program.explained(refused, feeds) from None
        self._state = dict(zip(names, state, strict=True))
        return {n: np.array(r) for n, r in zip(program.results, results, strict=True)}

    def state(self) -> dict[str, Array]:
        """See `EngineLoop.state`."""
        return {n: np.array(x) for n, x in self._state.items()}

    def view(self) -> Mapping[str, Array]:
        """See `EngineLoop.view`."""
        return {n: np.asarray(x) for n, x in self._state.items()}

    def load(self, state: Mapping[str, Array]) -> None:
        """See `EngineLoop.load`."""
        if unknown := sorted(state.keys() - self._state.keys()):
            raise InvalidInput(f"the state has {sorted(self._state)}, but not {unknown}")
        self._state |= self._placed(state)

    def _placed(self, state: Mapping[str, Array]) -> dict[str, Any]:
        """Return copies on the device; InvalidInput if one is not of its parameter's type."""
        arrays = {n: np.asarray(x) for n, x in state.items()}
        for name, x in arrays.items():
            wanted = self._params[name].type
            if x.dtype != wanted.dtype.numpy or x.shape != wanted.shape:
                raise InvalidInput(f"state {name!r} is {wanted}, got {x.dtype}{x.shape}")
        with exact():
            # Copies: on a CPU JAX would otherwise read the caller's memory, which may change.
            return {n: jnp.array(x, copy=True) for n, x in arrays.items()}


def _checked(params: Sequence[Value], args: Mapping[str, Any]) -> dict[str, Array]:
    """Return the arguments as arrays; InvalidInput if one is not of its parameter's type."""
    sizes: dict[str, int] = {}
    feeds = {}
    for param in params:
        array = np.asarray(args[param.name])
        check_argument(param, array)
        bind(sizes, param.type, array)
        feeds[param.name] = array
    return feeds


class XlaEngine:
    """See the package."""

    name = "xla"

    def compile(self, function: Function, *, donate: Collection[str] = ()) -> XlaProgram:
        """See `Engine`."""
        return XlaProgram(with_kernels(TABLE, function, self.name), donate)
