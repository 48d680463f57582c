"""Many clients at once: the steps of each from one start, as one launch of the device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.engines.xla.door import exact, explained, jax, jnp, lax, tracing
from triplane.unified_ir.engines.xla.lower import Requirements, Trace, check
from triplane.unified_ir.ir.graph import Array, Function

MAX_BYTES: Final = 1 << 28
"""Limit for the states and batches of the clients of one launch; a program holds several copies."""
MAX_CLIENTS: Final = 1024


@dataclass(frozen=True, slots=True)
class CohortClient:
    """One client: the state in which it differs from the others, and a batch for each step."""

    own: Mapping[str, Array]
    batches: Sequence[Mapping[str, Array]]


@dataclass(frozen=True, slots=True)
class CohortOutcome:
    """A client after its steps: its state by name, and each result by step."""

    state: Mapping[str, Array]
    results: Mapping[str, Array]


Clients = Sequence[CohortClient]


class Cohort:
    """A step as a function of state and a batch, run by many clients from a common start.

    A result with a parameter's name is that state after the step. Clients whose batches have the
    same shapes share launches; their number is limited by the bytes of their states and batches.
    """

    def __init__(self, function: Function, state: Sequence[str]) -> None:
        check(function)
        self._function = function
        self._state = tuple(n for n in function.param_names if n in set(state))
        self._batch = tuple(n for n in function.param_names if n not in set(state))
        self._results = tuple(n for n in function.result_names if n not in self._state)
        self._requirements = Requirements()
        self._program: Any = jax.jit(jax.vmap(self._steps, in_axes=(None, 0, 0)))

    def run(
        self, start: Mapping[str, Array], clients: Sequence[CohortClient]
    ) -> list[CohortOutcome]:
        """Return the outcome of each client, in order. start: the state that all have in common.

        InvalidInput: a client's data are refused.
        """
        groups: dict[Any, list[int]] = {}
        for i, client in enumerate(clients):
            groups.setdefault(_shapes(client), []).append(i)
        outcomes: dict[int, CohortOutcome] = {}
        for members in groups.values():
            most = self._most(start, clients[members[0]])
            for at in range(0, len(members), most):
                some = members[at : at + most]
                launched = self._launch(start, [clients[i] for i in some])
                outcomes |= zip(some, launched, strict=True)
        return [outcomes[i] for i in range(len(clients))]

    def _most(self, start: Mapping[str, Array], client: CohortClient) -> int:
        """Return how many clients like this one a launch has at most: a power of four."""
        size = sum(start[n].nbytes for n in self._state if n in start)
        size += sum(x.nbytes for batch in client.batches for x in batch.values())
        most = max(1, min(MAX_CLIENTS, MAX_BYTES // max(size, 1)))
        return int(4 ** ((most.bit_length() - 1) // 2))

    def _launch(
        self, start: Mapping[str, Array], clients: Sequence[CohortClient]
    ) -> list[CohortOutcome]:
        # Powers of four, filled up with the first client: few sizes, so few programs.
        size = 4 ** math.ceil(math.log(len(clients), 4))
        padded = [*clients, *[clients[0]] * (size - len(clients))]
        common = {n: start[n] for n in self._state if n not in clients[0].own}
        own = {n: np.stack([c.own[n] for c in padded]) for n in clients[0].own}
        batches = {
            n: np.stack([np.stack([b[n] for b in c.batches]) for c in padded]) for n in self._batch
        }
        # Errors of the device may come only when its results are read.
        with exact(), explained(f"{self._function.name} for {size} devices in one launch"):
            state, results, failed = self._program(common, own, batches)
            arrays = {n: np.asarray(x) for n, x in state.items()}
            by_step = {n: np.asarray(x) for n, x in results.items()}
            bad = np.asarray(failed)[: len(clients)]
        if bad.any():
            raise self._requirements.error(int(bad[bad != 0][0]))
        return [
            CohortOutcome(
                {n: x[i] for n, x in arrays.items()}, {n: x[i] for n, x in by_step.items()}
            )
            for i in range(len(clients))
        ]

    @tracing()
    def _steps(self, common: Any, own: Any, batches: Any) -> Any:
        """Return one client's state and results; see `_launch`."""
        function = self._function

        def one(carry: Any, batch: Any) -> Any:
            state, earlier = carry
            trace = Trace(self._requirements, {})
            args = [batch[n] if n in batch else state[n] for n in function.param_names]
            named = dict(zip(function.result_names, trace.run(function, args), strict=True))
            moved = {n: jnp.asarray(named[n]) if n in named else x for n, x in state.items()}
            failed = earlier
            if trace.failed is not None:
                failed = jnp.where(earlier == 0, trace.failed, earlier)
            return (moved, failed), {n: jnp.asarray(named[n]) for n in self._results}

        begin = ({**common, **own}, jnp.int32(0))
        (state, failed), results = lax.scan(one, begin, batches)
        return state, results, failed


def _at(arrays: Mapping[str, Array], i: int) -> dict[str, Array]:
    return {n: x[i] for n, x in arrays.items()}


def _shapes(client: CohortClient) -> Any:
    """Return the shapes of a client's batches, which are the same in each of its steps."""
    kinds = [tuple((n, x.shape) for n, x in sorted(b.items())) for b in client.batches]
    if any(kind != kinds[0] for kind in kinds):
        raise InvalidInput(f"the steps of a client need batches of one shape, got {set(kinds)}")
    return len(kinds), kinds[0]
