"""A study as one self-contained HTML page: tables, dots of devices, lines over rounds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Final

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.core.metric import Metric
from triplane.unified_ir.federated.study.trial import Summary, Trial, difference, summary
from triplane.unified_ir.files.chart import Column, dot_chart, line_chart, value_chart

GROUPS: Final = (
    (True, "training", "Devices that learned"),
    (False, "unseen", "Devices that never took part"),
)
LEAST_COMPARED: Final = 2
MAX_POINTS: Final = 60
"""Limit for the points of a line of losses; with more rounds, means of several are drawn."""
OF_DEVICES: Final = {
    True: "{metric} on a device's own held-out samples, %",
    False: "{metric} on a device's own held-out samples; lower is better",
}
"""The axis of dots, by whether the metric is a share in percent."""
OVER_ROUNDS: Final = {
    True: "mean over devices, %, at the run's own rate",
    False: "mean over devices, at the run's own rate; lower is better",
}
IN_ONE_PICTURE: Final = 6
"""Limit for the columns of dots in one picture; with more, each group of devices has its own."""
STYLE: Final = files(__package__).joinpath("report.css").read_text("utf-8")
HEADS: Final = (
    "algorithm", "before", "adapted", "against {first}", "at rate", "worst tenth before",
    "worst tenth adapted",
)  # fmt: skip
COSTS: Final = ("algorithm", "rounds", "MB up", "MB down", "seconds", "seconds a round")
NOTE: Final = (
    "{metric}, the mean over devices, each device once, on samples that neither "
    "learning nor adaptation saw. Adapted: after the inner steps on the device's own support. "
    "Where several rates of adaptation were tried, the one with the best mean stands for the "
    "algorithm. The worst tenth is the mean of the {worst} tenth of devices. Against: the mean "
    "{difference} after adaptation, paired by device, with two standard errors; one within them "
    "may come from which devices there are, and one run says nothing about other seeds."
)
NOTE_WORDS: Final = {
    True: {"metric": "Accuracy in percent", "worst": "lowest", "difference": "difference"},
    False: {
        "metric": "Loss (lower is better)",
        "worst": "highest",
        "difference": "gain (positive where the loss is lower)",
    },
}
"""Words of `NOTE`, by whether the metric is a share in percent."""
COST_NOTE: Final = (
    "Bytes are those of tensors, of all devices and rounds. Seconds are of learning and reducing "
    "in this process, one device after another, without scoring."
)
LOSS_NOTE: Final = "of a batch; for maml, fomaml, meta-sgd of the query after the inner steps"


def page(trials: Sequence[Trial], title: str, facts: Mapping[str, str] | None = None) -> str:
    """Return the page. facts: what a reader has to know of the study, by name."""
    if not trials:
        raise InvalidInput("a report needs at least one run")
    metric = _metric(trials)
    body = [
        f"<h1>{_e(title)}</h1>",
        *(f"<p class='said'>{_e(line)}</p>" for line in verdicts(trials)),
        *(results(trials, seen=seen, heading=heading) for seen, _, heading in GROUPS),
        f"<p>{_e(NOTE.format(**NOTE_WORDS[metric.share]))}</p>",
        "<h2>What it cost</h2>",
        _costs(trials),
        f"<p>{_e(COST_NOTE)}</p>",
        *charts(trials),
        _facts_table(facts or {}),
    ]
    head = (
        "<meta charset='utf-8'><meta name='viewport' content='width=device-width'>"
        f"<title>{_e(title)}</title><style>\n{STYLE}</style>"
    )
    return f"<!doctype html>\n<html lang='en'><head>{head}</head>\n<body>\n" + "\n".join(
        [part for part in body if part] + ["</body></html>\n"]
    )


def _metric(trials: Sequence[Trial]) -> Metric:
    """Return the metric of all trials. InvalidInput: they have several."""
    metrics = {trial.metric for trial in trials}
    if len(metrics) > 1:
        names = ", ".join(f"{trial.algorithm} by {trial.metric.name}" for trial in trials)
        raise InvalidInput(f"a report compares runs of one model, but these are scored {names}")
    return metrics.pop()


def results(trials: Sequence[Trial], *, seen: bool, heading: str) -> str:
    """Return the table of scores of one group of devices, the best in bold; empty for none."""
    metric = _metric(trials)
    pairs = ((t, summary(t.final(seen=seen), metric)) for t in trials)
    scored = [(t, s) for t, s in pairs if s is not None]
    if not scored:
        return ""
    tops = [
        max(column, key=metric.merit)
        for column in zip(*(_numbers(s) for _, s in scored), strict=True)
    ]
    rows = []
    for trial, s in scored:
        best = trial.best_rate(seen=seen)
        texts = [
            (metric.text(x), metric.text(top)) for x, top in zip(_numbers(s), tops, strict=True)
        ]
        cells = [f"<b>{text}</b>" if text == best_text else text for text, best_text in texts]
        rate = "own" if best is None else f"{best[0]:g}"
        against = _against(trial, trials[0], seen=seen)
        rows.append([_e(trial.algorithm), *cells[:2], against, rate, *cells[2:]])
    count = max(s.devices for _, s in scored)
    heads = [head.format(first=trials[0].algorithm) for head in HEADS]
    return f"<h2>{_e(heading)}: {count}</h2>{_table(heads, rows)}"


def _numbers(s: Summary) -> tuple[float, float, float, float]:
    return s.before, s.after, s.before_worst_tenth, s.after_worst_tenth


def verdicts(trials: Sequence[Trial]) -> list[str]:
    """Name the best algorithm in each group of devices, and those not significantly different."""
    lines = []
    for seen, group, _ in GROUPS:
        scored = {t.algorithm: t.final(seen=seen) for t in trials if t.final(seen=seen)}
        if len(scored) < LEAST_COMPARED:
            continue
        metric = _metric(trials)
        means = {name: s.after for name in scored if (s := summary(scored[name])) is not None}
        best = max(means, key=lambda name: metric.merit(means[name]))
        near: list[str] = []
        behind: list[str] = []
        for name in sorted(scored.keys() - {best}, key=lambda name: -metric.merit(means[name])):
            gap = difference(scored[best], scored[name], metric)
            # Paired by device, which removes the large differences between devices from the error.
            others = behind if gap is not None and gap.shown else near
            others.append(f"{name} {metric.text(means[name])}")
        parts = [f"{best} {metric.text(means[best])}"]
        parts += [f"not significantly different: {', '.join(near)}"] if near else []
        parts += [f"behind: {', '.join(behind)}"] if behind else []
        what = "after adaptation" if metric.share else f"{metric.name} after adaptation"
        lines.append(f"On {group} devices, {what}: {'; '.join(parts)}.")
    return lines


def _against(trial: Trial, other: Trial, *, seen: bool) -> str:
    gap = difference(trial.final(seen=seen), other.final(seen=seen), trial.metric)
    if gap is None or trial is other:
        return ""
    return trial.metric.gain_text(gap.mean, gap.twice_error)


def _costs(trials: Sequence[Trial]) -> str:
    rows = [
        [
            _e(t.algorithm), str(len(t.rounds)), f"{t.bytes_up / 1e6:,.1f}",
            f"{t.bytes_down / 1e6:,.1f}", f"{t.seconds:,.1f}",
            f"{t.seconds / max(1, len(t.rounds)):.3f}",
        ]
        for t in trials
    ]  # fmt: skip
    return _table(COSTS, rows)


def _facts_table(facts: Mapping[str, str]) -> str:
    rows = "".join(f"<tr><td>{_e(k)}</td><td>{_e(v)}</td></tr>" for k, v in facts.items())
    return f"<h2>How it was run</h2><table class='facts'>{rows}</table>" if facts else ""


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the table; cells are HTML already."""
    head = "".join(f"<th>{_e(h)}</th>" for h in heads)
    body = "".join(f"<tr>{''.join(f'<td>{c}</td>' for c in row)}</tr>" for row in rows)
    return f"<div class='wide'><table><tr>{head}</tr>{body}</table></div>"


def charts(trials: Sequence[Trial]) -> list[str]:
    """Return dots of devices, and lines over rounds of scores and loss with several points."""
    metric = _metric(trials)
    lines = [
        (
            {t.algorithm: _over_rounds(t, seen=seen) for t in trials},
            f"Adapted {metric.name} of {group} devices",
            OVER_ROUNDS[metric.share],
        )
        for seen, group, _ in GROUPS
    ]
    every = math.ceil(max(len(t.rounds) for t in trials) / MAX_POINTS)
    note = LOSS_NOTE if every == 1 else f"mean of {every} rounds, {LOSS_NOTE}"
    losses = {t.algorithm: _losses(t, every) for t in trials}
    drawings = _dots(trials)
    for series, title, y_label in (*lines, (losses, "Loss of local steps", note)):
        if drawn := {name: line for name, line in series.items() if len(line) > 1}:
            drawings.append(line_chart(drawn, title, "round", y_label))
    return drawings


def _losses(trial: Trial, every: int) -> list[tuple[float, float]]:
    """Return (round, loss), each the mean of `every` rounds; the last may have fewer."""
    known = [(r.number, r.loss) for r in trial.rounds if math.isfinite(r.loss)]
    parts = [known[at : at + every] for at in range(0, len(known), every)]
    return [(float(part[-1][0]), math.fsum(loss for _, loss in part) / len(part)) for part in parts]


def _dots(trials: Sequence[Trial]) -> list[str]:
    scored = _scored(trials)
    title = "Devices before and after adaptation"
    if len(scored) <= IN_ONE_PICTURE:
        return [picture(trials, title, decimals=1)] if scored else []
    return [
        picture(trials, f"{title}: {group}", decimals=1, groups=(seen,))
        for seen, group, _ in GROUPS
        if any(s is seen for _, s, _ in scored)
    ]


def picture(
    trials: Sequence[Trial],
    title: str,
    *,
    decimals: int = 0,
    groups: Sequence[bool] = (True, False),
) -> str:
    """Return dots before and after adaptation, a column per group and algorithm, as SVG.

    decimals: number of decimals of means in percent. groups: seen devices, unseen ones, or both.
    """
    ordered = sorted(_scored(trials), key=lambda pair: not pair[1])
    columns = [
        Column(t.algorithm, group, [(s.before, s.after) for s in t.final(seen=seen)])
        for t, seen, group in ordered
        if seen in groups
    ]
    metric = _metric(trials)
    y_label = OF_DEVICES[metric.share].format(metric=metric.name)
    if metric.share:
        return dot_chart(columns, title, y_label, decimals=decimals)
    return value_chart(columns, title, y_label)


def _scored(trials: Sequence[Trial]) -> list[tuple[Trial, bool, str]]:
    return [(t, seen, group) for t in trials for seen, group, _ in GROUPS if t.final(seen=seen)]


def _over_rounds(trial: Trial, *, seen: bool) -> list[tuple[float, float]]:
    summaries = {n: trial.summary(seen=seen, round_=n) for n in trial.scored_rounds()}
    scale = 100 if trial.metric.share else 1
    return [(float(n), scale * s.after) for n, s in summaries.items() if s is not None]


def _e(text: str) -> str:
    return escape(text, quote=True)
