"""What every engine offers: a function compiled to a program, a program looped over its state."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.graph import Array, Function
from triplane.unified_ir.ops.values import HostValue


class EngineLoop(Protocol):
    """Repeated calls whose state stays in the engine's own buffers."""

    def step(self, **batch: Array) -> dict[str, Array]:
        """One call on the given inputs; the results that are not state. On error nothing moves."""
        ...

    def state(self) -> dict[str, Array]:
        """A copy of the current state."""
        ...

    def view(self) -> Mapping[str, Array]:
        """The current state itself: to be read before the next step and never written."""
        ...

    def load(self, state: Mapping[str, Array]) -> None:
        """Replaces the named state tensors."""
        ...


class Program(Protocol):
    """A compiled function. Results do not depend on the engine beyond its stated precision."""

    function: Function

    def __call__(self, *args: HostValue) -> tuple[Array, ...]:
        """Results for positional arguments in parameter order; see `ops.contents` for both."""
        ...

    def loop(self, state: Mapping[str, Array]) -> EngineLoop:
        """A loop over the donated parameters, starting at a copy of `state`."""
        ...


class Engine(Protocol):
    """Compiles functions."""

    name: str

    def compile(self, function: Function, *, donate: Collection[str] = ()) -> Program:
        """A program; `donate` names the parameters that a loop keeps.

        Where a result has such a parameter's name, it is its value in the next step; without
        such a result the parameter stays.
        """
        ...


def check_donated(function: Function, donate: Collection[str]) -> None:
    """Donated names are parameters; a replacing result has the parameter's type."""
    for name in donate:
        param = function.param(name)
        if name in function.result_names and function.result(name).type != param.type:
            raise InvalidInput(
                f"donated {name!r} is {param.type} going in and {function.result(name).type} "
                "coming out; state keeps its type"
            )


def by_position(function: Function, args: Sequence[Array]) -> dict[str, Array]:
    """Arguments by parameter name."""
    if len(args) != len(function.params):
        raise InvalidInput(
            f"{function.name} takes {len(function.params)} arguments "
            f"({', '.join(function.param_names)}), got {len(args)}"
        )
    return dict(zip(function.param_names, args, strict=True))


class HostLoop:
    """A loop for engines whose buffers are host arrays."""

    def __init__(
        self, program: Program, donate: Collection[str], state: Mapping[str, Array]
    ) -> None:
        missing = sorted(set(donate) ^ set(state))
        if missing:
            raise InvalidInput(f"a loop starts from all donated state and no more; see {missing}")
        self._program = program
        self._state = self._copied(state)

    def step(self, **batch: Array) -> dict[str, Array]:
        """See `EngineLoop.step`."""
        function = self._program.function
        feeds: dict[str, Any] = {**self._state, **batch}
        if feeds.keys() != set(function.param_names):
            wrong = sorted(feeds.keys() ^ set(function.param_names))
            raise InvalidInput(f"step takes {', '.join(function.param_names)}; see {wrong}")
        results = self._program(*(feeds[n] for n in function.param_names))
        named = dict(zip(function.result_names, results, strict=True))
        self._state.update({k: named.pop(k) for k in self._state if k in named})
        return named

    def state(self) -> dict[str, Array]:
        """See `EngineLoop.state`."""
        return {k: v.copy() for k, v in self._state.items()}

    def view(self) -> Mapping[str, Array]:
        """See `EngineLoop.view`."""
        return self._state

    def load(self, state: Mapping[str, Array]) -> None:
        """See `EngineLoop.load`."""
        unknown = sorted(state.keys() - self._state.keys())
        if unknown:
            raise InvalidInput(f"state is {sorted(self._state)}; {unknown} is not")
        self._state.update(self._copied(state))

    def _copied(self, state: Mapping[str, Array]) -> dict[str, Array]:
        """Copies of state tensors, all of them held to their parameters' types."""
        arrays = {name: np.asarray(x) for name, x in state.items()}
        for name, x in arrays.items():
            wanted = self._program.function.param(name).type
            if x.dtype != wanted.dtype.numpy or x.shape != wanted.shape:
                raise InvalidInput(f"state {name!r} is {wanted}, got {x.dtype}{x.shape}")
        return {name: x.copy() for name, x in arrays.items()}
