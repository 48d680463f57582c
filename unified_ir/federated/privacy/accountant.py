"""Account for a whole run, or for all runs of a device.

Uses i = 1, 2, ... of one device with noise multipliers z_i compose by m^2 = sum_i z_i^-2. If all of
them add Gaussian noise, the curve of the composition is exactly that of one Gaussian mechanism
(Balle and Wang 2018, arXiv 1805.06530, theorem 8; Dong, Roth and Su 2019, arXiv 1905.02383):

    delta(epsilon) = F(m/2 - epsilon/m) - exp(epsilon) F(-m/2 - epsilon/m),   F: normal distribution

Of sums of discrete noise only the Renyi divergences are bounded by those of a Gaussian. As soon as
one of them is among the uses, all compose there (Mironov 2017, arXiv 1702.07476), with the
conversion of Canonne, Kamath and Steinke 2020 (arXiv 2004.00010, proposition 12):

    epsilon = min_a  a m^2 / 2 + log(1 - 1/a) - log(delta a) / (a - 1)

Composition is fully adaptive in both cases. No amplification by sampling: devices take part when
they are available, which is no Poisson sampling, so every use is charged in full.

Budgets are computed here and never by dp-accounting, so that a journal replays to the same
decisions whether the extra `privacy` is installed or not. Reports ask `epsilon`, which uses
dp-accounting where it is installed; tests hold both equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.privacy import dp_accounting_door

GAUSSIAN: Final = "gaussian"
CONCENTRATED: Final = "concentrated"
LAWS: Final = (GAUSSIAN, CONCENTRATED)
"""What is known of a mechanism: it adds Gaussian noise, or its Renyi divergences are bounded so."""
ORDERS: Final = tuple(1 + 2.0 ** (k / 16) for k in range(-48, 321))
"""Renyi orders, from 1.125 to about a million, so close that the minimum is missed by 1e-3."""
MAX_EPSILON: Final = 1e6
DELTA: Final = 1e-5
"""Default of the probability with which epsilon does not hold."""
MIN_MULTIPLIER: Final = 1e-3
MAX_MULTIPLIER: Final = 1e6
ROOM: Final = 1e-10
"""Relative distance of a multiplier that is computed from the least one."""
MAX_USES: Final = 10**9
MAX_SEPARATION: Final = 1_000_000
MAX_SPENT: Final = 1e30
"""Largest sum of z^-2, so that no sum over runs overflows; epsilon is above 1e29 there."""


@dataclass(frozen=True, slots=True)
class NoiseEvent:
    """Uses of one device by a mechanism with noise.

    noise_multiplier: standard deviation of the noise over the norm of one device's contribution.
    uses: times that one device takes part. law: one of `LAWS`. separation: rounds of a run from one
    use to the next at least; uses that are nearer cost more than is accounted here.
    """

    noise_multiplier: float
    uses: int = 1
    law: str = GAUSSIAN
    separation: int = 1

    def __post_init__(self) -> None:
        if not MIN_MULTIPLIER <= self.noise_multiplier <= MAX_MULTIPLIER:
            raise InvalidInput(
                f"a noise multiplier is {MIN_MULTIPLIER:g} to {MAX_MULTIPLIER:g}, got "
                f"{self.noise_multiplier}"
            )
        if not (type(self.uses) is int and 0 <= self.uses <= MAX_USES):
            raise InvalidInput(f"a mechanism is used 0 to {MAX_USES} times, got {self.uses!r}")
        if not (type(self.separation) is int and 1 <= self.separation <= MAX_SEPARATION):
            raise InvalidInput(
                f"uses have a separation of 1 to {MAX_SEPARATION} rounds, got {self.separation!r}"
            )
        if self.law not in LAWS:
            raise InvalidInput(f"noise is {' or '.join(LAWS)}, got {str(self.law)[:40]!r}")


@dataclass(frozen=True, slots=True)
class Spending:
    """What uses of one device add up to: the sums of z^-2 by law.

    gaussian, concentrated: 0 to `MAX_SPENT`; InvalidInput otherwise.
    """

    gaussian: float = 0.0
    concentrated: float = 0.0

    def __post_init__(self) -> None:
        for value in (self.gaussian, self.concentrated):
            if not 0 <= value <= MAX_SPENT:
                raise InvalidInput(f"a sum of z^-2 is 0 to {MAX_SPENT:g}, got {value}")

    def plus(self, event: NoiseEvent) -> Spending:
        """Return the sum with an event's uses."""
        more = event.uses / event.noise_multiplier**2
        if event.law == GAUSSIAN:
            return Spending(self.gaussian + more, self.concentrated)
        return Spending(self.gaussian, self.concentrated + more)

    def epsilon(self, delta: float) -> float:
        """Return the least epsilon at `delta` that is known for these uses."""
        check_delta(delta)
        if self.concentrated == 0:
            return gaussian_epsilon(math.sqrt(self.gaussian), delta)
        return concentrated_epsilon((self.gaussian + self.concentrated) / 2, delta)


def spending(events: Iterable[NoiseEvent]) -> Spending:
    """Return what all events together spend."""
    total = Spending()
    for event in events:
        total = total.plus(event)
    return total


def epsilon(events: Iterable[NoiseEvent], delta: float) -> float:
    """Return the epsilon of the composed events at `delta`, by dp-accounting if it is installed."""
    total = spending(events)
    check_delta(delta)
    if not dp_accounting_door.installed():
        return total.epsilon(delta)
    if total.concentrated:
        rho = (total.gaussian + total.concentrated) / 2
        return dp_accounting_door.concentrated_epsilon(rho, delta, ORDERS)
    return dp_accounting_door.gaussian_epsilon(math.sqrt(total.gaussian), delta)


def gaussian_epsilon(m: float, delta: float) -> float:
    """Return the epsilon of a Gaussian mechanism with noise multiplier 1/m.

    The least float64 that meets `delta` as `gaussian_delta` computes it, which errs by less than
    1e-11 of delta for m above 0.01 and 1e-5 of it down to 1e-6. Above 700, up to 1 too large.
    """
    low, high = 0.0, 1.0
    if m == 0 or gaussian_delta(0.0, m) <= delta:
        return 0.0
    while gaussian_delta(high, m) > delta:
        high *= 2
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if gaussian_delta(middle, m) > delta else (low, middle)
    return high


def gaussian_delta(epsilon: float, m: float) -> float:
    """Return the delta of a Gaussian mechanism with noise multiplier 1/m at `epsilon`."""
    first, second = _normal(m / 2 - epsilon / m), _normal(-m / 2 - epsilon / m)
    # Where exp(epsilon) overflows, the product is left out, which only enlarges delta.
    return first - math.exp(epsilon) * second if epsilon < 700 else first


def concentrated_epsilon(rho: float, delta: float) -> float:
    """Return the epsilon at `delta` where the Renyi divergence of each order a is at most a rho."""
    least = math.inf
    for order in ORDERS:
        if delta**2 + math.expm1(-order * rho) > 0:
            # delta >= sqrt(1 - exp(-KL)) bounds the total variation (Bretagnolle and Huber 1979).
            return 0.0
        bound = order * rho + math.log1p(-1 / order) - math.log(delta * order) / (order - 1)
        least = min(least, bound)
    return max(0.0, least)


def noise_multiplier_for(epsilon: float, delta: float, uses: int, *, law: str = GAUSSIAN) -> float:
    """Return the least noise multiplier with which that many uses stay within epsilon.

    It is larger by `ROOM`: another machine's erfc may round differently, and a run that its journal
    restores there must have as many rounds as before.
    """
    check_epsilon(epsilon)
    check_delta(delta)
    low, high = MIN_MULTIPLIER, MAX_MULTIPLIER
    if _epsilon_of(NoiseEvent(high, uses, law), delta) > epsilon:
        raise InvalidInput(
            f"no noise multiplier up to {high:g} keeps {uses} uses within epsilon {epsilon:g} at "
            f"delta {delta:g}; raise epsilon or use devices less often"
        )
    # Bisection to neighbouring floats. The upper end always stays within epsilon.
    while low < (middle := math.sqrt(low * high)) < high:
        within = _epsilon_of(NoiseEvent(middle, uses, law), delta) <= epsilon
        low, high = (low, middle) if within else (middle, high)
    return min(MAX_MULTIPLIER, high * (1 + ROOM))


def check_epsilon(epsilon: float) -> None:
    """Raise InvalidInput unless epsilon is in (0, 1e6]."""
    if not 0 < epsilon <= MAX_EPSILON:
        raise InvalidInput(f"epsilon is above 0 and at most {MAX_EPSILON:g}, got {epsilon}")


def check_delta(delta: float) -> None:
    """Raise InvalidInput unless delta is in [1e-100, 1)."""
    if not 1e-100 <= delta < 1:
        raise InvalidInput(
            "delta is a probability from 1e-100 to below 1, usually below 1 over the number of "
            f"devices, got {delta}"
        )


def _epsilon_of(event: NoiseEvent, delta: float) -> float:
    return Spending().plus(event).epsilon(delta)


def _normal(x: float) -> float:
    return math.erfc(-x / math.sqrt(2)) / 2
