"""The cloud's side of a round: the mean of the updates, then the server's optimizer.

    d = sum_k w_k change_k / sum_k w_k,  in float64 and in the given order
    state' = step(state, d) for parameters, state + d for buffers (statistics of batches)

The order of a sum changes its rounding, so callers pass updates in the order of device names.
Updates are opened one at a time and added in chunks: the memory in use is the state, its sums in
float64 and one update.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.core.draws import Array
from triplane.unified_ir.federated.core.limits import check_fits

CHUNK: Final = 1 << 16
"""Entries added at a time: half a megabyte in float64, which fits into the processor's cache."""
MAX_EXAMPLES: Final = 1 << 40
"""Largest number of examples of an update; sums of them stay exact in float64."""
WEIGHTINGS: Final = ("examples", "equal")

State = Mapping[str, Array]
Slots = tuple[Array, ...]
Update = tuple[int, Callable[[], State]]
"""(examples, a function that opens the change)."""
ServerHyper = Mapping[str, float]
"""Hyperparameters by name."""
Combine = Callable[[Mapping[str, tuple[int, ...]]], dict[str, Array]]
"""Shapes of the tensors of a change -> what a round's changes come to, in float64."""


@dataclass(frozen=True, slots=True)
class ServerOptimizer:
    """An optimizer. slots: prefixes of its state; step: (x, d, slots, hyper) -> (x', slots')."""

    name: str
    slots: tuple[str, ...]
    step: Callable[[Array, Array, Slots, ServerHyper], tuple[Array, Slots]]


def reduce(
    state: State,
    slots: State,
    updates: Sequence[Update],
    *,
    weighting: str,
    server: ServerOptimizer,
    hyper: ServerHyper,
    buffers: Collection[str] = (),
    shares: Mapping[str, float] | None = None,
    combine: Combine | None = None,
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return (the next shared state, the optimizer's next slots).

    slots: empty before the first round. buffers: tensors to which the mean is added as it is,
    whatever the optimizer and its rate. shares: factors of the mean, by tensor. combine: what takes
    the mean's place. Tensors that are not floating point do not change.
    InvalidInput: there are no updates, or one does not fit the state.
    """
    sums = _combined(state, updates, combine) if combine else _mean(state, updates, weighting)
    for name, share in (shares or {}).items():
        sums[name] *= share
    after = dict(state)
    next_slots: dict[str, Array] = {}
    for name, d in sums.items():
        x = state[name]
        row = PLAIN if name in buffers else server
        names = [f"{s}.{name}" for s in row.slots]
        # At least float32, since a square of a small change is 0 in float16.
        kind = np.promote_types(x.dtype, np.float32)
        old = [slots[s] if s in slots else np.zeros(x.shape, kind) for s in names]
        after[name], *new = _optimizer_step(row, [x, d, *old], hyper)
        next_slots |= dict(zip(names, new, strict=True))
    return after, next_slots


def _optimizer_step(
    row: ServerOptimizer, arrays: Sequence[Array], hyper: ServerHyper
) -> list[Array]:
    """Return x' and the next slots of x, d and the slots.

    The step is computed in float64 and in chunks, since it maps each entry by itself.
    """
    x, _, *slots = arrays
    results = [np.empty(a.shape, a.dtype) for a in (x, *slots)]
    sources = [a.reshape(-1) for a in arrays]
    targets = [a.reshape(-1) for a in results]
    for at in range(0, x.size, CHUNK):
        part = slice(at, at + CHUNK)
        x_part, d_part, *slot_parts = (source[part] for source in sources)
        stepped, new = row.step(x_part.astype(np.float64), d_part, tuple(slot_parts), hyper)
        # Without a norm bound a number may leave the range of its type; devices decline that state.
        with np.errstate(over="ignore"):
            for target, value in zip(targets, (stepped, *new), strict=True):
                target[part] = value
    return results


def _combined(state: State, updates: Sequence[Update], combine: Combine) -> dict[str, Array]:
    if not updates:
        raise InvalidInput("a round needs at least one update to be reduced")
    return combine({n: x.shape for n, x in state.items() if np.issubdtype(x.dtype, np.floating)})


def _mean(state: State, updates: Sequence[Update], weighting: str) -> dict[str, Array]:
    total = sum(_weight(examples, weighting) for examples, _ in updates)
    if not total:
        raise InvalidInput("a round needs at least one update to be reduced")
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
        raise InvalidInput(f"an update must count 1 to {MAX_EXAMPLES} examples, got {examples}")
    return examples if weighting == "examples" else 1


def _add(sums: dict[str, Array], change: State, weight: int) -> None:
    check_fits({name: x.shape for name, x in sums.items()}, change)
    buffer = np.empty(min(CHUNK, max((x.size for x in sums.values()), default=0)))
    for name, x in sums.items():
        total, source = x.reshape(-1), change[name].reshape(-1)
        for at in range(0, total.size, CHUNK):
            part = source[at : at + CHUNK]
            # Into one reused buffer: an expression would allocate a float64 copy of every tensor.
            scaled = np.multiply(part, float(weight), out=buffer[: part.size], dtype=np.float64)
            total[at : at + CHUNK] += scaled


def _sgd(x: Array, d: Array, _slots: Slots, hyper: ServerHyper) -> tuple[Array, Slots]:
    """x' = x + lr d; with lr = 1 this is FedAvg (McMahan et al. 2017)."""
    return x + hyper["server_lr"] * d, ()


def _adam(x: Array, d: Array, slots: Slots, hyper: ServerHyper) -> tuple[Array, Slots]:
    """x' = x + lr m / (sqrt(v) + floor), no bias correction (Reddi et al. 2021, algorithm 2)."""
    m, v = slots
    # d is the mean change of the devices, the paper's Delta: -d takes the place of a gradient,
    # hence x + ...
    m = hyper["beta1"] * m.astype(np.float64) + (1 - hyper["beta1"]) * d
    v = hyper["beta2"] * v.astype(np.float64) + (1 - hyper["beta2"]) * d * d
    return x + hyper["server_lr"] * m / (np.sqrt(v) + hyper["floor"]), (m, v)


def _momentum(x: Array, d: Array, slots: Slots, hyper: ServerHyper) -> tuple[Array, Slots]:
    """m' = momentum m + d, x' = x + lr m' (Hsu et al. 2019, section 4.1)."""
    m = hyper["momentum"] * slots[0].astype(np.float64) + d
    return x + hyper["server_lr"] * m, (m,)


def _plain(x: Array, d: Array, _slots: Slots, _hyper: ServerHyper) -> tuple[Array, Slots]:
    """x' = x + d, for values that are not changed by gradients, so no rate applies to them."""
    return x + d, ()


PLAIN: Final = ServerOptimizer("", (), _plain)
SGD: Final = ServerOptimizer("sgd", (), _sgd)
ADAM: Final = ServerOptimizer("adam", ("m", "v"), _adam)
MOMENTUM: Final = ServerOptimizer("momentum", ("m",), _momentum)
