"""A study as one self-contained HTML page: tables, dots of devices, lines over rounds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Final

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.study.trial import Summary, Trial, difference, summary
from triplane.unified_ir.files.chart import Column, dot_chart, line_chart

GROUPS: Final = (
    (True, "training", "Devices that learned"),
    (False, "unseen", "Devices that never took part"),
)
LEAST_COMPARED: Final = 2
MAX_POINTS: Final = 60
"""Limit for the points of a line of losses; with more rounds, means of several are drawn."""
OF_DEVICES: Final = "accuracy on a device's own held-out samples, %"
OVER_ROUNDS: Final = "mean over devices, %, at the run's own rate"
IN_ONE_PICTURE: Final = 6
"""Limit for the columns of dots in one picture; with more, each group of devices has its own."""
STYLE: Final = files(__package__).joinpath("report.css").read_text("utf-8")
HEADS: Final = (
    "algorithm", "before", "adapted", "against {first}", "at rate", "worst tenth before",
    "worst tenth adapted",
)  # fmt: skip
COSTS: Final = ("algorithm", "rounds", "MB up", "MB down", "seconds", "seconds a round")
NOTE: Final = (
    "Accuracy in percent, the mean over devices, each device once, on samples that neither "
    "learning nor adaptation saw. Adapted: after the inner steps on the device's own support. "
    "Where several rates of adaptation were tried, the one with the best mean stands for the "
    "algorithm. The worst tenth is the mean of the lowest tenth of devices. Against: the mean "
    "difference after adaptation, paired by device, with two standard errors; one within them may "
    "come from which devices there are, and one run says nothing about other seeds."
)
COST_NOTE: Final = (
    "Bytes are those of tensors, of all devices and rounds. Seconds are of learning and reducing "
    "in this process, one device after another, without scoring."
)
LOSS_NOTE: Final = "of a batch; for maml, fomaml, meta-sgd of the query after the inner steps"


def page(trials: Sequence[Trial], title: str, facts: Mapping[str, str] | None = None) -> str:
    """Return the page. facts: what a reader has to know of the study, by name."""
    if not trials:
        raise InvalidInput("a report needs at least one run")
    body = [
        f"<h1>{_e(title)}</h1>",
        *(f"<p class='said'>{_e(line)}</p>" for line in verdicts(trials)),
        *(results(trials, seen=seen, heading=heading) for seen, _, heading in GROUPS),
        f"<p>{_e(NOTE)}</p>",
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


def results(trials: Sequence[Trial], *, seen: bool, heading: str) -> str:
    """Return the table of accuracies of one group of devices, the best in bold; empty for none."""
    pairs = ((t, summary(t.final(seen=seen))) for t in trials)
    scored = [(t, s) for t, s in pairs if s is not None]
    if not scored:
        return ""
    tops = [max(column) for column in zip(*(_numbers(s) for _, s in scored), strict=True)]
    rows = []
    for trial, s in scored:
        best = trial.best_rate(seen=seen)
        texts = [(_percent(x), _percent(top)) for x, top in zip(_numbers(s), tops, strict=True)]
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
        means = {name: s.after for name in scored if (s := summary(scored[name])) is not None}
        best = max(means, key=lambda name: means[name])
        near: list[str] = []
        behind: list[str] = []
        for name in sorted(scored.keys() - {best}, key=lambda name: -means[name]):
            gap = difference(scored[best], scored[name])
            # Paired by device, which removes the large differences between devices from the error.
            others = behind if gap is not None and gap.shown else near
            others.append(f"{name} {_percent(means[name])}")
        parts = [f"{best} {_percent(means[best])}"]
        parts += [f"not significantly different: {', '.join(near)}"] if near else []
        parts += [f"behind: {', '.join(behind)}"] if behind else []
        lines.append(f"On {group} devices, after adaptation: {'; '.join(parts)}.")
    return lines


def _against(trial: Trial, other: Trial, *, seen: bool) -> str:
    gap = difference(trial.final(seen=seen), other.final(seen=seen))
    if gap is None or trial is other:
        return ""
    return f"{100 * gap.mean:+.2f} ± {100 * gap.twice_error:.2f}"


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
    """Return dots of devices, and lines over rounds of accuracy and loss with several points."""
    lines = [
        (
            {t.algorithm: _over_rounds(t, seen=seen) for t in trials},
            f"Adapted accuracy of {group} devices",
            OVER_ROUNDS,
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

    decimals: number of decimals of the means. groups: seen devices, unseen ones, or both.
    """
    ordered = sorted(_scored(trials), key=lambda pair: not pair[1])
    columns = [
        Column(t.algorithm, group, [(s.before, s.after) for s in t.final(seen=seen)])
        for t, seen, group in ordered
        if seen in groups
    ]
    return dot_chart(columns, title, OF_DEVICES, decimals=decimals)


def _scored(trials: Sequence[Trial]) -> list[tuple[Trial, bool, str]]:
    return [(t, seen, group) for t in trials for seen, group, _ in GROUPS if t.final(seen=seen)]


def _over_rounds(trial: Trial, *, seen: bool) -> list[tuple[float, float]]:
    summaries = {n: trial.summary(seen=seen, round_=n) for n in trial.scored_rounds()}
    return [(float(n), 100 * s.after) for n, s in summaries.items() if s is not None]


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _e(text: str) -> str:
    return escape(text, quote=True)
