"""The norm bound of masked rounds where it follows the updates, by masked bits.

Nobody sees the norm of an update, so each device says, for each section of its update, whether the
norm was short, and the cloud learns how many were:

    C_next = C exp(-rate (b - quantile)),   b: the share of devices with a short update

(Andrew et al. 2021, see `privacy.clipping`). Without noise an update is short up to half of the
bound and the quantile is 0.5, so the bound follows twice the median, as where updates are in the
clear. With noise of devices it is short if it is not clipped, and the bits get noise, too.

A device may lie about its bit, and by more than one, because nobody can examine its integers. But
no sum moves the bound of a round by more than `exp(rate / 2)`, and none raises it above the first
bound and the norm of what is learned: no honest device replaces a model in one round.
"""

from __future__ import annotations

from typing import Final

from triplane.unified_ir.federated.core.limits import NORM_FACTOR
from triplane.unified_ir.federated.privacy.clipping import AdaptiveNorm
from triplane.unified_ir.federated.privacy.settings import QUANTILE, DifferentialPrivacy

START: Final = 4.0
RATE: Final = 1.0


def bit_share(privacy: DifferentialPrivacy | None) -> float:
    """Return up to which share of the bound an update is short, in a run whose bound follows."""
    return 1 / NORM_FACTOR if privacy is None else 1.0


def next_bound(
    bound: float,
    bits: int,
    contributors: int,
    *,
    devices: int,
    privacy: DifferentialPrivacy | None,
    most: float,
) -> float:
    """Return the bound of the next round.

    bits: sum over the contributors of +1, where the update was short, and -1, with its noise.
    devices: that complete a round; with noise, a missing one counts as 0. most: largest bound,
    such as that of the first round or the norm of what is learned, if that is longer.
    """
    norm = None if privacy is None else privacy.adaptive(bound, devices)
    count = contributors if norm is None else devices
    norm = norm or AdaptiveNorm(bound, 0.0, QUANTILE, RATE)
    return min(norm.next(bits, count).norm, max(most, norm.norm))
