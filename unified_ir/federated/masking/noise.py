"""Noise that devices add to the integers of a masked round: how much, and how it is added.

Whoever takes part derives the same numbers: studies, the cloud, and each device, which holds the
noise that it is asked for against what the round costs it. Zeros of a device are the whole level
next to the encoded zero, the same for all, so half a step is in the bound of the norm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.masking.encoding import (
    BIT_BITS,
    EncodedSection,
    UpdateEncoding,
)
from triplane.unified_ir.federated.masking.fields import MaskedField, Vector
from triplane.unified_ir.federated.privacy.distributed import (
    DistributedNoise,
    distributed_noise,
    rounded_norm,
)
from triplane.unified_ir.federated.privacy.settings import DifferentialPrivacy

TRIES: Final = 64
"""Roundings of one update at most; one in e^(1/2) or more meets the bound."""


def integer_norm(section: EncodedSection, clip: float) -> float:
    """Return the bound on the distance of a device's integers from those of zeros, in steps.

    clip: L2 norm of the update. Clipping to the range and the rotation do not lengthen it.
    """
    scaled = clip / section.step + math.sqrt(section.padded) / 2
    return rounded_norm(scaled, section.padded)


def noise_for(
    section: EncodedSection, clip: float, multiplier: float, honest: int
) -> DistributedNoise:
    """Return the least noise of a device with which `honest` of them have that multiplier."""
    norm = integer_norm(section, clip)
    return distributed_noise(multiplier, norm=norm, entries=section.padded, honest=honest)


def noises_for(
    section: EncodedSection, clip: float, privacy: DifferentialPrivacy, devices: int, honest: int
) -> tuple[DistributedNoise, DistributedNoise | None]:
    """Return the noise of a device in its update, and in its clipping bit if the norm follows.

    Together they cost a device what one noise of the run's multiplier does; see
    `AdaptiveNorm.update_multiplier`. devices: that complete a round.
    """
    norm = privacy.adaptive(clip, devices)
    if norm is None:
        return noise_for(section, clip, privacy.multiplier, honest), None
    bit = distributed_noise(2 * norm.bit_noise, norm=1.0, entries=1, honest=honest)
    update = noise_for(section, clip, norm.update_multiplier(privacy.multiplier), honest)
    while joint_multiplier(update, bit) < privacy.multiplier:  # by rounding of float64
        update = replace(update, variance=update.variance + update.variance // 2**30 + 1)
    return update, bit


def joint_multiplier(update: DistributedNoise, bit: DistributedNoise | None) -> float:
    """Return the multiplier of a sum of updates and of the sum of their bits, as one release.

    Both are concentrated private, (1/2) e^2 with 1/e the multiplier, and the e^2 add up.
    """
    if bit is None:
        return update.noise_multiplier
    return 1 / math.sqrt(update.noise_multiplier**-2 + bit.noise_multiplier**-2)


def bit_noise_of(variance: int, honest: int) -> DistributedNoise | None:
    """Return noise of a stated variance in a bit, which is +1 or -1; None for 0."""
    return DistributedNoise(variance, honest, 1.0, 1) if variance else None


def noise_of(section: EncodedSection, clip: float, variance: int, honest: int) -> DistributedNoise:
    """Return noise of a stated variance. InvalidInput: it is out of range."""
    return DistributedNoise(variance, honest, integer_norm(section, clip), section.padded)


def with_noise_bits(section: EncodedSection, variance: int, least: int) -> EncodedSection:
    """Return the section with room for the noise in the sum of any cohort of at least `least`.

    A larger cohort has more bits by itself: from one power of two to the next its sum doubles, and
    its noise grows by the root of two, so the smallest cohorts need the most further bits.
    """
    return replace(section, noise_bits=_room(replace(section, noise_bits=0).field, variance, least))


def bit_noise_bits(variance: int, least: int) -> int:
    """Return the further bits of a sum of clipping bits; see `with_noise_bits`."""
    return _room(MaskedField(1, BIT_BITS), variance, least) if variance else 0


def _room(field: MaskedField, variance: int, least: int) -> int:
    cohort = 1 << (max(least, 1) - 1).bit_length()
    noise = DistributedNoise(variance, 1, 1.0, field.entries)
    # Entries of one device are this far from the middle of its levels at most.
    needed = noise.sum_bits(cohort, 1 << (field.bits - 1))
    return max(0, needed - field.width(cohort))


def rounded(
    encoding: UpdateEncoding,
    update: Sequence[npt.NDArray[Any]],
    noise: DistributedNoise,
    is_short: Sequence[bool] = (),
) -> tuple[Vector, ...]:
    """Return the integers of a clipped update of one section, rounded until they meet the bound.

    is_short: see `UpdateEncoding.encode`. InvalidInput: they do not after many tries, because the
    update is longer than it was clipped to.
    """
    for _ in range(TRIES):
        levels, *others = encoding.encode(update, 1, is_short)
        distance = levels.astype(np.float64) - _middle(encoding.sections[0])
        if np.linalg.norm(distance) <= noise.norm:
            return levels, *others
    raise InvalidInput(
        f"an update was rounded {TRIES} times above its bound of {noise.norm:g} steps; is its norm "
        "right?"
    )


def with_noise(levels: Vector, noise: DistributedNoise) -> Vector:
    """Return integers with noise that is drawn now, int64; see `DistributedNoise.draw`."""
    drawn = noise.draw()
    drawn += levels
    return drawn


def noise_length(noise: DistributedNoise, devices: int, *, failure: float = 1e-9) -> float:
    """Return what the L2 norm of the noise of so many devices stays below, in steps.

    For a sub-Gaussian vector of deviation s in d entries, P[|x| > s (sqrt(d) + sqrt(2 t))] is at
    most exp(-t) (Hsu, Kakade and Zhang 2012, theorem 2.1).
    """
    deviation = math.sqrt(devices * noise.variance)
    return deviation * (math.sqrt(noise.entries) + math.sqrt(-2 * math.log(failure)))


def _middle(section: EncodedSection) -> int:
    """Return a whole level next to that of zeros, the same for all devices."""
    return ((1 << section.bits) - 1) // 2
