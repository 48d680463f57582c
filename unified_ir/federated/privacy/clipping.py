"""Clip a device's update to an L2 norm over all its tensors; let the norm follow the updates.

    u' = u min(1, C / |u|)
    C_next = C exp(-rate (b - quantile)),   b: the noised share of devices with |u| <= C

Andrew, Thakkar, McMahan and Ramaswamy 2021 (arXiv 1905.03871), algorithm 1. Each device sends its
bit as +1 or -1, where the paper has +1/2 and -1/2, so the noise of the sum has a standard deviation
of 2 sigma_b. A device that is left out adds 0 to the sum and stays in the number of devices:
sensitivity 1, noise multiplier 2 sigma_b.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.core.draws import Array
from triplane.unified_ir.federated.privacy.accountant import NoiseEvent

MIN_NORM: Final = 1e-6
MAX_NORM: Final = 1e6
CHUNK: Final = 1 << 16
"""Entries converted to float64 at a time."""


def check_norm(norm: float) -> None:
    """Raise InvalidInput unless `norm` can be a clipping norm."""
    if not MIN_NORM <= norm <= MAX_NORM:
        raise InvalidInput(f"a clipping norm is {MIN_NORM:g} to {MAX_NORM:g}, got {norm}")


def l2_norm(update: Mapping[str, Array]) -> float:
    """Return the L2 norm over all tensors, summed in float64. InvalidInput names one with NaN."""
    squares = [_sum_of_squares(update[name], name) for name in sorted(update)]
    if not math.isfinite(total := sum(squares)):
        raise InvalidInput(
            "the squares of all tensors together overflow; the update cannot be clipped to a norm"
        )
    return math.sqrt(total)


def clip(update: Mapping[str, Array], norm: float) -> bool:
    """Scale writable floating tensors in place so that their L2 norm is at most `norm`.

    Return whether they already were. InvalidInput: NaN, infinity, or an invalid norm; the tensors
    are unchanged then.
    """
    check_norm(norm)
    if (size := l2_norm(update)) <= norm:
        return True
    margin = 2.0**-24
    while size > norm:
        # Rounding to the tensors' type may leave the norm above the bound, or change nothing.
        margin *= 2
        # A float64, so that it does not underflow in the tensors' type.
        factor = np.float64(norm / size * (1 - margin))
        for x in update.values():
            np.multiply(x, factor, out=x, casting="same_kind")
        size = l2_norm(update)
    return False


@dataclass(frozen=True, slots=True)
class AdaptiveNorm:
    """A clipping norm that follows a quantile of the updates' norms.

    quantile: share of devices to be left unclipped. rate: learning rate of the logarithm.
    bit_noise: sigma_b, standard deviation of the noise in the count of unclipped devices; 0 in a
    run without differential privacy.
    """

    norm: float
    bit_noise: float
    quantile: float = 0.5
    rate: float = 0.2

    def __post_init__(self) -> None:
        check_norm(self.norm)
        if not (0 < self.quantile < 1 and 0 < self.rate <= 1):
            raise InvalidInput(
                f"adaptive clipping has a quantile in (0, 1) and a rate in (0, 1], got "
                f"{self.quantile} and {self.rate}"
            )
        if not 0 <= self.bit_noise < math.inf:
            raise InvalidInput(f"the noise of clipping bits is at least 0, got {self.bit_noise}")

    def next(self, sum_of_bits: float, devices: int) -> AdaptiveNorm:
        """Return the norm of the next round.

        sum_of_bits: noised sum over devices of +1 (not clipped) and -1. The share that it implies
        is limited to [0, 1], so noise moves the norm by no more than unanimous devices would.
        """
        if devices < 1 or not math.isfinite(sum_of_bits):
            raise InvalidInput(
                f"the share of unclipped devices needs a finite sum over at least one device, got "
                f"{sum_of_bits} over {devices}"
            )
        share = min(1.0, max(0.0, (sum_of_bits / devices + 1) / 2))
        norm = self.norm * math.exp(-self.rate * (share - self.quantile))
        return replace(self, norm=min(MAX_NORM, max(MIN_NORM, norm)))

    def update_multiplier(self, noise_multiplier: float) -> float:
        """Return the multiplier for the updates that leaves room for the bits (theorem 1).

        Updates and bits then cost together what one Gaussian of `noise_multiplier` costs:

            z_update = (z^-2 - (2 sigma_b)^-2)^(-1/2)

        InvalidInput if the bits alone would cost as much, or nearly.
        """
        target = NoiseEvent(noise_multiplier).noise_multiplier
        if target >= 2 * self.bit_noise:
            raise InvalidInput(
                f"the noise of clipping bits has to be above half the noise multiplier, got "
                f"{self.bit_noise:g} and {noise_multiplier:g}; a twentieth of the devices of a "
                "round is usual, so ask more devices or lower the noise multiplier"
            )
        room = target**-2 - (2 * self.bit_noise) ** -2
        return NoiseEvent(1 / math.sqrt(room) if room > 0 else math.inf).noise_multiplier


def _sum_of_squares(x: Array, name: str) -> float:
    if not np.issubdtype(x.dtype, np.floating):
        raise InvalidInput(f"only floating tensors are clipped, {name[:80]!r} has {x.dtype}")
    flat = x.reshape(-1)
    parts = (flat[at : at + CHUNK].astype(np.float64) for at in range(0, flat.size, CHUNK))
    with np.errstate(over="ignore", invalid="ignore"):
        total = sum((float(np.dot(part, part)) for part in parts), 0.0)
    if not math.isfinite(total):
        raise InvalidInput(
            f"{name[:80]!r} has NaN, infinity or values whose squares overflow; it cannot be "
            "clipped to a norm"
        )
    return total
