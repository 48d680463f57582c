"""The result of one simulated run: rounds, scores of devices, the shared state."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from triplane.unified_ir.federated.core.draws import Array
from triplane.unified_ir.federated.core.metric import ACCURACY, Metric
from triplane.unified_ir.federated.privacy.report import PrivacySpent
from triplane.unified_ir.federated.study.shown import trial_html, trial_text

LEAST_PAIRS: Final = 2
"""Least number of devices or seeds for a standard error."""
LEAST_EQUAL: Final = 6
"""Least number of equal gains that is significant: 2 * 0.5**6 < 0.05, as of signs."""
ROUNDING: Final = 1e-9
FEW: Final = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""0.975 quantiles of Student's t with 1 to 10 degrees of freedom."""


@dataclass(frozen=True, slots=True)
class RoundRow:
    """One round. bytes_up, bytes_down: tensors of all its devices; loss: weighted by examples.

    scaled: updates above a norm bound. returned: why the study returned to an earlier state, or "".
    epsilon: spent after this round, 0 without differential privacy.
    """

    number: int
    devices: int
    loss: float
    bytes_up: int
    bytes_down: int
    seconds: float
    scaled: int = 0
    returned: str = ""
    epsilon: float = 0.0


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
    return Summary(len(pairs), mean_of(before), mean_of(after), *worst)


@dataclass(frozen=True, slots=True)
class Difference:
    """The mean of paired gains: over devices of one seed, or over seeds.

    A positive mean is better: a higher accuracy, or a lower loss. margin: half of the mean's 95 %
    confidence interval by Student's t; a mean within it is not significant. It is infinite for a
    single pair, which shows nothing about others.
    """

    mean: float
    margin: float

    @property
    def shown(self) -> bool:
        """Whether chance (the choice of devices, or of seeds) is an unlikely explanation."""
        return abs(self.mean) > self.margin


def difference(
    ours: Iterable[DeviceScore], theirs: Iterable[DeviceScore], metric: Metric = ACCURACY
) -> Difference | None:
    """Return the difference, paired by device; None without devices in common."""
    other = {s.device: s.after for s in theirs}
    return mean_gain([metric.gain(s.after, other[s.device]) for s in ours if s.device in other])


def mean_gain(gains: Sequence[float]) -> Difference | None:
    """Return the mean of paired gains with its margin; None for none."""
    if len(gains) < LEAST_PAIRS:
        return Difference(gains[0], math.inf) if gains else None
    # Standard error of a mean: sqrt(s^2 / n) with the unbiased s^2 = sum (d - mean)^2 / (n - 1).
    error, mean = deviation(gains) / math.sqrt(len(gains)), mean_of(gains)
    if error <= ROUNDING * abs(mean) and len(gains) < LEAST_EQUAL:
        # Accuracies of few samples are often equal by chance, which shows no variance of 0.
        return Difference(mean, abs(mean))
    return Difference(mean, student_t(len(gains) - 1) * error)


def student_t(freedom: int) -> float:
    """Return the 0.975 quantile of Student's t distribution, to 0.001."""
    if freedom <= len(FEW):
        return FEW[freedom - 1]
    # Expansion in 1 / freedom around the normal quantile (Abramowitz and Stegun, 26.7.5).
    z, n = 1.959964, freedom
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / n + second / n**2 + third / n**3


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Trial:
    """A run of one algorithm with one seed. state: the shared state at its end.

    algorithm: its name, or that of its server and its own, as in "FedAdam over fedavg".
    sweep: scores at the end by rate of adaptation, if several rates were tried. metric: that of all
    scores. start: scores of the model that the run began with, as of round 0; empty if it cannot be
    adapted at the run's rate. privacy: what it spent, of a study with differential privacy; ended:
    why it has fewer rounds than were asked for, or empty.
    """

    algorithm: str
    rounds: Sequence[RoundRow]
    scores: Sequence[DeviceScore]
    sweep: Mapping[float, Sequence[DeviceScore]]
    state: Mapping[str, Array]
    metric: Metric = ACCURACY
    seed: int = 0
    start: Sequence[DeviceScore] = ()
    privacy: PrivacySpent | None = None
    ended: str = ""

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


def mean_of(values: Sequence[float]) -> float:
    """Return the mean of at least one number."""
    return math.fsum(values) / len(values)


def deviation(values: Sequence[float]) -> float:
    """Return the sample standard deviation; 0 of a single number."""
    mean = mean_of(values)
    return math.sqrt(math.fsum((x - mean) ** 2 for x in values) / max(1, len(values) - 1))


def _worst(values: Sequence[float], metric: Metric) -> float:
    return mean_of(sorted(values, key=metric.merit)[: max(1, len(values) // 10)])
