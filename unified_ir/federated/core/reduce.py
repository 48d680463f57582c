"""The cloud's side of a round: the mean of the updates, then the server's optimizer.

    d = sum_k w_k change_k / sum_k w_k,  in float64 and in the given order
    state' = step(state, d) for parameters, state + d for buffers (statistics of batches)

The order decides the bits, so callers give updates in the order of device names. Updates are opened
one at a time and added chunk by chunk: memory is the state, its sums in float64 and one update.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.core.draws import Array

CHUNK: Final = 1 << 16
"""Entries added at a time: half a megabyte in float64, which stays in the processor's cache."""
MAX_EXAMPLES: Final = 1 << 40
"""Largest number of examples of an update; sums of them stay exact in float64."""
WEIGHTINGS: Final = ("examples", "equal")

State = Mapping[str, Array]
Update = tuple[int, Callable[[], State]]
"""(examples, opens the change)."""


ServerHyper = Mapping[str, float]
"""Hyperparameters by name."""


@dataclass(frozen=True, slots=True)
class ServerOptimizer:
    """An optimizer. slots: prefixes of its state; step: (x, d, slots, hyper) -> (x', slots')."""

    name: str
    slots: tuple[str, ...]
    step: Callable[[Array, Array, tuple[Array, ...], ServerHyper], tuple[Array, tuple[Array, ...]]]


def reduce(
    state: State,
    slots: State,
    updates: Sequence[Update],
    *,
    weighting: str,
    server: ServerOptimizer,
    hyper: ServerHyper,
    buffers: Collection[str] = (),
) -> tuple[dict[str, Array], dict[str, Array]]:
    """(the next shared state, the optimizer's next slots); `slots` is empty before the first round.

    buffers: tensors that take the mean as it is, whatever optimizer and rate. What is no float
    stays as it is. InvalidInput without updates, or where one does not fit the state.
    """
    sums = _mean(state, updates, weighting)
    after = dict(state)
    kept: dict[str, Array] = {}
    for name, d in sums.items():
        x = state[name]
        row = PLAIN if name in buffers else server
        names = [f"{s}.{name}" for s in row.slots]
        old = [slots[s] if s in slots else np.zeros(x.shape, x.dtype) for s in names]
        after[name], moved = _stepped(row, x, d, old, hyper)
        kept |= dict(zip(names, moved, strict=True))
    return after, kept


def _stepped(
    row: ServerOptimizer, x: Array, d: Array, old: Sequence[Array], hyper: ServerHyper
) -> tuple[Array, list[Array]]:
    """The row's step in float64, chunk by chunk: it looks at each entry alone."""
    new, moved = np.empty(x.shape, x.dtype), [np.empty(s.shape, s.dtype) for s in old]
    flat = [a.reshape(-1) for a in (x, d, new)]
    slots = [a.reshape(-1) for a in old]
    to = [a.reshape(-1) for a in moved]
    for at in range(0, x.size, CHUNK):
        part = slice(at, at + CHUNK)
        stepped, went = row.step(
            flat[0][part].astype(np.float64), flat[1][part], tuple(s[part] for s in slots), hyper
        )
        flat[2][part] = stepped
        for slot, value in zip(to, went, strict=True):
            slot[part] = value
    return new, moved


def _mean(state: State, updates: Sequence[Update], weighting: str) -> dict[str, Array]:
    total = sum(_weight(examples, weighting) for examples, _ in updates)
    if not total:
        raise InvalidInput("a round is reduced from at least one update")
    sums = {
        name: np.zeros(x.shape, np.float64)
        for name, x in state.items()
        if np.issubdtype(x.dtype, np.floating)
    }
    for examples, open_change in updates:
        _add(sums, open_change(), _weight(examples, weighting))
    for x in sums.values():
        x /= total
    return sums


def _weight(examples: int, weighting: str) -> int:
    if weighting not in WEIGHTINGS:
        raise InvalidInput(f"updates are weighted by {' or '.join(WEIGHTINGS)}, got {weighting!r}")
    if not 1 <= examples <= MAX_EXAMPLES:
        raise InvalidInput(f"an update stands for 1 to {MAX_EXAMPLES} examples, got {examples}")
    return examples if weighting == "examples" else 1


def _add(sums: dict[str, Array], change: State, weight: int) -> None:
    if change.keys() != sums.keys():
        odd = sorted(change.keys() ^ sums.keys())[:4]
        raise InvalidInput(f"an update holds the shared float tensors; it differs in {odd}")
    room = np.empty(min(CHUNK, max((x.size for x in sums.values()), default=0)))
    for name, x in sums.items():
        if change[name].shape != x.shape:
            raise InvalidInput(f"{name!r} is {x.shape}, the update has {change[name].shape}")
        to, of = x.reshape(-1), change[name].reshape(-1)
        for at in range(0, to.size, CHUNK):
            part = of[at : at + CHUNK]
            scaled = np.multiply(part, float(weight), out=room[: part.size], dtype=np.float64)
            to[at : at + CHUNK] += scaled


def _sgd(
    x: Array, d: Array, _slots: tuple[Array, ...], hyper: ServerHyper
) -> tuple[Array, tuple[Array, ...]]:
    """x' = x + lr d; with lr = 1 this is FedAvg (McMahan et al. 2017)."""
    return x + hyper["server_lr"] * d, ()


def _adam(
    x: Array, d: Array, slots: tuple[Array, ...], hyper: ServerHyper
) -> tuple[Array, tuple[Array, ...]]:
    """x' = x + lr m / (sqrt(v) + floor), no bias correction (Reddi et al. 2021, algorithm 2)."""
    m, v = slots
    m = hyper["beta1"] * m.astype(np.float64) + (1 - hyper["beta1"]) * d
    v = hyper["beta2"] * v.astype(np.float64) + (1 - hyper["beta2"]) * d * d
    return x + hyper["server_lr"] * m / (np.sqrt(v) + hyper["floor"]), (m, v)


def _mean_itself(
    x: Array, d: Array, _slots: tuple[Array, ...], _hyper: ServerHyper
) -> tuple[Array, tuple[Array, ...]]:
    """x' = x + d: of values that no gradient moves, so no rate is meant for them."""
    return x + d, ()


PLAIN: Final = ServerOptimizer("", (), _mean_itself)

SGD: Final = ServerOptimizer("sgd", (), _sgd)
ADAM: Final = ServerOptimizer("adam", ("m", "v"), _adam)
