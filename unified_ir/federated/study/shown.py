"""A trial as a prompt and a notebook show it: its scores on one screen, never its state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from triplane.unified_ir.files.html_table import html_table

if TYPE_CHECKING:
    from triplane.unified_ir.federated.study.trial import Trial

HEADS: Final = ("devices", "number", "before", "adapted", "worst tenth before", "adapted")


def trial_text(trial: Trial) -> str:
    """Return the title, and a line for each group of devices."""
    lines = (
        f"  {number} {name} devices: {before} before, {after} adapted"
        for name, number, before, after, *_ in _rows(trial)
    )
    return "\n".join([_title(trial), *lines])


def trial_html(trial: Trial) -> str:
    """Return the title, and a table of the groups of devices."""
    rows = list(_rows(trial))
    unit = "%" if trial.metric.share else "lower is better"
    notes = [f"Mean {trial.metric.name} of devices ({unit}), at the run's own rate."]
    return html_table(_title(trial), HEADS, rows, count=len(rows), notes=notes if rows else [])


def _title(trial: Trial) -> str:
    moved = f"{trial.bytes_up / 1e6:,.1f} MB up, {trial.bytes_down / 1e6:,.1f} MB down"
    return f"{trial.algorithm}: {len(trial.rounds)} rounds, {moved}, {trial.seconds:,.1f} s"


def _rows(trial: Trial) -> Iterator[tuple[str, ...]]:
    for seen, name in ((True, "training"), (False, "unseen")):
        s = trial.summary(seen=seen)
        if s is not None:
            scores = (s.before, s.after, s.before_worst_tenth, s.after_worst_tenth)
            yield name, str(s.devices), *(trial.metric.text(x) for x in scores)
