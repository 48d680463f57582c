"""Noise that devices add themselves, so that a masked sum is private before anyone sees it.

Each device adds discrete Gaussian noise of variance v to its integers. With h honest survivors the
noise of the sum is close to a discrete Gaussian of variance h v: its divergence from one is at most

    tau = 10 sum_{k=1}^{h-1} exp(-2 pi^2 v k / (k + 1))   for each entry

so the sum is (1/2) e^2-concentrated private, D_alpha <= alpha e^2 / 2, for d entries and
contributions of norm S with

    e^2 = min(S^2 / (h v) + 2 tau d, (S / sqrt(h v) + tau sqrt(d))^2)

(Kairouz, Liu and Steinke 2021, arXiv 2102.06387, theorem 1 and proposition 14, which have a smaller
multiple of tau d). More survivors add independent noise, which can only help. Dishonest devices are
taken to add none. The device whose privacy is meant is one of the honest ones: neighbouring runs
have zeros in place of its update, and its noise in both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.privacy import secret
from triplane.unified_ir.federated.privacy.accountant import CONCENTRATED, NoiseEvent

MIN_VARIANCE: Final = 1
"""Least variance of one device's noise, in steps squared; the bound on the sum needs 1/4."""
MAX_HONEST: Final = 10_000
MAX_NORM: Final = 1e12
"""Largest L2 norm of a device's integers, in steps."""
MAX_BITS: Final = 62


def rounded_norm(norm: float, entries: int, *, beta: float = math.exp(-0.5)) -> float:
    """Return a bound on the L2 norm after stochastic rounding to integers.

    A device rounds again until its integers meet the bound; with probability at least 1 - beta one
    attempt does (Kairouz, Liu and Steinke 2021, theorem 1).
    norm: of the scaled update, in steps. beta: 0 gives the bound that every rounding meets.
    """
    if not (0 < norm <= MAX_NORM and 1 <= entries <= secret.MAX_ENTRIES and 0 <= beta < 1):
        raise InvalidInput(
            f"a rounded norm needs a norm in (0, {MAX_NORM:g}], 1 to 2^40 entries and a "
            f"probability below 1, got {norm}, {entries} and {beta}"
        )
    always = norm + math.sqrt(entries)
    if beta == 0:
        return always
    likely = math.sqrt(
        norm**2 + entries / 4 + math.sqrt(2 * math.log(1 / beta)) * (norm + math.sqrt(entries) / 2)
    )
    return min(always, likely)


@dataclass(frozen=True, slots=True)
class DistributedNoise:
    """Discrete Gaussian noise of each device in a masked sum.

    variance: parameter v of one device's noise in each entry, in steps squared. honest: the fewest
    honest devices whose noise is in a sum that is revealed; in a sum of a group, if groups are
    revealed. norm: bound on the L2 norm of one device's integers. entries: in each update.
    """

    variance: int
    honest: int
    norm: float
    entries: int

    def __post_init__(self) -> None:
        if not MIN_VARIANCE <= self.variance <= secret.MAX_VARIANCE:
            raise InvalidInput(
                f"a device's noise has a variance of {MIN_VARIANCE} to 2^52 steps squared, got "
                f"{self.variance}; make the steps of the encoding smaller or larger"
            )
        if not (
            1 <= self.honest <= MAX_HONEST
            and 1 <= self.entries <= secret.MAX_ENTRIES
            and 0 < self.norm <= MAX_NORM
        ):
            raise InvalidInput(
                f"distributed noise needs 1 to {MAX_HONEST} honest devices, 1 to 2^40 entries and "
                f"a norm in (0, {MAX_NORM:g}], got {self.honest}, {self.entries} and "
                f"{self.norm}"
            )

    @property
    def tau(self) -> float:
        """Bound on how far the sum of noises is from a discrete Gaussian, in each entry."""
        factors = (k / (k + 1) for k in range(1, self.honest))
        return 10 * math.fsum(math.exp(-2 * math.pi**2 * self.variance * f) for f in factors)

    @property
    def noise_multiplier(self) -> float:
        """1/e: the sum has the Renyi divergences of a Gaussian with this multiplier, or less."""
        ratio, tau, d = self.norm / math.sqrt(self.honest * self.variance), self.tau, self.entries
        return 1 / min(math.sqrt(ratio**2 + 2 * tau * d), ratio + tau * math.sqrt(d))

    def event(self, uses: int = 1) -> NoiseEvent:
        """Return what `uses` of one device cost it."""
        return NoiseEvent(self.noise_multiplier, uses, CONCENTRATED)

    def draw(self) -> secret.Integers:
        """Return one device's noise for one round, int64, from the operating system's generator.

        Draw it once: a device that sends an update again sends the same integers, because the
        difference of two draws would tell the update from its noise.
        """
        return secret.discrete_gaussian(self.entries, self.variance)

    def sum_bits(self, devices: int, largest: int, *, failure: float = 1e-9) -> int:
        """Return the bits of the modulus in which a sum of `devices` updates does not wrap around.

        largest: absolute value of one device's entry without noise, in steps. failure: probability
        that any entry of one sum wraps around, which spoils the sum and reveals nothing. A discrete
        Gaussian has the tails of a Gaussian: P[|noise| > x] <= 2 exp(-x^2 / (2 devices v)).
        """
        most = 2**MAX_BITS
        if not (1 <= devices <= most and 0 <= largest <= most and 0 < failure < 1):
            raise InvalidInput(
                f"a sum has 1 to 2^{MAX_BITS} devices, entries of 0 to 2^{MAX_BITS} and a "
                f"probability of failure in (0, 1), got {devices}, {largest} and {failure}"
            )
        chance = math.log(2 * self.entries) - math.log(failure)
        tail = math.sqrt(2 * devices * self.variance * chance)
        bits = 1 + math.ceil(devices * largest + tail).bit_length()
        if bits > MAX_BITS:
            raise InvalidInput(f"a masked sum has at most {MAX_BITS} bits, this noise needs {bits}")
        return bits


def distributed_noise(
    noise_multiplier: float, *, norm: float, entries: int, honest: int
) -> DistributedNoise:
    """Return the least noise with which the sum has at least that noise multiplier.

    norm: bound on the L2 norm of one device's integers, as from `rounded_norm`.
    honest: devices whose noise is in every revealed sum: least survivors minus colluders.
    """
    target = NoiseEvent(noise_multiplier).noise_multiplier
    noise = DistributedNoise(MIN_VARIANCE, honest, norm, entries)
    variance = max(MIN_VARIANCE, math.ceil((target * norm) ** 2 / honest))
    while noise.noise_multiplier < target:
        noise = DistributedNoise(variance, honest, norm, entries)
        # tau adds a little; it falls exponentially, so few steps are needed.
        variance += variance // 1024 + 1
    return noise
