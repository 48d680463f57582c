"""A study as one HTML page: tables, dots of devices, lines over rounds. It needs no other file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Final

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.study.draw import Column, dots, lines
from triplane.unified_ir.federated.study.trial import Trial, summary

GROUPS: Final = ((True, "training"), (False, "unseen"))
STYLE: Final = """
body { font: 15px/1.5 system-ui, Helvetica, Arial, sans-serif; color: #1f2933; max-width: 60em;
       margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; margin: 1em 0; }
th, td { text-align: right; padding: .25em .8em; border-bottom: 1px solid #e4e7eb; }
th:first-child, td:first-child { text-align: left; white-space: nowrap; }
th { color: #52606d; font-weight: 600; }
svg { max-width: 100%; height: auto; }
p { color: #52606d; }
"""
HEADS: Final = (
    "algorithm", "devices", "before", "adapted", "at rate", "worst tenth before",
    "worst tenth adapted", "MB up", "MB down", "seconds",
)  # fmt: skip
NOTE: Final = (
    "Accuracy in percent, the mean over devices, each device once, on samples that neither "
    "learning nor adaptation saw. Adapted: after the inner steps on the device's own support. "
    "Where several rates of adaptation were tried, the one with the best mean stands for the "
    "algorithm. The worst tenth is the mean of the lowest tenth of devices. Bytes are those of "
    "tensors."
)


def page(trials: Sequence[Trial], title: str, facts: Mapping[str, str] | None = None) -> str:
    """The page; facts: what a reader has to know of the study, by name."""
    if not trials:
        raise InvalidInput("a report is of at least one run")
    told = " · ".join(f"{_e(k)} <b>{_e(v)}</b>" for k, v in (facts or {}).items())
    body = [
        f"<h1>{_e(title)}</h1>",
        results(trials),
        f"<p>{_e(NOTE)}</p>",
        *charts(trials),
        f"<h2>How it was run</h2><p>{told}</p>" if told else "",
    ]
    head = f"<meta charset='utf-8'><title>{_e(title)}</title><style>{STYLE}</style>"
    return f"<!doctype html>\n<html lang='en'><head>{head}</head>\n<body>\n" + "\n".join(
        [part for part in body if part] + ["</body></html>\n"]
    )


def results(trials: Sequence[Trial]) -> str:
    """The table of accuracies, bytes and times, a row per algorithm and group of devices."""
    rows = [f"<tr>{''.join(f'<th>{_e(h)}</th>' for h in HEADS)}</tr>"]
    for trial, seen, group in _scored(trials):
        found = summary(trial.final(seen=seen))
        assert found is not None
        best = trial.best_rate(seen=seen)
        cells = [
            f"{trial.algorithm}, {group}", str(found.devices), _percent(found.before),
            _percent(found.after), "own" if best is None else f"{best[0]:g}",
            _percent(found.before_worst_tenth), _percent(found.after_worst_tenth),
            f"{trial.bytes_up / 1e6:,.1f}", f"{trial.bytes_down / 1e6:,.1f}",
            f"{trial.seconds:,.1f}",
        ]  # fmt: skip
        rows.append(f"<tr>{''.join(f'<td>{_e(c)}</td>' for c in cells)}</tr>")
    return f"<table>{''.join(rows)}</table>"


def charts(trials: Sequence[Trial]) -> list[str]:
    """Dots of devices; accuracy over rounds where there is more than one; the loss."""
    found = [picture(trials, "Devices before and after adaptation")] if _scored(trials) else []
    for seen, group in GROUPS:
        over = {t.algorithm: _over_rounds(t, seen=seen) for t in trials}
        drawn = {name: line for name, line in over.items() if len(line) > 1}
        if drawn:
            title = f"Adapted accuracy of {group} devices"
            found.append(lines(drawn, title, "mean over devices, %, at the run's own rate"))
    losses = {
        t.algorithm: [(float(r.number), r.loss) for r in t.rounds if math.isfinite(r.loss)]
        for t in trials
    }
    drawn = {name: line for name, line in losses.items() if len(line) > 1}
    if drawn:
        found.append(lines(drawn, "Loss of local steps", "mean over the round's samples"))
    return found


def picture(trials: Sequence[Trial], title: str) -> str:
    """Dots before and after adaptation, a column per group of devices and algorithm, as SVG."""
    ordered = sorted(_scored(trials), key=lambda found: not found[1])
    columns = [
        Column(t.algorithm, group, [(s.before, s.after) for s in t.final(seen=seen)])
        for t, seen, group in ordered
    ]
    return dots(columns, title)


def _scored(trials: Sequence[Trial]) -> list[tuple[Trial, bool, str]]:
    return [(t, seen, group) for t in trials for seen, group in GROUPS if t.final(seen=seen)]


def _over_rounds(trial: Trial, *, seen: bool) -> list[tuple[float, float]]:
    found = {n: trial.summary(seen=seen, round_=n) for n in trial.scored_rounds()}
    return [(float(n), 100 * s.after) for n, s in found.items() if s is not None]


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _e(text: str) -> str:
    return escape(text, quote=True)
