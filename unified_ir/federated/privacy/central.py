"""Gaussian noise that the cloud adds to sums of a run, independent or correlated over rounds.

With A the prefix sums over rounds and C its square root (lower triangular Toeplitz, A = C C, first
column c_j = (-1)^j binom(-1/2, j)), rounds get the noise n = C^-1 z instead of z, so that prefix
sums have the noise A C^-1 z: what one round adds, later ones partly take back. C is cut to `bands`
diagonals (Choquette-Choo et al. 2023, arXiv 2306.08153; Kalinin and Lampert 2024, 2405.13763).
Uses of a device that are at least `bands` rounds apart meet disjoint rows of C, so k of them cost
what k uses of a Gaussian mechanism with sensitivity |c| cost. One band is independent noise.

Everything happens on a grid of integers with an exact sampler, as this recurrence:

    n_t = round(z_t) - round(sum_{0 < j < bands} c_j n_{t-j}),    published:  round(sum_t) + n_t

Conditioned on what was published before, a round publishes z_t shifted by an integer and rounded:
post-processing of a Gaussian mechanism. So the account holds for adaptive rounds, in which a use
depends on what was published. What rounding adds to a device's influence, on the grid and in
float64, is charged (`CentralNoise.noise_multiplier`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.core.draws import Array
from triplane.unified_ir.federated.privacy import secret
from triplane.unified_ir.federated.privacy.accountant import NoiseEvent

MAX_BANDS: Final = 1_000
MAX_ENTRIES: Final = 2**32
GRID: Final = 2**25
"""Steps of the grid in a standard deviation, at least; below twice as many."""
MAX_ENTRY: Final = 2**42
"""Largest entry of a sum, in steps: float64 resolves 2^-11 of a step there, as is charged."""


def coefficients(bands: int) -> tuple[float, ...]:
    """Return c_0 to c_{bands-1}: 1, 1/2, 3/8, 5/16, ... (binom(2j, j) / 4^j)."""
    if not 1 <= bands <= MAX_BANDS:
        raise InvalidInput(f"correlated noise has 1 to {MAX_BANDS} bands, got {bands}")
    c = [1.0]
    for j in range(1, bands):
        c.append(c[-1] * (2 * j - 1) / (2 * j))
    return tuple(c)


def column_norm(bands: int) -> float:
    """Return |c|, the sensitivity of one use of a device to C."""
    return math.sqrt(math.fsum(c * c for c in coefficients(bands)))


def prefix_error(bands: int, rounds: int) -> float:
    """Return the RMS error of `rounds` prefix sums of the noise C^-1 z, for z of variance 1.

    The variance of the t-th is the sum of squares of the first t entries of A C^-1's first column.
    """
    if rounds < 1:
        raise InvalidInput(f"the error of prefix sums is over at least one round, got {rounds}")
    c = coefficients(bands)
    inverse: list[float] = []
    for t in range(rounds):
        past = math.fsum(c[j] * inverse[t - j] for j in range(1, min(t, bands - 1) + 1))
        inverse.append(float(t == 0) - past)
    column = np.cumsum(inverse)
    return float(np.sqrt(np.mean(np.cumsum(column**2))))


def relative_error(bands: int, rounds: int) -> float:
    """Return the RMS error of prefix sums per noise multiplier of one use.

    It compares numbers of bands at equal epsilon, if a device is used equally often.
    """
    return column_norm(bands) * prefix_error(bands, rounds)


def check_population(population: int, devices: int, separation: int) -> None:
    """Raise InvalidInput if too few devices exist for `devices` a round and the separation.

    separation: rounds from one use of a device to its next at least. devices: asked in a round,
    those that are asked in reserve included.
    """
    if devices < 1 or separation < 1:
        raise InvalidInput(f"rounds ask devices and have a separation, got {devices}, {separation}")
    if population < devices * separation:
        most = population // separation
        ask = f"ask at most {most} devices a round, or " if most else ""
        raise InvalidInput(
            f"{devices} devices a round that rest until {separation} rounds later need "
            f"{devices * separation} devices, the population has {population}; {ask}shorten the "
            f"separation to {max(1, population // devices)}"
        )


@dataclass(frozen=True, slots=True)
class CentralNoise:
    """Noise of a run's sums. A pure value; its only effect is to draw.

    std: standard deviation of z, in units of the sum. bands: diagonals of C, at most the separation
    between two uses of a device. norm: L2 norm to which a device's contribution is clipped.
    entries: of all tensors of a sum together.
    """

    std: float
    bands: int
    norm: float
    entries: int

    def __post_init__(self) -> None:
        coefficients(self.bands)
        if not (1e-30 < self.std < 1e30 and 0 < self.norm < 1e30):
            raise InvalidInput(
                f"noise has a standard deviation and a norm in (0, 1e30), got {self.std} and "
                f"{self.norm}"
            )
        if not 1 <= self.entries <= MAX_ENTRIES:
            raise InvalidInput(f"noise has 1 to {MAX_ENTRIES} entries, got {self.entries}")

    @property
    def step(self) -> float:
        """The grid's step in units of the sum, a power of two, so that scaling is exact."""
        return 2.0 ** math.floor(math.log2(self.std)) / GRID

    @property
    def noise_multiplier(self) -> float:
        """Noise multiplier of one use: std / |c| / norm, less what rounding costs.

        Rounding a sum moves a difference of two sums by at most a step in each entry, and so does
        rounding the recurrence in later rounds.
        """
        # A little more than one step, because values are rounded to float64 before: twice 2^-11.
        rounding = math.sqrt(self.entries) * (1 + 2.0**-10)
        contribution = self.norm / self.step + rounding
        later = [c * contribution + rounding for c in coefficients(self.bands)[1:]]
        squares = math.fsum(shift * shift for shift in (contribution, *later))
        return self.std / self.step / math.sqrt(squares)

    def event(self, uses: int = 1) -> NoiseEvent:
        """Return what `uses` of one device cost it, at least `bands` rounds apart."""
        return NoiseEvent(self.noise_multiplier, uses, separation=self.bands)

    def draw(self, past: Sequence[secret.Integers]) -> secret.Integers:
        """Return the noise of the next round in steps: (entries,) int64.

        past: noise of earlier rounds, the newest first; only the first `bands` - 1 are read, and
        fewer are given only where the run is younger. It is as secret as the sums without noise.

        Contract: draw once for each round. Write and sync the noise together with the round's
        charge before anything that depends on it is released, and after a crash use what was
        written. A second draw for the same sum would let an observer average the noise away, and
        noise without a charge would exceed the budget.
        """
        if any(n.shape != (self.entries,) or n.dtype != np.int64 for n in past):
            raise InvalidInput(f"earlier noise is int64 with {self.entries} entries")
        noise = secret.rounded_gaussian(self.entries, self.std / self.step)
        taken_back = np.zeros(self.entries)
        for c, earlier in zip(coefficients(self.bands)[1:], past, strict=False):
            taken_back += c * earlier
        return np.asarray(noise - np.rint(taken_back).astype(np.int64))

    def round(self, x: Array) -> Array:
        """Return x rounded to the grid, float64, at most half a step away in each entry.

        Sums of rounded contributions are exact in float64 below 2^53 steps.
        """
        return np.asarray(np.rint(np.asarray(x, np.float64) / self.step) * self.step)

    def add(self, total: Array, noise: secret.Integers) -> Array:
        """Return the sum with noise, (entries,) float64: rounded to the grid, then shifted.

        total: (entries,), a sum over devices of clipped contributions that were each passed to
        `round`, or the exact sum rounded once to float64. The errors of a plain float64 sum depend
        on the data and are not charged. InvalidInput if the sum has NaN or is too large for the
        grid (2^42 steps, 2^16 standard deviations or more).
        """
        if total.shape != (self.entries,) or noise.shape != (self.entries,):
            raise InvalidInput(
                f"sum and noise have {self.entries} entries, got {total.shape} and {noise.shape}"
            )
        steps = np.rint(np.asarray(total, np.float64) / self.step)
        if not (np.abs(steps) <= MAX_ENTRY).all():
            raise InvalidInput(
                f"a sum has entries that are NaN or above {MAX_ENTRY * self.step:g}, for noise of "
                f"standard deviation {self.std:g}; were contributions clipped to {self.norm:g}?"
            )
        return np.asarray((steps.astype(np.int64) + noise) * self.step)


def central_noise(
    noise_multiplier: float, *, norm: float, entries: int, bands: int = 1
) -> CentralNoise:
    """Return the least noise, to a millionth, whose uses have at least that noise multiplier."""
    NoiseEvent(noise_multiplier)
    least = noise_multiplier * norm * column_norm(bands)
    noise = CentralNoise(least, bands, norm, entries)
    while noise.std < 2 * least:
        if noise.noise_multiplier >= noise_multiplier:
            return noise
        std = noise.std * (noise_multiplier / noise.noise_multiplier) * (1 + 1e-7)
        noise = CentralNoise(std, bands, norm, entries)
    raise InvalidInput(
        f"noise multiplier {noise_multiplier:g} over {entries} entries is beyond the resolution of "
        "the noise; use a lower multiplier"
    )
