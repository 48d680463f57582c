"""The rows of federated runs: rounds, contributions of devices, and their scores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, Final

from google.protobuf.message import Message

from triplane.proto.federation_pb2 import Member, Round, Run, Spec, Spread
from triplane.unified_ir.federated.privacy.report import spent_text

Row = dict[str, Any]

MOST_ROUNDS: Final = 60
"""Number of newest rounds of a run that the page shows; older ones are counted by outcome."""
MOST_POINTS: Final = 120
"""Largest number of points of a curve."""
MOST_DEVICES: Final = 200
MOST_REASONS: Final = 10
MOST_TEXT_CHARS: Final = 500


def run_row(run: Run) -> Row:
    """Return the row of a run: newest rounds, devices, those dropped most, newest scores."""
    learning = [r for r in run.rounds if not r.evaluates]
    judged = [r for r in run.rounds if r.evaluates and r.HasField("before")]
    members = sorted(run.members, key=lambda member: member.device)
    return {
        **same_fields(run, "id", "round", "started_by", "result", "metric"),
        **same_fields(run.spec, "model", "population"),
        "algorithm": _algorithm(run.spec),
        "phase": Run.Phase.Name(run.phase).lower(),
        "reason": run.reason[:MOST_TEXT_CHARS],
        "of": run.spec.rounds,
        "started_s": round(run.started_s),
        "ended_s": round(run.ended_s),
        "rounds": [_round_row(r) for r in learning[-MOST_ROUNDS:]],
        "older": dict(Counter(map(_outcome, learning[:-MOST_ROUNDS]))),
        "losses": _thinned([[r.number, _score(r.loss, "loss")] for r in learning if _has_loss(r)]),
        "scores": _thinned([_score_point(r, run.metric) for r in judged]),
        "spread": _spread_row(judged[-1], run.metric) if judged else None,
        "devices": [_device_row(member, run.metric) for member in members[:MOST_DEVICES]],
        "device_count": len(members),
        "connected": sum(member.connected for member in members),
        "stragglers": [_device_row(member, run.metric) for member in _stragglers(members)],
        "bytes_up": sum(r.bytes_up for r in run.rounds),
        "bytes_down": sum(r.bytes_down for r in run.rounds),
        "privacy": _privacy(run),
        "refusals": [
            {"kind": r.kind, "count": r.count, "newest": r.newest[:MOST_TEXT_CHARS]}
            for r in islice(run.refusals.reasons, MOST_REASONS)
        ],
    }


def _privacy(run: Run) -> str:
    """Return what a run with differential privacy has spent, or empty."""
    if not run.HasField("epsilon_spent"):
        return ""
    return spent_text(run.epsilon_spent, run.spec.noise.epsilon, run.spec.noise.delta)


def same_fields(message: Message, *names: str) -> Row:
    """Return fields that have the same name in the row as in the message."""
    return {name: getattr(message, name) for name in names}


def _algorithm(spec: Spec) -> str:
    """Return "maml", or "FedAdam over fedavg" where a strategy of Flower decides."""
    if not spec.HasField("flower"):
        return spec.algorithm
    return f"{spec.flower.strategy} over {'ClientApp' if spec.flower.app else spec.algorithm}"


def _round_row(round_: Round) -> Row:
    return {
        **same_fields(round_, "number", "asked", "counted", "refused", "late", "lost"),
        "loss": _score(round_.loss, "loss") if _has_loss(round_) else None,
        "seconds": round(round_.closed_s - round_.opened_s, 3) if round_.closed_s else None,
        "given_up": (round_.given_up or round_.returned or round_.left_out)[:MOST_TEXT_CHARS],
        "outcome": _outcome(round_),
    }


def _outcome(round_: Round) -> str:
    if round_.given_up:
        return "abandoned"
    if not round_.closed_s:
        return "open"
    return "partial" if round_.counted < round_.asked else "complete"


def _has_loss(round_: Round) -> bool:
    """Return whether the loss of a round is known: masked updates tell none."""
    return bool(round_.closed_s and round_.loss and not round_.given_up)


def _score_point(round_: Round, metric: str) -> list[float]:
    """Return the round and the means over devices before and after adaptation."""
    return [
        round_.number, _score(round_.before.mean, metric), _score(round_.after.mean, metric)
    ]  # fmt: skip


def _thinned(points: Sequence[list[float]]) -> list[list[float]]:
    """Return at most `MOST_POINTS` of the points, evenly spread, with the first and the last."""
    count = min(len(points), MOST_POINTS)
    return [points[i * (len(points) - 1) // max(count - 1, 1)] for i in range(count)]


def _device_row(member: Member, metric: str) -> Row:
    scored = member.HasField("score")
    return {
        **same_fields(member, "connected", "counted", "dropped"),
        "name": member.device,
        "reason": member.reason[:MOST_TEXT_CHARS],
        "waits": member.waits[:MOST_TEXT_CHARS],
        "before": _score(member.score.before, metric) if scored else None,
        "after": _score(member.score.after, metric) if scored else None,
    }


def _stragglers(members: Iterable[Member]) -> list[Member]:
    stragglers = [member for member in members if member.dropped or member.waits]
    return sorted(stragglers, key=lambda m: (not m.waits, -m.dropped))[:MOST_REASONS]


def _spread_row(round_: Round, metric: str) -> Row:
    before, after = _values(round_.before, metric), _values(round_.after, metric)
    return {"round": round_.number, "before": before, "after": after}


def _values(spread: Spread, metric: str) -> Row:
    names = ("mean",) if spread.masked else ("mean", "worst", "worst_tenth")
    return {name: _score(getattr(spread, name), metric) for name in names}


def _score(score: float, metric: str) -> float:
    # A loss may be far below 0.0001; an accuracy has no name in a run.
    return float(f"{score:.4g}") if metric else round(score, 4)
