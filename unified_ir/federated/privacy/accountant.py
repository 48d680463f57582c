"""Account for a whole run, or for all runs of a device, in Renyi differential privacy.

    eps(alpha) = sum_i n_i alpha / (2 z_i^2),   n_i uses with noise multiplier z_i
    epsilon(delta) = min_alpha eps(alpha) + log(1 - 1/alpha) - log(delta alpha) / (alpha - 1)

Mironov 2017 (arXiv 1702.07476); the conversion is proposition 12 of Canonne, Kamath and Steinke
2020 (arXiv 2004.00010). Composition is adaptive: a round may depend on all earlier results.

No amplification by sampling: which devices are available is no Poisson sampling, so every use of a
device is charged in full. Budgets are computed here and not by dp-accounting, so that a journal
replays to the same decision whether the extra is installed or not; `epsilon` asks dp-accounting
where it is installed, and tests hold both equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.privacy import dp_accounting_door

ORDERS: Final = tuple(1 + 2.0 ** (k / 16) for k in range(-48, 321))
"""Renyi orders, from 1.125 to about a million, so close that the minimum is missed by 1e-4."""
MAX_EPSILON: Final = 1e6
MAX_USES: Final = 10**9


@dataclass(frozen=True, slots=True)
class GaussianEvent:
    """Uses of a mechanism whose Renyi divergences are at most alpha / (2 noise_multiplier^2).

    noise_multiplier: standard deviation of the noise over the norm of one device's contribution.
    sampling: what is claimed about who takes part; only "none" is accepted.
    """

    noise_multiplier: float
    uses: int = 1
    sampling: str = "none"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.noise_multiplier) and 1e-6 <= self.noise_multiplier <= 1e6):
            raise InvalidInput(f"a noise multiplier is 1e-6 to 1e6, got {self.noise_multiplier}")
        if not (type(self.uses) is int and 0 <= self.uses <= MAX_USES):
            raise InvalidInput(f"a mechanism is used 0 to {MAX_USES} times, got {self.uses!r}")
        if self.sampling != "none":
            raise InvalidInput(
                f"amplification by {self.sampling[:40]!r} sampling is not accounted: devices take "
                "part when they are available, which is no Poisson sampling; charge each use in "
                "full with sampling='none'"
            )

    @property
    def rho(self) -> float:
        """The sum of 1 / (2 z^2): the divergence of order alpha is alpha times this."""
        return self.uses / (2 * self.noise_multiplier**2)


def rdp(events: Iterable[GaussianEvent]) -> tuple[float, ...]:
    """Return the Renyi divergence of the composed events at each of `ORDERS`."""
    rho = math.fsum(event.rho for event in events)
    return tuple(order * rho for order in ORDERS)


def epsilon(events: Iterable[GaussianEvent], delta: float) -> float:
    """Return the epsilon of the composed events at `delta`, by dp-accounting if it is installed."""
    events = tuple(events)
    check_delta(delta)
    if dp_accounting_door.installed():
        pairs = [(event.noise_multiplier, event.uses) for event in events if event.uses]
        return dp_accounting_door.epsilon(pairs, delta, ORDERS)
    return epsilon_of_rdp(rdp(events), delta)


def epsilon_of_rdp(divergences: Iterable[float], delta: float) -> float:
    """Return the least epsilon at `delta` that divergences at `ORDERS` imply; 0 if they are 0."""
    least = math.inf
    for order, value in zip(ORDERS, divergences, strict=True):
        if delta**2 + math.expm1(-value) > 0:
            # delta >= sqrt(1 - exp(-KL)) bounds the total variation distance (Bretagnolle, Huber).
            return 0.0
        bound = value + math.log1p(-1 / order) - math.log(delta * order) / (order - 1)
        least = min(least, bound)
    return max(0.0, least)


def epsilon_of_rho(rho: float, delta: float) -> float:
    """Return the epsilon at `delta` where the divergence of order alpha is alpha * rho."""
    return epsilon_of_rdp((order * rho for order in ORDERS), delta)


def noise_multiplier_for(epsilon: float, delta: float, uses: int) -> float:
    """Return the least noise multiplier with which `uses` of a mechanism stay within epsilon."""
    check_epsilon(epsilon)
    check_delta(delta)
    if not 1 <= uses <= MAX_USES:
        raise InvalidInput(f"a mechanism is used 1 to {MAX_USES} times, got {uses}")
    low, high = 1e-6, 1e6
    if epsilon_of_rho(GaussianEvent(high, uses).rho, delta) > epsilon:
        raise InvalidInput(
            f"no noise multiplier up to 1e6 keeps {uses} uses within epsilon {epsilon:g} at delta "
            f"{delta:g}; raise epsilon or use devices less often"
        )
    # Bisection to neighbouring floats; the upper end always stays within epsilon.
    while low < (middle := math.sqrt(low * high)) < high:
        if epsilon_of_rho(GaussianEvent(middle, uses).rho, delta) > epsilon:
            low = middle
        else:
            high = middle
    return high


def check_epsilon(epsilon: float) -> None:
    """Raise InvalidInput unless epsilon is in (0, 1e6]."""
    if not 0 < epsilon <= MAX_EPSILON:
        raise InvalidInput(f"epsilon is above 0 and at most {MAX_EPSILON:g}, got {epsilon}")


def check_delta(delta: float) -> None:
    """Raise InvalidInput unless delta is in [1e-300, 1)."""
    if not 1e-300 <= delta < 1:
        raise InvalidInput(
            f"delta is a probability of at least 1e-300 and below 1, usually below 1 over the "
            f"number of devices, got {delta}"
        )
