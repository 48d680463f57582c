"""Scores of many devices at once on XLA, as `core.learn.evaluate` has them of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from triplane.unified_ir.engines.xla.cohort import Cohort, CohortClient
from triplane.unified_ir.federated.core import learn
from triplane.unified_ir.federated.core.draws import Array
from triplane.unified_ir.federated.core.learn import Learner, LearnerScore, Shard, Work
from triplane.unified_ir.ir.graph import Function

State = Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class Scoring:
    """One set of held-out samples to score on; a device has several where it has episodes.

    own: the state in which its device differs from the others. begun: what adaptation sets first.
    support: the batch of each step of adaptation; none without steps. batches: with their samples.
    """

    own: State
    begun: State
    support: Mapping[str, Array] | None
    batches: Sequence[tuple[int, Mapping[str, Array]]]


def scorings(plan: Learner, own: State, work: Work, shard: Shard, steps: int) -> list[Scoring]:
    """Return what a device is scored on. plan: has the device's state. own: see `Scoring`."""
    return [
        Scoring(
            own,
            learn.beginning(plan, part_work),
            learn.support_batch(plan, part_work, part) if steps else None,
            list(learn.scoring_batches(plan, part)),
        )
        for part_work, part in learn.scored_parts(plan, work, shard)
    ]


class CohortScorer:
    """Adapts and scores many devices in one launch.

    functions: of the plan, by entry. roles: of its state.
    """

    def __init__(self, functions: Mapping[str, Function], roles: Mapping[str, str]) -> None:
        self._read = frozenset(functions[learn.EVALUATE].param_names) & roles.keys()
        self._evaluate = Cohort(functions[learn.EVALUATE], list(roles))
        self._adapt = Cohort(functions[learn.ADAPT], list(roles))

    def scores(self, start: State, parts: Sequence[Scoring]) -> list[float]:
        """Return the score of each without adaptation. start: the state that all have in common."""
        clients = [
            CohortClient({n: x for n, x in part.own.items() if n in self._read}, [batch])
            for part in parts
            for _, batch in part.batches
        ]
        outcomes = iter(self._evaluate.run(start, clients))
        return [
            learn.score_of(
                (n, {name: x[0] for name, x in next(outcomes).results.items()})
                for n, _ in part.batches
            )
            for part in parts
        ]

    def adapted(self, start: State, parts: Sequence[Scoring], steps: int) -> list[float]:
        """Return the score of each after steps of adaptation."""
        return self.scores(start, self._adapted(start, parts, steps) if steps else parts)

    def _adapted(self, start: State, parts: Sequence[Scoring], steps: int) -> list[Scoring]:
        clients = [
            CohortClient({**p.own, **p.begun}, [p.support] * steps)
            for p in parts
            if p.support is not None
        ]
        outcomes = self._adapt.run(start, clients)
        return [
            replace(part, own={**part.own, **outcome.state})
            for part, outcome in zip(parts, outcomes, strict=True)
        ]


def mean_scores(
    devices: Mapping[str, tuple[int, Sequence[Scoring]]],
    before: Sequence[float],
    after: Sequence[float],
) -> dict[str, LearnerScore]:
    """Return each device's scores, the means over its parts. devices: samples and parts."""
    pairs = iter(zip(before, after, strict=True))
    scores = {}
    for name, (samples, parts) in devices.items():
        own = [next(pairs) for _ in parts]
        scores[name] = LearnerScore(
            samples, *(learn.mean(column) for column in zip(*own, strict=True))
        )
    return scores
