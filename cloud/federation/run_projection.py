"""The projection of a run's events: the state of its rules, and what people see of it. Pure.

`follow` is the only way from one `RunProjection` to the next, both in a live run and when its
events are read back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, overload

from triplane.unified_ir.federated.core.masked_round import REFUSED
from triplane.unified_ir.federated.core.metric import ACCURACY, Metric, metric_named
from triplane.unified_ir.federated.core.rules import step
from triplane.unified_ir.federated.core.run import (
    Asked,
    Effects,
    Ended,
    Event,
    Exchanged,
    Refused,
    Round,
    RunState,
)
from triplane.unified_ir.federated.core.run_plan import ADDED

TENTH: Final = 10

Turn = tuple[int, bool, int]
"""(number, whether it evaluates, attempt) of a round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Scores over devices, each once. worst_tenth: mean of the worst tenth, at least one.

    Of masked scores only the mean is known, and the others are NaN.
    """

    mean: float
    worst: float
    worst_tenth: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Spreads:
    """Scores of one evaluating round, before and after adaptation."""

    before: Spread
    after: Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProjection:
    """A run as of its newest event.

    revision, at_s: number and time of that event. spreads: keyed by number of the evaluating round,
    as text. refused: newest reason by kind. metric: of scores; decides which devices are worst.
    """

    state: RunState
    revision: int = 0
    at_s: float = 0.0
    spreads: Mapping[str, Spreads] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    metric: str = field(default=ACCURACY.name, metadata=ADDED)


def follow(projection: RunProjection, event: Event) -> tuple[RunProjection, Effects]:
    """Return the projection after `event`, and the effects to carry out."""
    state, effects = step(projection.state, event)
    after = replace(projection, state=state, revision=projection.revision + 1, at_s=event.at_s)
    if isinstance(event, Refused):
        after = replace(after, refused={**projection.refused, event.kind: event.reason})
    if isinstance(event, Exchanged) and event.refused:
        newest = list(event.refused.values())[-1]
        after = replace(after, refused={**projection.refused, REFUSED: newest})
    for ended in state.history[len(projection.state.history) :]:
        scores = _scores(after, ended, event) if ended.evaluates and ended.counted else None
        if scores is not None:
            after = replace(after, spreads={**after.spreads, str(ended.number): scores})
    return after, effects


@overload
def turn_of(turn: Round | Asked) -> Turn: ...
@overload
def turn_of(turn: None) -> None: ...
def turn_of(turn: Round | Asked | None) -> Turn | None:
    """Return what identifies a round within its run."""
    return (turn.number, turn.evaluates, turn.attempt) if turn else None


def _scores(projection: RunProjection, ended: Ended, event: Event) -> Spreads | None:
    """Return the scores of an evaluating round that `event` ended; None if nobody scored."""
    if isinstance(event, Exchanged):
        mean = event.score
        if mean is None:
            return None
        return Spreads(before=_mean_only(mean.before), after=_mean_only(mean.after))
    members, metric = projection.state.members, metric_named(projection.metric)
    scores = [m.score for m in members.values() if m.score and m.score.round == ended.number]
    if not scores:
        return None
    return Spreads(
        before=spread_of([score.before for score in scores], metric),
        after=spread_of([score.after for score in scores], metric),
    )


def _mean_only(mean: float) -> Spread:
    return Spread(mean=mean, worst=math.nan, worst_tenth=math.nan)


def spread_of(values: list[float], metric: Metric = ACCURACY) -> Spread:
    """Return the spread of at least one value; their order does not matter."""
    ordered = sorted(values, key=metric.merit)
    lowest = ordered[: max(1, len(ordered) // TENTH)]
    return Spread(
        mean=math.fsum(ordered) / len(ordered),
        worst=ordered[0],
        worst_tenth=math.fsum(lowest) / len(lowest),
    )
