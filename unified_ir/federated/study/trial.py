"""The result of one simulated run: rounds, scores of devices, the shared state."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from triplane.unified_ir.federated.core.draws import Array

LEAST_PAIRS: Final = 2
"""Devices that a standard error takes."""


@dataclass(frozen=True, slots=True)
class RoundRow:
    """One round. bytes_up, bytes_down: tensors of all its devices; loss: by examples."""

    number: int
    devices: int
    loss: float
    bytes_up: int
    bytes_down: int
    seconds: float


@dataclass(frozen=True, slots=True)
class DeviceScore:
    """Accuracy of a device on its held-out samples after a round. seen: it took part in learning.

    after: with adaptation on its own support, which it is not scored on.
    """

    device: str
    seen: bool
    round: int
    samples: int
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class Summary:
    """Accuracy over devices, each device once. The worst tenth is at least one device."""

    devices: int
    before: float
    after: float
    before_worst_tenth: float
    after_worst_tenth: float


def summary(scores: Iterable[DeviceScore]) -> Summary | None:
    """None without scores."""
    known = list(scores)
    if not known:
        return None
    before, after = [s.before for s in known], [s.after for s in known]
    return Summary(len(known), _mean(before), _mean(after), _worst(before), _worst(after))


@dataclass(frozen=True, slots=True)
class Difference:
    """The mean gain in adapted accuracy of one trial's devices over the same devices of another.

    twice_error: two standard errors of the mean over devices; a mean within it shows nothing.
    """

    mean: float
    twice_error: float

    @property
    def shown(self) -> bool:
        """Whether it is larger than what the choice of devices may make."""
        return abs(self.mean) > self.twice_error


def difference(ours: Iterable[DeviceScore], theirs: Iterable[DeviceScore]) -> Difference | None:
    """Paired by device; None for fewer than two devices in common."""
    known = {s.device: s.after for s in theirs}
    gains = [s.after - known[s.device] for s in ours if s.device in known]
    if len(gains) < LEAST_PAIRS:
        return None
    mean = _mean(gains)
    variance = math.fsum((d - mean) ** 2 for d in gains) / (len(gains) - 1)
    return Difference(mean, 2 * math.sqrt(variance / len(gains)))


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """A run of one algorithm. state: what is shared at its end.

    sweep: scores at the end by the rate of adaptation, for rates that were tried beside the run's.
    """

    algorithm: str
    rounds: Sequence[RoundRow]
    scores: Sequence[DeviceScore]
    sweep: Mapping[float, Sequence[DeviceScore]]
    state: Mapping[str, Array]

    def summary(self, *, seen: bool, round_: int | None = None) -> Summary | None:
        """Over the devices that took part, or over the others; after the last round by default."""
        last = self.rounds[-1].number if self.rounds else 0
        number = last if round_ is None else round_
        return summary(s for s in self.scores if s.seen is seen and s.round == number)

    def scored_rounds(self) -> tuple[int, ...]:
        """Rounds after which devices were scored."""
        return tuple(sorted({s.round for s in self.scores}))

    def best_rate(self, *, seen: bool) -> tuple[float, Summary] | None:
        """The swept rate at which adapted accuracy is highest in the mean, the lowest of equals."""
        summaries = {r: summary(s for s in at if s.seen is seen) for r, at in self.sweep.items()}
        known = [(rate, s) for rate, s in sorted(summaries.items()) if s is not None]
        return max(known, key=lambda pair: pair[1].after, default=None)

    def final(self, *, seen: bool) -> tuple[DeviceScore, ...]:
        """Scores after the last round, at the best of the swept rates where some were tried."""
        best = self.best_rate(seen=seen)
        last = self.rounds[-1].number if self.rounds else 0
        chosen = self.sweep[best[0]] if best is not None else self.scores
        return tuple(s for s in chosen if s.seen is seen and s.round == last)

    @property
    def bytes_up(self) -> int:
        """Bytes of all updates."""
        return sum(row.bytes_up for row in self.rounds)

    @property
    def bytes_down(self) -> int:
        """Bytes of all states that were sent."""
        return sum(row.bytes_down for row in self.rounds)

    @property
    def seconds(self) -> float:
        """Seconds of learning and reducing, without scoring."""
        return sum(row.seconds for row in self.rounds)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _worst(values: Sequence[float]) -> float:
    return _mean(sorted(values)[: max(1, len(values) // 10)])
