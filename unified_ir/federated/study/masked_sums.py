"""What masking does to the numbers of a study: integers, their sum modulo 2^b, and the mean of it.

Nothing is encrypted here, since all devices are in this process. Updates are clipped to a norm,
encoded as a masked round encodes them (`masking.encoding`), with the noise of each device if it
adds some, and decoded from their sum. With groups, each has a sum of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from triplane.unified_ir.federated.core import defaults
from triplane.unified_ir.federated.core.draws import Array, Draws
from triplane.unified_ir.federated.masking.encoding import (
    EncodedSection,
    UpdateEncoding,
    range_for,
)
from triplane.unified_ir.federated.masking.groups import group_sizes, groups_of
from triplane.unified_ir.federated.masking.noise import (
    noise_for,
    rounded,
    with_noise,
    with_noise_bits,
)
from triplane.unified_ir.federated.masking.parameters import MaskingParameters, choose_parameters
from triplane.unified_ir.federated.privacy.clipping import clip
from triplane.unified_ir.federated.privacy.distributed import DistributedNoise
from triplane.unified_ir.federated.privacy.settings import DISTRIBUTED, DifferentialPrivacy

if TYPE_CHECKING:
    from triplane.unified_ir.federated.masking.fields import Vector

LEAST: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedStudy:
    """The masking of a study. least: fewest devices whose sum may be unmasked, 0 for the default.

    norm: to which updates are clipped, and by which their integers are scaled. cap: examples that
    count at most. failure: of the bounds on a device's neighbours. groups: of a round that are
    masked apart, each with the least cohort of its own.
    """

    norm: float
    cap: int = 1
    least: int = 0
    lost_share: float = defaults.LOST_SHARE
    colluding_share: float = defaults.COLLUDING_SHARE
    failure: float = defaults.MASK_FAILURE
    groups: int = 1

    def parameters(self, devices: int) -> list[MaskingParameters]:
        """Return what a round of `devices` uses, for each size of its groups, the largest first.

        InvalidInput: it, or a group of it, cannot be masked.
        """
        sizes = dict.fromkeys(group_sizes(devices, self.groups))
        return [self._of_group(size, devices) for size in sizes]

    def _of_group(self, size: int, devices: int) -> MaskingParameters:
        return choose_parameters(
            size,
            cohort=devices,
            least=self.least or max(LEAST, size // 2 + 1),
            lost_share=self.lost_share,
            colluding_share=self.colluding_share,
            failure=self.failure,
        )

    def text(self, devices: int) -> str:
        """Describe it for people, a few lines."""
        lines = [chosen.text() for chosen in self.parameters(devices)]
        if self.groups > 1:
            lines.append(
                f"the mean of each of the {self.groups} groups is one input of the aggregator"
            )
        lines.append(
            "this study computes the integers and their sum; it encrypts nothing, and no device is "
            "lost"
        )
        return "\n".join(lines)

    def least_and_honest(self, devices: int) -> tuple[int, int]:
        """Return the fewest devices, and the fewest honest ones, in a sum that is revealed."""
        every = self.parameters(devices)
        return min(p.least for p in every), min(p.least - p.colluding for p in every)


def masked_cohort(masking: MaskedStudy | None, devices: int) -> tuple[int, int] | None:
    """Return the least cohort and its honest devices, or None; see `check_composition`."""
    return None if masking is None else masking.least_and_honest(devices)


@dataclass(frozen=True, slots=True)
class MaskedSum:
    """The encoding of one sum of a round, and the noise of each of its devices if they add some.

    devices: of the cohort or the group.
    """

    names: tuple[str, ...]
    encoding: UpdateEncoding
    norm: float
    devices: int
    noise: DistributedNoise | None

    def mean(self, updates: Sequence[tuple[int, Mapping[str, Array]]]) -> dict[str, Array]:
        """Return the weighted mean of (examples, change), float64."""
        sums: list[Vector] = [np.zeros(f.entries, np.uint64) for f in self.encoding.fields]
        for examples, change in updates:
            for total, vector in zip(sums, self._integers(change, examples), strict=True):
                total += vector.astype(np.int64).view(np.uint64)
        for total, field in zip(sums, self.encoding.fields, strict=True):
            total &= np.uint64((1 << field.width(self.devices)) - 1)
        (flat,), _ = self.encoding.decode(sums, len(updates), cohort=self.devices)
        shapes = {n: updates[0][1][n].shape for n in self.names}
        parts = np.split(flat, np.cumsum([math.prod(s) for s in shapes.values()])[:-1])
        pairs = zip(shapes.items(), parts, strict=True)
        return {n: part.reshape(s).astype(np.float64) for (n, s), part in pairs}

    @property
    def bytes_up(self) -> int:
        """Bytes of one masked update."""
        bits = sum(f.entries * f.width(self.devices) for f in self.encoding.fields)
        return -(-bits // 8)

    def _integers(self, change: Mapping[str, Array], examples: int) -> Sequence[Vector]:
        copies = {n: np.array(x) for n, x in change.items()}
        clip(copies, self.norm)
        flat = np.concatenate([copies[n].reshape(-1) for n in self.names]).astype(np.float32)
        if self.noise is None:
            return self.encoding.encode([flat], examples)
        levels, weight = rounded(self.encoding, [flat], self.noise)
        return with_noise(levels, self.noise), weight


def with_equal_weights(masking: MaskedStudy | None) -> MaskedStudy | None:
    """Return the masking of devices that all count as one example."""
    return None if masking is None else replace(masking, cap=1)


def masked_bytes(
    change: Mapping[str, Array],
    masking: MaskedStudy,
    devices: int,
    privacy: DifferentialPrivacy | None,
) -> int:
    """Return the bytes of a masked update of this form; with groups, in the largest of them."""
    return masked_sum(change, masking, devices=devices, seed=0, privacy=privacy).bytes_up


def masked_means(
    updates: Sequence[tuple[int, Mapping[str, Array]]],
    masking: MaskedStudy,
    *,
    draws: Draws,
    privacy: DifferentialPrivacy | None,
) -> list[dict[str, Array]]:
    """Return the weighted mean of (examples, change) of each group of a round, float64.

    draws: of the round, for the public rotation, and for the groups, which a hash of all keys
    draws in a run.
    """
    words, devices = draws.words(5), len(updates)
    sums = masked_sum(updates[0][1], masking, devices=devices, seed=int(words[0]), privacy=privacy)
    groups = groups_of(words[1:].tobytes(), devices, masking.groups)
    return [replace(sums, devices=len(g)).mean([updates[i] for i in g]) for g in groups]


def masked_sum(
    change: Mapping[str, Array],
    masking: MaskedStudy,
    *,
    devices: int,
    seed: int,
    privacy: DifferentialPrivacy | None,
) -> MaskedSum:
    """Return how updates of this form are summed in the largest group of a round of `devices`.

    seed: of the public rotation.
    """
    names = tuple(sorted(change))
    entries = sum(change[n].size for n in names)
    section = EncodedSection(entries, range_for(masking.norm, entries))
    noise = None
    if privacy is not None and privacy.placement == DISTRIBUTED:
        least, honest = masking.least_and_honest(devices)
        noise = noise_for(section, masking.norm, privacy.multiplier, honest)
        section = with_noise_bits(section, noise.variance, least)
    encoding = UpdateEncoding((section,), masking.cap, seed)
    largest = group_sizes(devices, masking.groups)[0]
    return MaskedSum(names, encoding, masking.norm, largest, noise)
