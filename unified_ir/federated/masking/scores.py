"""Scores as integers whose masked sum gives their mean over held-out samples.

For a score s in [low, high] over n held-out samples, of which at most `cap` count:

    q = round(2^bits (s - low) / (high - low) min(n, cap) / cap)

so the mean of m devices is off by less than m (high - low) cap / (2^bits sum min(n, cap)). The sum
of both scores and of the weights is all that is revealed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.core.metric import Metric
from triplane.unified_ir.federated.masking.encoding import MAX_CAP
from triplane.unified_ir.federated.masking.fields import MaskedField, Vector

MOST_LOSS: Final = float(1 << 20)
"""Largest absolute value of a loss that can be masked."""
SHARE_BITS: Final = 24
LOSS_BITS: Final = 44
"""Steps of 1.2e-7 over the range of losses; with ten bits for 1,000 devices they fit a field."""
BASE: Final = b"triplane masked scores\n"


def score_base(state: bytes) -> bytes:
    """Return the base of a masked evaluation of a state, both SHA-256.

    It differs from the state's own, so a device's ledger has one score beside one update for it.
    """
    return hashlib.sha256(BASE + state).digest()


@dataclass(frozen=True)
class ScoreEncoding:
    """The encoding of one evaluating round. cap: held-out samples that count at most."""

    metric: Metric
    cap: int
    sections: tuple[()] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.cap <= MAX_CAP:
            raise InvalidInput(f"the cap on held-out samples is 1 to {MAX_CAP}, got {self.cap}")

    @property
    def range(self) -> tuple[float, float]:
        """The smallest and the largest score."""
        return (0.0, 1.0) if self.metric.share else (-MOST_LOSS, MOST_LOSS)

    @property
    def _bits(self) -> int:
        return SHARE_BITS if self.metric.share else LOSS_BITS

    @property
    def fields(self) -> tuple[MaskedField, ...]:
        """The masked field of the scores before and after adaptation, then that of the weight."""
        # One bit more: the largest score is 2^bits.
        return MaskedField(2, self._bits + 1), MaskedField(1, self.cap.bit_length())

    def encode(self, scores: Sequence[float], samples: int) -> tuple[Vector, ...]:
        """Return the integers of one device, for each of `fields`.

        scores: before and after adaptation. InvalidInput unless they are in the range.
        """
        low, high = self.range
        # Not a number compares as false.
        if not all(low <= score <= high for score in scores) or samples < 1:
            raise InvalidInput(
                f"a score that is masked is {low:g} to {high:g} over at least 1 sample, got "
                f"{', '.join(f'{x:g}' for x in scores)} over {samples}; scale the targets"
            )
        weight = min(samples, self.cap)
        levels = [
            round((score - low) / (high - low) * weight / self.cap * 2**self._bits)
            for score in scores
        ]
        return np.array(levels, np.uint64), np.array([weight], np.uint64)

    def decode(
        self, sums: Sequence[Vector], devices: int, *, cohort: int
    ) -> tuple[tuple[npt.NDArray[Any]], int]:
        """Return (the mean scores: float64(2,), the sum of the weights) of the sum over `devices`.

        InvalidInput if no such sum is possible, for example because a device lied.
        """
        levels, weights = sums
        weight = int(weights[0])
        low, high = self.range
        # A step for each device, because levels were rounded.
        most = devices + weight / self.cap * 2**self._bits
        is_possible = devices <= min(weight, cohort) and weight <= devices * self.cap
        if not is_possible or max(map(int, levels)) > most:
            raise InvalidInput(
                f"{devices} devices of a cohort of {cohort} cannot have scores that add up to "
                f"{[int(x) for x in levels]} of {most:.0f}, and weights to {weight}; a device lied"
            )
        shares = [int(x) / 2**self._bits * self.cap / weight for x in levels]
        means = [min(low + share * (high - low), high) for share in shares]
        assert all(map(math.isfinite, means))
        return (np.array(means),), weight
