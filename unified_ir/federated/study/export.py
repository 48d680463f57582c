"""A study as data: one JSON record, and tables of scores and of rounds as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, Final

from triplane.unified_ir.federated.study.trial import DeviceScore, Trial, summary
from triplane.unified_ir.federated.study.verdicts import GROUPS

SCORE_COLUMNS: Final = (
    "algorithm", "seed", "round", "devices", "device", "samples", "metric", "before", "adapted",
    "rate", "final",
)  # fmt: skip
ROUND_COLUMNS: Final = (
    "algorithm", "seed", "round", "devices", "loss", "bytes_up", "bytes_down", "seconds",
    "scaled",
)  # fmt: skip
NAMES: Final = {seen: group for seen, group, _ in GROUPS}


def scores_csv(trials: Sequence[Trial]) -> str:
    """Return a row per scored device, seed, round and rate, round 0 being the start.

    devices: "training" or "unseen". before, adapted: shares or losses, as `metric` says. rate: of
    adaptation, empty for the run's own. final: 1 in the rows of the tables of results, else 0.
    """
    return _csv(SCORE_COLUMNS, (row for trial in trials for row in _score_rows(trial)))


def rounds_csv(trials: Sequence[Trial]) -> str:
    """Return a row per round and seed; bytes and seconds are of all its devices.

    scaled: updates above a norm bound.
    """
    rows = (
        (
            t.algorithm,
            t.seed,
            r.number,
            r.devices,
            r.loss,
            r.bytes_up,
            r.bytes_down,
            r.seconds,
            r.scaled,
        )
        for t in trials
        for r in t.rounds
    )
    return _csv(ROUND_COLUMNS, rows)


def trial_record(trial: Trial) -> dict[str, Any]:
    """Return a trial for JSON: its rounds, its scores at the end by group, means over rounds."""
    # Accuracy is the default of readers, who know records without the field.
    metric = {} if trial.metric.share else {"metric": trial.metric.name}
    return {
        "algorithm": trial.algorithm,
        "seed": trial.seed,
        **metric,
        "bytes_up": trial.bytes_up,
        "bytes_down": trial.bytes_down,
        "seconds": trial.seconds,
        **({} if trial.privacy is None else {"privacy": trial.privacy.to_json()}),
        **({"ended": trial.ended} if trial.ended else {}),
        "rounds": [asdict(row) for row in trial.rounds],
        **{group: [asdict(s) for s in trial.final(seen=seen)] for seen, group in NAMES.items()},
        "start": [asdict(score) for score in trial.start],
        "curve": [
            {"round": number, "devices": NAMES[seen], "before": before, "adapted": after}
            for seen in NAMES
            for number, before, after in curve(trial, seen=seen)
        ],
        "rates": {
            group: best[0]
            for seen, group in NAMES.items()
            if (best := trial.best_rate(seen=seen)) is not None
        },
    }


def curve(trial: Trial, *, seen: bool) -> list[tuple[int, float, float]]:
    """Return (round, mean before, mean adapted) at the run's own rate, round 0 being the start."""
    by_round: dict[int, list[DeviceScore]] = {}
    for score in (*trial.start, *trial.scores):
        if score.seen is seen:
            by_round.setdefault(score.round, []).append(score)
    points = ((n, summary(scores)) for n, scores in sorted(by_round.items()))
    return [(n, s.before, s.after) for n, s in points if s is not None]


def _score_rows(trial: Trial) -> Iterator[tuple[object, ...]]:
    for score in (*trial.start, *trial.scores):
        is_last = score.round == trial.last_round
        # With several rates, the scores at the end are among those of the rates.
        if not (is_last and trial.sweep):
            yield _score_row(trial, score, "", is_final=is_last)
    best = {seen: (trial.best_rate(seen=seen) or (None,))[0] for seen in NAMES}
    for rate, scores in trial.sweep.items():
        for score in scores:
            yield _score_row(trial, score, f"{rate:g}", is_final=best[score.seen] == rate)


def _score_row(
    trial: Trial, score: DeviceScore, rate: str, *, is_final: bool
) -> tuple[object, ...]:
    return (
        trial.algorithm, trial.seed, score.round, NAMES[score.seen], score.device, score.samples,
        trial.metric.name, score.before, score.after, rate, int(is_final),
    )  # fmt: skip


def _csv(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue()
