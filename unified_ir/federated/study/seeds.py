"""Trials of several seeds: grouped by algorithm, averaged with their spread, paired by seed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.core.metric import Metric
from triplane.unified_ir.federated.study.trial import (
    DeviceScore,
    Difference,
    Summary,
    Trial,
    deviation,
    mean_gain,
    mean_of,
    summary,
)

Replicates = Sequence[Trial]
"""Trials of one algorithm, one per seed."""
Gain = Callable[[Trial], Sequence[float]]
Stopped = Mapping[str, Collection[int]]
"""The seeds in which an algorithm stopped, by its name."""


@dataclass(frozen=True, slots=True)
class SeedSpread:
    """A number over seeds: mean, sample standard deviation (0 for one seed), least and most."""

    mean: float
    deviation: float
    least: float
    most: float
    seeds: int

    def text(self, metric: Metric) -> str:
        """Format as "93.1", or as "93.1 ± 0.4" with the standard deviation over seeds."""
        mean = metric.text(self.mean)
        return mean if self.seeds == 1 else f"{mean} ± {metric.text(self.deviation)}"


def spread(values: Sequence[float]) -> SeedSpread:
    """Return the spread of at least one number."""
    return SeedSpread(mean_of(values), deviation(values), min(values), max(values), len(values))


def by_algorithm(trials: Sequence[Trial]) -> Mapping[str, Replicates]:
    """Return the trials of each algorithm in order of seed; InvalidInput if one occurs twice."""
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(trial.algorithm, []).append(trial)
    for name, group in groups.items():
        group.sort(key=lambda trial: trial.seed)
        if len({trial.seed for trial in group}) < len(group):
            raise InvalidInput(f"two trials of {name} have the same seed")
    return groups


def metric_of_trials(trials: Sequence[Trial]) -> Metric:
    """Return the metric of all trials; InvalidInput if they have several or there are none."""
    if not trials:
        raise InvalidInput("a report needs at least one run")
    metrics = {trial.metric for trial in trials}
    if len(metrics) > 1:
        names = ", ".join(f"{trial.algorithm} by {trial.metric.name}" for trial in trials)
        raise InvalidInput(f"a report compares runs of one model, but these are scored {names}")
    return metrics.pop()


def final_summaries(trials: Replicates, *, seen: bool) -> list[Summary]:
    """Return the final summary of each seed that has one, at the best rate of that seed."""
    each = (summary(trial.final(seen=seen), trial.metric) for trial in trials)
    return [s for s in each if s is not None]


def final_spread(
    trials: Replicates, value: Callable[[Summary], float], *, seen: bool
) -> SeedSpread | None:
    """Return the spread over seeds of a value of the final summaries; None without scores."""
    values = [value(s) for s in final_summaries(trials, seen=seen)]
    return spread(values) if values else None


def start_spread(trials: Replicates, every: Sequence[Trial], *, seen: bool) -> SeedSpread | None:
    """Return the spread over seeds of the mean unadapted score at the start; None if unknown.

    every: the trials of all algorithms. The unadapted start belongs to the seed, so that of a seed
    in which this algorithm stopped, or could not adapt at the start, is known from another's.
    """
    starts: dict[int, float] = {}
    for trial in (*trials, *every):
        if scores := [s.before for s in trial.start if s.seen is seen]:
            starts.setdefault(trial.seed, mean_of(scores))
    return spread([starts[seed] for seed in sorted(starts)]) if starts else None


@dataclass(frozen=True, slots=True)
class Completion:
    """How many of the study's seeds each algorithm finished. finished: by name, 0 included."""

    finished: Mapping[str, int]
    seeds: int

    def whole(self, name: str) -> bool:
        """Return whether the algorithm finished all seeds; only then is it ranked."""
        return self.finished[name] == self.seeds

    def label(self, name: str) -> str:
        """Format as "maml (1 of 3 seeds)"; the name alone if it finished all."""
        return name if self.whole(name) else f"{name} ({self.finished[name]} of {self.seeds} seeds)"

    def stopped(self, name: str) -> str:
        """Format as "maml stopped in 2 of 3 seeds", or "maml stopped" in a study of one seed."""
        lost = self.seeds - self.finished[name]
        return f"{name} stopped" + (f" in {lost} of {self.seeds} seeds" if self.seeds > 1 else "")


def completion(trials: Sequence[Trial], stopped: Stopped | None = None) -> Completion:
    """Return how many seeds each algorithm finished.

    stopped: needed for algorithms and seeds that have no trial. A seed that only others have counts
    as one in which an algorithm stopped: its mean is not comparable with theirs.
    """
    lost = stopped or {}
    finished = {name: len(replicates) for name, replicates in by_algorithm(trials).items()}
    seeds = {trial.seed for trial in trials}.union(*lost.values())
    return Completion({**dict.fromkeys(lost, 0), **finished}, len(seeds))


def common_seeds(trials: Sequence[Trial]) -> set[int]:
    """Return the seeds that every algorithm with a trial finished."""
    return set.intersection(*({t.seed for t in group} for group in by_algorithm(trials).values()))


def compared(ours: Replicates, theirs: Replicates, *, seen: bool) -> Difference | None:
    """Return the gain in adapted score over `theirs`, paired by device and seed.

    With one common seed the pairs are its devices. With several, the pairs are the seeds, each with
    the mean over its devices, so the margin covers what another seed would give.
    """
    others = {trial.seed: {s.device: s.after for s in trial.final(seen=seen)} for trial in theirs}

    def gains(trial: Trial) -> list[float]:
        other = others.get(trial.seed, {})
        scores = [s for s in trial.final(seen=seen) if s.device in other]
        return [trial.metric.gain(s.after, other[s.device]) for s in scores]

    return paired(ours, gains)


def adaptation_gain(trials: Replicates, *, seen: bool) -> Difference | None:
    """Return by how much adapted scores are better than unadapted ones at the end."""

    def gains(trial: Trial) -> list[float]:
        return [trial.metric.gain(s.after, s.before) for s in trial.final(seen=seen)]

    return paired(trials, gains)


def learning_gain(trials: Replicates, *, seen: bool) -> Difference | None:
    """Return by how much scores at the end are better than at the start.

    Each side is taken unadapted or adapted, whichever has the better mean: a meta-algorithm gives
    up unadapted accuracy on purpose, and adaptation can hurt a model that is good as it is.
    """

    def gains(trial: Trial) -> list[float]:
        start = {s.device: s for s in trial.start if s.seen is seen}
        pairs = [(s, start[s.device]) for s in trial.final(seen=seen) if s.device in start]
        if not pairs:
            return []
        ends, starts = (_better(side, trial.metric) for side in zip(*pairs, strict=True))
        return [trial.metric.gain(a, b) for a, b in zip(ends, starts, strict=True)]

    return paired(trials, gains)


def _better(scores: Sequence[DeviceScore], metric: Metric) -> list[float]:
    sides = [s.before for s in scores], [s.after for s in scores]
    return max(sides, key=lambda side: metric.merit(mean_of(side)))


def paired(trials: Replicates, gains: Gain) -> Difference | None:
    """Return the mean of each seed's mean gain, or over the devices of a single seed."""
    each = [g for trial in trials if (g := gains(trial))]
    if len(each) == 1:
        return mean_gain(each[0])
    return mean_gain([mean_of(g) for g in each])
