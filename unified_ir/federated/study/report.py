"""A study as one self-contained HTML page: tables, curves over rounds, dots of devices, its data.

The page loads nothing: its content security policy allows one style sheet and one script, both by
their digests, and every text from outside is escaped.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Final

from triplane.unified_ir.federated.core.metric import Metric
from triplane.unified_ir.federated.study.export import curve, rounds_csv, scores_csv, trial_record
from triplane.unified_ir.federated.study.figures import (
    DotPanel,
    Format,
    LinePoint,
    PanelDot,
    dot_panels,
    line_figure,
    vertical,
)
from triplane.unified_ir.federated.study.seeds import (
    Completion,
    Replicates,
    SeedSpread,
    Stopped,
    adaptation_gain,
    by_algorithm,
    common_seeds,
    compared,
    completion,
    final_spread,
    final_summaries,
    metric_of_trials,
    start_spread,
)
from triplane.unified_ir.federated.study.trial import (
    DeviceScore,
    Difference,
    Summary,
    Trial,
    mean_of,
)
from triplane.unified_ir.federated.study.verdicts import GROUPS, verdicts, warnings
from triplane.unified_ir.files.chart import Column, dot_chart, number_text, value_chart
from triplane.unified_ir.files.content_policy import content_policy
from triplane.unified_ir.files.html_table import printable

MAX_POINTS: Final = 60
"""Limit for the points of a line of losses; with more rounds, means of several are drawn."""
MAX_LISTED: Final = 200
"""Limit for the devices that the page lists by name; the files list all."""
MAX_FILE_BYTES: Final = 16 << 20
"""Limit for one file within the page."""
OF_DEVICES: Final = {
    True: "{metric} on a device's own held-out samples, %",
    False: "{metric} on a device's own held-out samples; lower is better",
}
"""The axis of dots, by whether the metric is a share in percent."""
OVER_ROUNDS: Final = {
    True: "mean over devices, %, at the run's own rate",
    False: "mean over devices, at the run's own rate; lower is better",
}
RESOURCES: Final = files(__package__)
STYLE: Final = RESOURCES.joinpath("report.css").read_text("utf-8")
SCRIPT: Final = RESOURCES.joinpath("report.js").read_text("utf-8")
HEADS: Final = (
    "algorithm", "start", "before", "adapted", "gain of adaptation", "against {first}", "at rate",
    "worst tenth before", "worst tenth adapted",
)  # fmt: skip
VALUES: Final[tuple[Callable[[Summary], float], ...]] = (
    lambda s: s.before, lambda s: s.after, lambda s: s.before_worst_tenth,
    lambda s: s.after_worst_tenth,
)  # fmt: skip
COSTS: Final = ("algorithm", "rounds", "MB up", "MB down", "seconds", "seconds a round")
NOTE: Final = (
    "{metric}, the mean over devices, each device once, on samples that neither "
    "learning nor adaptation saw. Start: the model that the runs began with. Before: the shared "
    "model at the end. Adapted: after the inner steps on the device's own support. "
    "Where several rates of adaptation were tried, the one with the best mean stands for the "
    "algorithm. The worst tenth is the mean of the {worst} tenth of devices. Against: the mean "
    "{difference} after adaptation. A difference has half of its 95 % confidence interval behind "
    "it (Student's t), and one within it is not significant: {pairs}"
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
PAIRS: Final = {
    False: "it may come from which devices there are. Pairs are devices of one seed, which says "
    "nothing about other seeds.",
    True: "it may come from the seeds. Pairs are seeds, each with the mean over its devices. Other "
    "values have their standard deviation over seeds behind them.",
}
"""The end of `NOTE`, by whether there are several seeds."""
COST_NOTE: Final = (
    "Bytes are those of tensors, of all devices and rounds. Seconds are of "
    "learning and reducing in this process, without scoring."
)
PRIVACY_NOTE: Final = (
    "Epsilon bounds what all published states together tell about one device, against a device "
    "without samples, for the device that was used most often. Losses and scores are not covered. "
    "The noise is drawn anew in each study, so another one with the same seed has other numbers."
)
LARGE_NOTE: Final = (
    "Not within this page, because larger than {1} MiB: {0}. The options out-csv and out-json "
    "write the scores and everything as files."
)
ENDS_NOTE: Final = (
    "Devices were scored at the start and at the end only; evaluate-every adds rounds in between."
)
LOSS_NOTE: Final = "of a batch; for algorithms of episodes, of the query after the inner steps"


def page(
    trials: Sequence[Trial],
    title: str,
    facts: Mapping[str, str] | None = None,
    *,
    stopped: Stopped | None = None,
) -> str:
    """Return the page. facts: what a reader has to know of the study, by name.

    stopped: the seeds in which an algorithm stopped, by its name.
    """
    metric, groups = metric_of_trials(trials), by_algorithm(trials)
    done = completion(trials, stopped)
    several = any(len(replicates) > 1 for replicates in groups.values())
    note = NOTE.format(**NOTE_WORDS[metric.share], pairs=PAIRS[several])
    body = [
        f"<h1>{_e(title)}</h1>",
        *(f"<p class='warning' role='alert'>{_e(line)}</p>" for line in warnings(trials, stopped)),
        *(f"<p class='said'>{_e(line)}</p>" for line in verdicts(trials, stopped)),
        _data(trials),
        *(results(trials, done, seen=seen, heading=heading) for seen, _, heading in GROUPS),
        f"<details><summary>How to read these tables</summary><p>{_e(note)}</p></details>",
        "<h2>Over rounds</h2>",
        "" if any(len(t.scored_rounds()) > 1 for t in trials) else f"<p>{ENDS_NOTE}</p>",
        f"<div class='charts'>{''.join(charts(trials))}</div>",
        "<h2>Devices</h2>",
        _dots(trials),
        _listed(trials),
        "<h2>What it cost</h2>",
        _table(
            COSTS, [_cost_row(done.label(name), replicates) for name, replicates in groups.items()]
        ),
        f"<p>{COST_NOTE}{' Means over seeds.' if several else ''}</p>",
        _privacy(trials),
        _facts_table(facts or {}),
    ]
    return _document(title, body)


def _privacy(trials: Sequence[Trial]) -> str:
    """Return what the trials spent, and why one has fewer rounds; empty without noise."""
    texts = {
        t.algorithm: "; ".join(filter(None, (t.privacy.text, t.ended)))
        for t in trials
        if t.privacy is not None
    }
    lines = "".join(f"<li>{_e(f'{name}: {text}')}</li>" for name, text in texts.items())
    return f"<h2>Privacy</h2><ul>{lines}</ul><p>{PRIVACY_NOTE}</p>" if texts else ""


def _document(title: str, body: Sequence[str]) -> str:
    style, script = f"<style>{STYLE}</style>", f"<script>{SCRIPT}</script>"
    head = (
        "<meta charset='utf-8'>"
        f'<meta http-equiv="Content-Security-Policy" content="{content_policy(style + script)}">'
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{_e(title)}</title>{style}"
    )
    parts = [part for part in body if part]
    return f"<!doctype html>\n<html lang='en'><head>{head}</head>\n<body>\n" + "\n".join(
        [*parts, f"{script}</body></html>\n"]
    )


def _data(trials: Sequence[Trial]) -> str:
    """Return links that save the study's data, which is within the page."""
    record = {"trials": [trial_record(trial) for trial in trials]}
    contents = (
        ("scores.csv", "Scores of devices", "text/csv", scores_csv(trials).encode()),
        ("rounds.csv", "Rounds", "text/csv", rounds_csv(trials).encode()),
        ("study.json", "Everything", "application/json", json.dumps(record).encode()),
    )
    links = "".join(
        f"<a download='{name}' href='data:{kind};base64,{base64.b64encode(data).decode()}'>"
        f"{label} ({name.rpartition('.')[2].upper()})</a>"
        for name, label, kind, data in contents
        if len(data) <= MAX_FILE_BYTES
    )
    large = ", ".join(name for name, *_, data in contents if len(data) > MAX_FILE_BYTES)
    note = f"<p>{LARGE_NOTE.format(large, MAX_FILE_BYTES >> 20)}</p>" if large else ""
    return f"<nav class='files' aria-label='Data'>{links}</nav>{note}"


def results(trials: Sequence[Trial], done: Completion, *, seen: bool, heading: str) -> str:
    """Return the table of scores of one group of devices; empty for none.

    The best in bold is among the algorithms that finished all seeds.
    """
    groups = {n: r for n, r in by_algorithm(trials).items() if final_summaries(r, seen=seen)}
    if not groups:
        return ""
    metric, first = metric_of_trials(trials), trials[0].algorithm
    firsts = by_algorithm(trials)[first]
    spreads = {
        n: [s for value in VALUES if (s := final_spread(r, value, seen=seen)) is not None]
        for n, r in groups.items()
    }
    ranked = [spreads[n] for n in groups if done.whole(n)]
    tops = [max((s.mean for s in c), key=metric.merit) for c in zip(*ranked, strict=True)]
    rows = []
    for name, replicates in groups.items():
        bests = tops if done.whole(name) else [math.nan] * len(VALUES)  # equal to no score
        pairs = zip(spreads[name], bests, strict=True)
        before, adapted, *worst = (_cell(s, top, metric) for s, top in pairs)
        start = start_spread(replicates, trials, seen=seen)
        gain = _gain(adaptation_gain(replicates, seen=seen), metric)
        gap = None if name == first else compared(replicates, firsts, seen=seen)
        rows.append(
            [_e(done.label(name)), "" if start is None else start.text(metric), before, adapted,
             gain, _gain(gap, metric), _rates(replicates, seen=seen), *worst]
        )  # fmt: skip
    count = max(s.devices for r in groups.values() for s in final_summaries(r, seen=seen))
    heads = [head.format(first=first) for head in HEADS]
    return f"<h2>{_e(heading)}: {count}</h2>{_table(heads, rows)}"


def _cell(value: SeedSpread, best: float, metric: Metric) -> str:
    text = value.text(metric)
    return f"<b>{text}</b>" if metric.text(value.mean) == metric.text(best) else text


def _rates(replicates: Replicates, *, seen: bool) -> str:
    rates = [b[0] for trial in replicates if (b := trial.best_rate(seen=seen)) is not None]
    return ", ".join(f"{rate:g}" for rate in dict.fromkeys(rates)) or "own"


def _gain(gap: Difference | None, metric: Metric) -> str:
    return "" if gap is None else metric.gain_text(gap.mean, gap.margin)


def _cost_row(name: str, replicates: Replicates) -> list[str]:
    rounds = mean_of([len(t.rounds) for t in replicates])
    seconds = mean_of([t.seconds for t in replicates])
    up, down = (
        mean_of(sizes) / 1e6
        for sizes in ([t.bytes_up for t in replicates], [t.bytes_down for t in replicates])
    )
    return [
        _e(name), f"{rounds:g}", f"{up:,.1f}", f"{down:,.1f}", f"{seconds:,.1f}",
        f"{seconds / max(1, rounds):.3f}",
    ]  # fmt: skip


def _facts_table(facts: Mapping[str, str]) -> str:
    rows = "".join(f"<tr><td>{_e(k)}</td><td>{_e(v)}</td></tr>" for k, v in facts.items())
    table = f"<div class='wide'><table class='facts'>{rows}</table></div>"
    return f"<h2>How it was run</h2>{table}" if facts else ""


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the table; cells are HTML already. Each cell names its column, for narrow screens."""
    head = "".join(f"<th>{_e(h)}</th>" for h in heads)
    body = "".join(
        "<tr>"
        + "".join(
            f"<td data-label='{_e(h)}'>{cell}</td>" for h, cell in zip(heads, row, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def charts(trials: Sequence[Trial]) -> list[str]:
    """Return lines over rounds of scores, before and after adaptation, and of losses.

    All lines are of the same seeds, those that all algorithms finished, unless there are none.
    """
    trials, only = _comparable(trials)
    metric, groups = metric_of_trials(trials), by_algorithm(trials)
    every = math.ceil(max(1, *(len(t.rounds) for t in trials)) / MAX_POINTS)
    loss_note = LOSS_NOTE if every == 1 else f"mean of {every} rounds, {LOSS_NOTE}"
    losses = {n: _merged([_losses(t, every) for t in r]) for n, r in groups.items()}
    text = _percent if metric.share else number_text
    figures = []
    for seen, group, _ in GROUPS:
        pair = {
            f"{what} {metric.name} of {group} devices": {
                n: _merged([_scores_line(t, side, seen=seen) for t in r]) for n, r in groups.items()
            }
            for side, what in ((1, "Unadapted"), (2, "Adapted"))
        }
        figures += _line_figures(pair, f"{OVER_ROUNDS[metric.share]}{only}", text)
    return figures + _line_figures(
        {"Loss of local steps": losses}, f"{loss_note}{only}", number_text
    )


def _comparable(trials: Sequence[Trial]) -> tuple[Sequence[Trial], str]:
    """Return the trials of the seeds that all algorithms finished, and a note if that omits any."""
    seeds = common_seeds(trials)
    if not seeds or seeds == {trial.seed for trial in trials}:
        return trials, ""
    names = f"seed{'s' if len(seeds) > 1 else ''} {' and '.join(map(str, sorted(seeds)))}"
    shown = [trial for trial in trials if trial.seed in seeds]
    return shown, f"; only {names}, which all algorithms finished"


def _line_figures(
    figures: Mapping[str, Mapping[str, Sequence[LinePoint]]], note: str, text: Format
) -> list[str]:
    """Return charts by title, all with the same vertical axis; those of single points are left out.

    A single axis, so that charts beside each other can be compared.
    """
    drawn = {k: lines for k, lines in figures.items() if any(len(x) > 1 for x in lines.values())}
    points = [p for lines in drawn.values() for line in lines.values() for p in line]
    if not points:
        return []
    y = vertical([v for p in points for v in (p.least, p.most)], text)
    return [line_figure(lines, y, title, note, text) for title, lines in drawn.items()]


def _scores_line(trial: Trial, side: int, *, seen: bool) -> list[tuple[float, float]]:
    scale = 100 if trial.metric.share else 1
    return [(point[0], scale * point[side]) for point in curve(trial, seen=seen)]


def _losses(trial: Trial, every: int) -> list[tuple[float, float]]:
    """Return (round, loss), each the mean of `every` rounds; the last may have fewer."""
    known = [(r.number, r.loss) for r in trial.rounds if math.isfinite(r.loss)]
    parts = [known[at : at + every] for at in range(0, len(known), every)]
    return [(float(part[-1][0]), mean_of([loss for _, loss in part])) for part in parts]


def _merged(lines: Sequence[Sequence[tuple[float, float]]]) -> list[LinePoint]:
    """Return the mean and range over seeds at every place that a line of a seed has."""
    places: dict[float, list[float]] = {}
    for line in lines:
        for x, y in line:
            places.setdefault(x, []).append(y)
    return [LinePoint(x, mean_of(ys), min(ys), max(ys)) for x, ys in sorted(places.items())]


def _dots(trials: Sequence[Trial]) -> str:
    metric = metric_of_trials(trials)
    names = {s.device for t in trials for seen, _, _ in GROUPS for s in t.final(seen=seen)}
    keys = {name: k for k, name in enumerate(sorted(names))}
    rows = [row for seen, group, _ in GROUPS if (row := _panels(trials, keys, group, seen=seen))]
    if not rows:
        return ""
    note = OF_DEVICES[metric.share].format(metric=metric.name)
    text = _percent if metric.share else number_text
    note = f"{note}. A line is a device{_each(trials)}; bars are means."
    return dot_panels(rows, "Before and after adaptation", note, text)


def _panels(
    trials: Sequence[Trial], keys: Mapping[str, int], group: str, *, seen: bool
) -> list[DotPanel]:
    panels, done = [], completion(trials)
    for i, (name, replicates) in enumerate(by_algorithm(trials).items()):
        several = len(replicates) > 1
        scored = [(score, trial) for trial in replicates for score in trial.final(seen=seen)]
        dots = [_dot(score, trial, keys, several=several) for score, trial in scored]
        if dots:
            panels.append(DotPanel(done.label(name), group, i, dots))
    return panels


def _each(trials: Sequence[Trial]) -> str:
    return " with one seed" if len({trial.seed for trial in trials}) > 1 else ""


def _dot(score: DeviceScore, trial: Trial, keys: Mapping[str, int], *, several: bool) -> PanelDot:
    metric, seed = trial.metric, f", seed {trial.seed}" if several else ""
    scale = 100 if metric.share else 1
    title = (
        f"{score.device}{seed}: {metric.text(score.before)} before, {metric.text(score.after)} "
        f"adapted ({score.samples} samples)"
    )
    return PanelDot(scale * score.before, scale * score.after, keys[score.device], title)


def _percent(value: float) -> str:
    return f"{value:.0f}" if value == int(value) else f"{value:.1f}"


def _listed(trials: Sequence[Trial]) -> str:
    """Return the table of devices by name, folded; with several seeds, of their means."""
    metric, groups = metric_of_trials(trials), by_algorithm(trials)
    scores: dict[tuple[str, bool], dict[str, list[DeviceScore]]] = {}
    for trial in trials:
        for seen, _, _ in GROUPS:
            for s in trial.final(seen=seen):
                scores.setdefault((s.device, not seen), {}).setdefault(trial.algorithm, []).append(
                    s
                )
    shown = sorted(scores)[:MAX_LISTED]
    rows = [
        [_e(device), "unseen" if unseen else "training"]
        + [_pair(scores[device, unseen].get(name, []), metric) for name in groups]
        for device, unseen in shown
    ]
    heads = ("device", "group", *groups)
    more = (
        f", {len(shown)} of {len(scores)}; the files list all" if len(shown) < len(scores) else ""
    )
    means = "; means over seeds" if _each(trials) else ""
    summary_text = f"Devices by name: before → adapted{means}{more}"
    return f"<details><summary>{summary_text}</summary>{_table(heads, rows)}</details>"


def _pair(scores: Sequence[DeviceScore], metric: Metric) -> str:
    if not scores:
        return ""
    before, after = mean_of([s.before for s in scores]), mean_of([s.after for s in scores])
    return f"{metric.text(before)} → {metric.text(after)}"


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
    columns = [
        Column(t.algorithm, group, [(s.before, s.after) for s in scores])
        for seen, group, _ in GROUPS
        if seen in groups
        for t in trials
        if (scores := t.final(seen=seen))
    ]
    metric = metric_of_trials(trials)
    y_label = OF_DEVICES[metric.share].format(metric=metric.name)
    if metric.share:
        return dot_chart(columns, title, y_label, decimals=decimals)
    return value_chart(columns, title, y_label)


def _e(text: str) -> str:
    return escape(printable(text), quote=True)
