"""The interface of engines: compile a function to a program, loop a program over its state."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from triplane.proto.errors import InvalidInput, Unavailable
from triplane.unified_ir.ir.graph import Array, Function
from triplane.unified_ir.ops.values import HostValue


class StateLost(Unavailable):
    """A step that was cut short has used up the state of its loop."""


class EngineLoop(Protocol):
    """Repeated calls whose state stays in the engine's own buffers."""

    def step(self, **batch: Array) -> dict[str, Array]:
        """Run once and return the results that are not state; an error changes no state.

        After a step that was interrupted, or ran out of memory, StateLost may be all that is left.
        """
        ...

    def state(self) -> dict[str, Array]:
        """Return a copy of the current state."""
        ...

    def view(self) -> Mapping[str, Array]:
        """Return the current state itself: read it before the next step and never write to it."""
        ...

    def load(self, state: Mapping[str, Array]) -> None:
        """Replace the named state tensors."""
        ...


class LaunchBatches(Protocol):
    """The batches of one launch, copied to memory that its loop uses in turn.

    Another thread than the loop's may fill the batches of the next launch.
    """

    def __len__(self) -> int: ...

    def add(self, batch: Mapping[str, Array]) -> None:
        """Copy one more batch; InvalidInput if its shapes are not those of the first."""
        ...

    def finish(self) -> None:
        """Copy the batches to the device if that is possible ahead of the launch."""
        ...

    def batch(self, i: int) -> dict[str, Array]:
        """Return a batch by name; its memory is used again two launches later."""
        ...


@runtime_checkable
class LaunchingLoop(EngineLoop, Protocol):
    """A loop that runs several steps in one launch of its device."""

    def stage(self, *, room: int) -> LaunchBatches:
        """Return an empty launch of at most `room` batches.

        The one before the last must be done by then, because it has the same memory.
        """
        ...

    def launch(self, staged: LaunchBatches) -> list[dict[str, Array]]:
        """Run a step for each batch and return the results of each.

        A batch that is refused ends the launch: the results are those of the steps before it, and
        the state is that after them. InvalidInput where it is the first one.
        """
        ...


class Program(Protocol):
    """A compiled function. Results of engines differ only by their stated precision."""

    function: Function

    def __call__(self, *args: HostValue) -> tuple[Array, ...]:
        """Return the results for arguments in parameter order; see `ops.values` for both."""
        ...

    def loop(self, state: Mapping[str, Array]) -> EngineLoop:
        """Return a loop over the donated parameters that starts at a copy of `state`."""
        ...


class Engine(Protocol):
    """Compiles functions."""

    name: str

    def compile(self, function: Function, *, donate: Collection[str] = ()) -> Program:
        """Compile to a program; `donate` names the parameters that a loop keeps.

        A result with such a parameter's name is its value in the next step; a parameter without
        such a result keeps its value.
        """
        ...


@runtime_checkable
class HasState(Protocol):
    """Holds what a resumed run needs, such as a choice that an engine made by measured times."""

    @property
    def state_key(self) -> str:
        """The name of its state in checkpoints."""
        ...

    def state_dict(self) -> Mapping[str, Array]:
        """Return arrays that a resumed run needs."""
        ...

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Take the arrays of a checkpoint, of which there may be none; Corrupt if it is damaged."""
        ...


class ProcessGroup(Protocol):
    """The processes of one run, of which this is one; all of them make the same calls in order."""

    @property
    def is_first(self) -> bool:
        """Return whether this process writes what is written once."""
        ...

    def wait(self, what: str) -> None:
        """Return when every process has come here; Unavailable if one is lost."""
        ...

    def difference(self, facts: Mapping[str, str]) -> tuple[int, str, str, str] | None:
        """Return, in every process, where one differs from the first: None if none does.

        That is its number, the name of the fact, its value there, and its value in the first.
        """
        ...

    def stops(self) -> bool:
        """Return, in the same call in every process, whether one of them was asked to end."""
        ...


def check_donated(function: Function, donate: Collection[str]) -> None:
    """Raise InvalidInput unless donated names are parameters that keep their type."""
    for name in donate:
        old = function.param(name).type
        new = function.result(name).type if name in function.result_names else old
        if old != new:
            raise InvalidInput(
                f"donated {name!r} must keep its type: {old} as parameter, {new} as result"
            )


def check_state(donate: Collection[str], state: Collection[str]) -> None:
    """Raise InvalidInput unless a loop's state has exactly the donated names."""
    if differing := sorted(set(donate) ^ set(state)):
        raise InvalidInput(f"a loop needs exactly the donated state; differing: {differing}")


def by_position(function: Function, args: Sequence[Array]) -> dict[str, Array]:
    """Return the arguments by parameter name."""
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
        check_state(donate, state)
        self._program = program
        self._state = self._copied(state)

    def step(self, **batch: Array) -> dict[str, Array]:
        """See `EngineLoop.step`."""
        function = self._program.function
        feeds: dict[str, Any] = {**self._state, **batch}
        if feeds.keys() != set(function.param_names):
            wrong = sorted(feeds.keys() ^ set(function.param_names))
            raise InvalidInput(f"step takes {', '.join(function.param_names)}; wrong: {wrong}")
        results = self._program(*(feeds[n] for n in function.param_names))
        named = dict(zip(function.result_names, results, strict=True))
        # Copies: a result may be an argument itself, to whose memory the caller writes again.
        self._state.update({k: named.pop(k).copy() for k in self._state if k in named})
        return named

    def state(self) -> dict[str, Array]:
        """See `EngineLoop.state`."""
        return {k: v.copy() for k, v in self._state.items()}

    def view(self) -> Mapping[str, Array]:
        """See `EngineLoop.view`."""
        return self._state

    def load(self, state: Mapping[str, Array]) -> None:
        """See `EngineLoop.load`."""
        if unknown := sorted(state.keys() - self._state.keys()):
            raise InvalidInput(f"the state has {sorted(self._state)}, but not {unknown}")
        self._state.update(self._copied(state))

    def _copied(self, state: Mapping[str, Array]) -> dict[str, Array]:
        """Return copies of state tensors; InvalidInput if one is not of its parameter's type."""
        arrays = {name: np.asarray(x) for name, x in state.items()}
        for name, x in arrays.items():
            wanted = self._program.function.param(name).type
            if x.dtype != wanted.dtype.numpy or x.shape != wanted.shape:
                raise InvalidInput(f"state {name!r} is {wanted}, got {x.dtype}{x.shape}")
        return {name: x.copy() for name, x in arrays.items()}
