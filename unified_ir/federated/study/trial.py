"""The result of one simulated run: rounds, scores of devices, the shared state."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from triplane.unified_ir.federated.core.draws import Array
from triplane.unified_ir.federated.core.metric import ACCURACY, Metric
from triplane.unified_ir.federated.study.shown import trial_html, trial_text

LEAST_PAIRS: Final = 2
"""Least number of devices for a standard error."""


@dataclass(frozen=True, slots=True)
class RoundRow:
    """One round. bytes_up, bytes_down: tensors of all its devices; loss: weighted by examples."""

    number: int
    devices: int
    loss: float
    bytes_up: int
    bytes_down: int
    seconds: float


@dataclass(frozen=True, slots=True)
class DeviceScore:
    """Score of a device on its held-out samples after a round: its accuracy, or else its loss.

    seen: whether it took part in learning. before, after: without and with adaptation on its own
    support samples, which are not among the scored ones.
    """

    device: str
    seen: bool
    round: int
    samples: int
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class Summary:
    """Scores over devices, each device once. The worst tenth is at least one device."""

    devices: int
    before: float
    after: float
    before_worst_tenth: float
    after_worst_tenth: float


def summary(scores: Iterable[DeviceScore], metric: Metric = ACCURACY) -> Summary | None:
    """Return the summary; None without scores. metric: decides which devices are the worst."""
    pairs = [(s.before, s.after) for s in scores]
    if not pairs:
        return None
    before, after = zip(*pairs, strict=True)
    worst = (_worst(scores, metric) for scores in (before, after))
    return Summary(len(pairs), _mean(before), _mean(after), *worst)


@dataclass(frozen=True, slots=True)
class Difference:
    """The mean gain in adapted score of one trial's devices over the same devices of another.

    A positive mean is better: a higher accuracy, or a lower loss.
    twice_error: two standard errors of the mean over devices; a mean within it is not significant.
    """

    mean: float
    twice_error: float

    @property
    def shown(self) -> bool:
        """Whether the choice of devices is an unlikely explanation of the difference."""
        return abs(self.mean) > self.twice_error


def difference(
    ours: Iterable[DeviceScore], theirs: Iterable[DeviceScore], metric: Metric = ACCURACY
) -> Difference | None:
    """Return the difference, paired by device; None for fewer than two devices in common."""
    other = {s.device: s.after for s in theirs}
    gains = [metric.gain(s.after, other[s.device]) for s in ours if s.device in other]
    if len(gains) < LEAST_PAIRS:
        return None
    mean = _mean(gains)
    # Standard error of a mean: sqrt(s^2 / n) with the unbiased s^2 = sum (d - mean)^2 / (n - 1).
    variance = math.fsum((d - mean) ** 2 for d in gains) / (len(gains) - 1)
    return Difference(mean, 2 * math.sqrt(variance / len(gains)))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Trial:
    """A run of one algorithm. state: the shared state at its end.

    sweep: scores at the end by rate of adaptation, if several rates were tried. metric: that of all
    scores.
    """

    algorithm: str
    rounds: Sequence[RoundRow]
    scores: Sequence[DeviceScore]
    sweep: Mapping[float, Sequence[DeviceScore]]
    state: Mapping[str, Array]
    metric: Metric = ACCURACY

    def __repr__(self) -> str:
        return trial_text(self)

    def _repr_html_(self) -> str:
        return trial_html(self)

    @property
    def last_round(self) -> int:
        """Number of the last round; 0 without rounds."""
        return self.rounds[-1].number if self.rounds else 0

    def summary(self, *, seen: bool, round_: int | None = None) -> Summary | None:
        """Summarize the devices that took part or the others, by default after the last round."""
        number = self.last_round if round_ is None else round_
        return self._summary(self.scores, seen=seen, round_=number)

    def scored_rounds(self) -> tuple[int, ...]:
        """Return the rounds after which devices were scored."""
        return tuple(sorted({s.round for s in self.scores}))

    def best_rate(self, *, seen: bool) -> tuple[float, Summary] | None:
        """Return the swept rate with the best mean adapted score, the lowest rate of equals."""
        summaries = {r: self._summary(at, seen=seen) for r, at in self.sweep.items()}
        scored = [(rate, s) for rate, s in sorted(summaries.items()) if s is not None]
        return max(scored, key=lambda pair: self.metric.merit(pair[1].after), default=None)

    def _summary(
        self, scores: Iterable[DeviceScore], *, seen: bool, round_: int | None = None
    ) -> Summary | None:
        chosen = (s for s in scores if s.seen is seen and round_ in {None, s.round})
        return summary(chosen, self.metric)

    def final(self, *, seen: bool) -> tuple[DeviceScore, ...]:
        """Return the scores after the last round, at the best rate if several were tried."""
        best = self.best_rate(seen=seen)
        scores = self.sweep[best[0]] if best is not None else self.scores
        return tuple(s for s in scores if s.seen is seen and s.round == self.last_round)

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


def _worst(values: Sequence[float], metric: Metric) -> float:
    return _mean(sorted(values, key=metric.merit)[: max(1, len(values) // 10)])
