"""Limits for what one device can do to a round: the norm of its change, and its weight.

    change' = change,                        if ||change|| <= NORM_FACTOR median
              change median / ||change||,    otherwise
    weight' = min(examples, most)

The median is the lower one of the round's norms, so the limit follows the devices and needs no
setting; it takes more than half of them to raise it above what honest ones send, and half to lower
it, to 0 if they like. A change above the limit counts as a typical one, not as the longest that is
allowed: sent with the other sign, the latter would still undo those of several devices. Changes
that no honest device sends are left out (`longest`). Parameters and buffers have a norm and a limit
each, because a change of statistics of batches can spoil a model as well. A round in which nothing
is above the limits gives the bits of the plain mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.core.draws import Array

NORM_FACTOR: Final = 2.0
"""Largest norm that is not scaled, in lower medians. In studies of the digits the largest norm of a
round is 1.2 to 1.5 of them in the median, and up to 3.1 where devices have few classes."""
FAR_FACTOR: Final = 10.0
"""Norm, in lower medians, from which a change is left out if it is longer than the parameters
themselves. A device with new samples may be far above others that have nothing to learn any more,
but it does not replace the model in one round."""
CONTROLLED_FACTOR: Final = 3.0
"""Largest norm that is not left out, in the largest lower median of all rounds so far, where
devices have control variates. One that was not asked for a long time then changes more than the
others, in a study of 24 least-squares problems up to 64 medians of its round, but up to 2.1 of the
largest so far."""
EXAMPLES_FACTOR: Final = 3
"""Largest weight of an update, in lower medians of the round's numbers of examples."""
ADAPTIVE: Final = "adaptive"
OFF: Final = "off"
CHUNK: Final = 1 << 16

Change = Mapping[str, Array]
Norms = tuple[float, float]
"""L2 norms of a change: (parameters, buffers)."""


@dataclass(frozen=True, slots=True)
class RoundUpdate:
    """An update of a round. open: returns the change. norms: if they are known."""

    examples: int
    open: Callable[[], Change]
    norms: Norms | None = None


def check_norm_bound(text: str) -> None:
    """Raise InvalidInput unless the text is "adaptive", "off" or a number above 0.

    Masked rounds also have "adaptive:START", with a number above 0.
    """
    if (
        text not in {ADAPTIVE, OFF}
        and not 0 < _number(text.removeprefix(f"{ADAPTIVE}:")) < math.inf
    ):
        raise InvalidInput(
            f"the norm bound is {ADAPTIVE!r}, {OFF!r} or a number above 0, got {text[:40]!r}; in "
            f"masked rounds also '{ADAPTIVE}:START', with the first bound"
        )


def is_adaptive(norm_bound: str) -> bool:
    """Return whether a valid bound follows the updates."""
    return norm_bound.partition(":")[0] == ADAPTIVE


def check_no_start(norm_bound: str) -> None:
    """Raise InvalidInput for a bound with a start where updates are in the clear."""
    if is_adaptive(norm_bound) and norm_bound != ADAPTIVE:
        raise InvalidInput(
            f"the norm bound {norm_bound[:40]!r} has a start, which only masked rounds need: in "
            "the clear it is that of each round. Add masking, or leave the start out"
        )


def first_bound(norm_bound: str, default: float) -> float:
    """Return the bound of the first masked round, for a valid text but "off".

    default: for "adaptive" without a start.
    """
    return default if norm_bound == ADAPTIVE else float(norm_bound.removeprefix(f"{ADAPTIVE}:"))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def norms_of(change: Change, buffers: Collection[str]) -> Norms:
    """Return the norms of a change; infinite if float64 cannot hold one, or it has a NaN."""
    names = sorted(change)
    return (
        _norm([change[n] for n in names if n not in buffers]),
        _norm([change[n] for n in names if n in buffers]),
    )


def floats_of(state: Change) -> Change:
    """Return the floating tensors of a state, which a change moves."""
    return {n: x for n, x in state.items() if np.issubdtype(x.dtype, np.floating)}


def check_fits(shapes: Mapping[str, tuple[int, ...]], change: Change) -> None:
    """Raise InvalidInput unless a change has exactly these tensors."""
    if change.keys() != shapes.keys():
        odd = sorted(change.keys() ^ shapes.keys())[:4]
        raise InvalidInput(f"an update holds the shared float tensors; it differs in {odd}")
    for name, shape in shapes.items():
        if change[name].shape != shape:
            raise InvalidInput(f"{name!r} is {shape}, the update has {change[name].shape}")


def limited(
    updates: Sequence[RoundUpdate],
    *,
    norm_bound: str,
    max_examples: int,
    buffers: Collection[str],
    adaptive: bool = True,
) -> tuple[list[RoundUpdate], int]:
    """Return the updates within the limits, and how many of them were scaled.

    norm_bound: "adaptive", "off", or the bound of parameters as a number; that of buffers is then
    adaptive. max_examples: largest weight; 0 for `EXAMPLES_FACTOR` medians. adaptive: False if no
    norm is limited by those of the round.
    """
    if not updates:
        return [], 0
    most = max_examples or EXAMPLES_FACTOR * lower_median([u.examples for u in updates])
    factors = _factors(updates, norm_bound, buffers, adaptive=adaptive)
    scaled = sum(min(pair) < 1 for pair in factors)
    bounded = [
        RoundUpdate(min(u.examples, int(most)), _opening(u.open, pair, buffers))
        for u, pair in zip(updates, factors, strict=True)
    ]
    return bounded, scaled


def lower_median(values: Sequence[float]) -> float:
    """Return the lower median of at least one value: the smaller of two."""
    return sorted(values)[(len(values) - 1) // 2]


def with_norms(
    updates: Sequence[RoundUpdate], buffers: Collection[str]
) -> list[tuple[RoundUpdate, Norms]]:
    """Return the updates with their norms, computed where they are not known."""
    pairs = ((u, u.norms or norms_of(u.open(), buffers)) for u in updates)
    return [(replace(u, norms=norms), norms) for u, norms in pairs]


def medians_of(norms: Sequence[Norms]) -> Norms:
    """Return the lower medians of at least one update's norms."""
    return lower_median([p for p, _ in norms]), lower_median([s for _, s in norms])


def longest(norms: Sequence[Norms], size: Callable[[], float]) -> Norms:
    """Return the norms beyond which a change is left out, for those of at least one update.

    size: returns the norm of the parameters.
    """
    far = FAR_FACTOR * medians_of(norms)[0]
    # Their norm takes as long as that of an update, so it is computed only if it decides something.
    is_any_far = any(parameters > far for parameters, _ in norms)
    return max(far, size()) if is_any_far else far, math.inf


def longest_controlled(largest: Norms) -> Norms:
    """Return the norms beyond which a change is left out where devices have control variates.

    largest: the largest lower medians of the rounds so far. Nothing is scaled there: the shared
    control variate would miss for good what the device's own one has.
    """
    return CONTROLLED_FACTOR * largest[0], CONTROLLED_FACTOR * largest[1]


def _factors(
    updates: Sequence[RoundUpdate], norm_bound: str, buffers: Collection[str], *, adaptive: bool
) -> list[tuple[float, float]]:
    if norm_bound == OFF:
        return [(1.0, 1.0)] * len(updates)
    norms = [norms for _, norms in with_norms(updates, buffers)]
    # Pairs of the largest norm that is not scaled and the norm to which the others are.
    parameters, statistics = (
        (NORM_FACTOR * median, median) if adaptive else (math.inf, math.inf)
        for median in medians_of(norms)
    )
    if not is_adaptive(norm_bound):
        parameters = float(norm_bound), float(norm_bound)
    return [(_factor(p, *parameters), _factor(s, *statistics)) for p, s in norms]


def _factor(norm: float, most: float, scaled_to: float) -> float:
    return scaled_to / norm if norm > most else 1.0


def _opening(
    open_change: Callable[[], Change], factors: tuple[float, float], buffers: Collection[str]
) -> Callable[[], Change]:
    if min(factors) == 1:
        return open_change  # itself, so that nothing is copied and no bit changes
    return lambda: {name: _times(x, factors[name in buffers]) for name, x in open_change().items()}


def _times(x: Array, factor: float) -> Array:
    if factor == 1:
        return x
    # At least float32, where a small share of a float16 would be 0. The product is of float64: a
    # factor of 1e-44 is 0 in float32.
    product = np.empty(x.shape, np.promote_types(x.dtype, np.float32))
    source, target = x.reshape(-1), product.reshape(-1)
    for at in range(0, source.size, CHUNK):
        part = slice(at, at + CHUNK)
        target[part] = np.multiply(source[part], np.float64(factor), dtype=np.float64)
    return product


def _norm(arrays: Sequence[Array]) -> float:
    # Squares of float64 can overflow, those of smaller types cannot in float64.
    large = [x for x in arrays if x.dtype.itemsize > np.dtype(np.float32).itemsize and x.size]
    exponent = max((math.frexp(_largest(x))[1] for x in large), default=0)
    # Powers of two, so that scaling rounds nothing.
    unit = math.ldexp(1.0, -max(exponent, 0))
    total = math.fsum(s for x in arrays for s in _squares(x, unit))
    return math.sqrt(total) / unit if unit and not math.isnan(total) else math.inf


def _largest(x: Array) -> float:
    flat = x.reshape(-1)
    return max(
        max(float(part.max()), -float(part.min()))
        for part in (flat[at : at + CHUNK] for at in range(0, flat.size, CHUNK))
    )


def _squares(x: Array, unit: float) -> list[float]:
    """Return the sums of squares of x * unit over its chunks."""
    flat = x.reshape(-1)
    parts = (flat[at : at + CHUNK].astype(np.float64) for at in range(0, flat.size, CHUNK))
    return [float(np.square(part * unit if unit != 1 else part).sum()) for part in parts]
