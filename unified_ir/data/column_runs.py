"""Columns that are numbered, such as t0, t1, ... t63, as one line for people."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

LEAST: Final = 4
"""Shortest run that is worth a line of its own; fewer columns are as clear by themselves."""
SHOWN: Final = 8
_NUMBER: Final = re.compile(r"\d+\Z")


def column_runs(columns: Mapping[str, object]) -> list[tuple[str, ...]]:
    """Return the names in their order; neighbours with one stem and one value are one tuple.

    columns: name -> what is equal in a run, such as the field. A stem is the name without the
    digits at its end.
    """
    runs: list[list[str]] = []
    previous: tuple[str, object] | None = None
    for name, value in columns.items():
        stem = _NUMBER.sub("", name)
        key = None if stem == name else (stem, value)
        if key is None or key != previous:
            runs.append([])
        runs[-1].append(name)
        previous = key
    return [part for run in runs for part in _parts(run)]


def run_text(run: tuple[str, ...]) -> str:
    """Return "t0 ... t63" for a run, and its name for a column alone."""
    return run[0] if len(run) == 1 else f"{run[0]} ... {run[-1]}"


def names_text(columns: Iterable[str]) -> str:
    """Return the names of the columns that exist, for messages; at most `SHOWN` runs of them."""
    runs = [run_text(run) for run in column_runs(dict.fromkeys(columns))]
    return ", ".join(runs[:SHOWN]) + (", ..." if len(runs) > SHOWN else "")


def _parts(run: list[str]) -> list[tuple[str, ...]]:
    return [tuple(run)] if len(run) >= LEAST else [(name,) for name in run]
