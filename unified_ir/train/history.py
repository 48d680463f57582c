"""The position of a run, and the results of its epochs."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from shutil import get_terminal_size
from typing import Final

import numpy as np

from triplane.proto.errors import InvalidInput, NotFound
from triplane.unified_ir.files.chart import Chart, line_chart, stack
from triplane.unified_ir.files.html_table import html_table, printable
from triplane.unified_ir.files.text_table import aligned
from triplane.unified_ir.ir.graph import Array
from triplane.unified_ir.train.metrics import Tally

Row = dict[str, float]
SHOWN_ROWS: Final = 10
SHOWN_COLUMNS: Final = 8
LEAST_COLUMNS: Final = 3
"""Columns that are shown however narrow the terminal: epoch, step and a measure."""
COUNTS: Final = ("epoch", "step")
"""Columns that number the rows."""
PLOTTED: Final = 4
"""Number of measures that `History.plot` draws by itself."""
VALIDATION: Final = "validation."
"""Prefix of the measures of held-out data."""
NOTHING_COUNTED: Final = (
    "no label of {where} counts in the mean of {names}: each is ignored or has weight 0; give data "
    "with labels that count, or another ignore_index= or weight="
)


@dataclass
class Place:
    """The position of a run: the next batch is `position` of epoch `epoch`, both from 0.

    step: batches trained on so far. rows: samples seen in this epoch; sums: each result summed over
    them; counts: the summed counts of each tally, float64. counted: the divisor of a mean so far,
    if it is not the number of samples.
    """

    epoch: int = 0
    position: int = 0
    step: int = 0
    rows: int = 0
    sums: Row = field(default_factory=dict)
    counts: dict[str, Array] = field(default_factory=dict)
    counted: Row = field(default_factory=dict)

    def copy(self) -> Place:
        """Return an independent copy."""
        return deepcopy(self)

    def advance(
        self,
        results: Mapping[str, float],
        rows: int,
        counts: Mapping[str, Array],
        counted: Mapping[str, float],
    ) -> None:
        """Add one batch of `rows` samples; `results` are means over it, or over `counted`."""
        self.position += 1
        self.step += 1
        self.rows += rows
        for name, value in results.items():
            # Back from the mean to the sum, so that batches of different sizes can be added. With a
            # divisor of 0 the value is the sum itself, see `Loss.counted`.
            self.sums[name] = self.sums.get(name, 0.0) + value * (counted.get(name, rows) or 1.0)
        for name, own in counted.items():
            self.counted[name] = self.counted.get(name, 0.0) + own
        for name, x in counts.items():
            self.counts[name] = self.counts.get(name, 0.0) + x.astype(np.float64)

    def means(self) -> Row:
        """Return means over this epoch's samples so far, for results in which any sample counts."""
        divisors = {name: self.counted.get(name, self.rows) for name in self.sums}
        return {name: self.sums[name] / n for name, n in divisors.items() if n}

    def uncounted(self) -> str:
        """Return the names of results in which no sample counts, separated by commas."""
        return ", ".join(sorted(name for name, own in self.counted.items() if not own))

    def measures(self, tallies: Mapping[str, Tally]) -> Row:
        """Return means and tallies; InvalidInput if no sample counts in one of them."""
        if names := self.uncounted():
            raise InvalidInput(NOTHING_COUNTED.format(names=names, where="this data"))
        metrics = {k: t.finish(self.counts[k]) for k, t in tallies.items() if k in self.counts}
        return self.means() | metrics

    def next_epoch(self) -> None:
        """Start the next epoch."""
        self.epoch += 1
        self.position = self.rows = 0
        self.sums, self.counts, self.counted = {}, {}, {}


def split(results: Mapping[str, Array]) -> tuple[Row, dict[str, Array]]:
    """Return results with one element as numbers, and the others as they are."""
    numbers = {name: float(x.item()) for name, x in results.items() if x.size == 1}
    return numbers, {name: x for name, x in results.items() if name not in numbers}


def _cell(row: Row, name: str) -> str:
    if name not in row:
        return ""
    return f"{row[name]:.0f}" if name in COUNTS else f"{row[name]:.4g}"


class History:
    """One row per epoch, from 1.

    Columns: `epoch`, `step`, the means of the training results over the epoch, and
    `validation.NAME` for each measure on held-out data.
    """

    def __init__(self, rows: list[Row] | None = None) -> None:
        self.rows: list[Row] = list(rows or [])

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        """Return the newest rows as a table, with as many columns as the terminal has room for."""
        names = self.columns()[:SHOWN_COLUMNS]
        lines = self._lines(names)
        while len(names) > LEAST_COLUMNS and len(lines[0]) > get_terminal_size().columns:
            lines = self._lines(names := names[:-1])
        more = len(self.columns()) - len(names)
        count = f"history of {len(self.rows)} epochs"
        return "\n".join([f"{count}, {more} more columns" if more else count, *lines])

    def _lines(self, names: Sequence[str]) -> list[str]:
        rows = [[_cell(row, name) for name in names] for row in self.rows[-SHOWN_ROWS:]]
        return aligned([list(map(printable, names)), *rows], texts=0) if names else []

    def _repr_html_(self) -> str:
        names = self.columns()
        newest = self.rows[-SHOWN_ROWS:]
        cells = ([_cell(row, name) for name in names] for row in newest)
        title = f"history of {len(self)} epochs"
        if len(newest) < len(self):
            title += f", the newest {len(newest)}"
        return html_table(title, names, cells, count=len(newest))

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __getitem__(self, name: str) -> list[float]:
        """Return the column `name`, one value per epoch that has it."""
        values = [row[name] for row in self.rows if name in row]
        if not values:
            raise NotFound(f"no epoch has {name!r}; there are {', '.join(self.columns())}")
        return values

    @property
    def last(self) -> Row:
        """Return the newest row."""
        if not self.rows:
            raise NotFound("no epoch is finished yet")
        return dict(self.rows[-1])

    def columns(self) -> list[str]:
        """Return the column names in order of appearance."""
        return list(dict.fromkeys(name for row in self.rows for name in row))

    def table(self) -> dict[str, list[float]]:
        """Return the columns by name, each as long as the history; NaN where an epoch has none.

        This is the form that `pandas.DataFrame` takes.
        """
        names = self.columns()
        return {name: [row.get(name, math.nan) for row in self.rows] for name in names}

    def plot(self, *measures: str) -> Chart:
        """Draw measures over epochs, of training and held-out data; by default the first four.

        Notebooks show the chart, and `.save("loss.svg")` writes it. Values that are not finite
        are left out. NotFound: no epoch has such a measure.
        """
        known = self._curves()
        names = [name.removeprefix(VALIDATION) for name in measures] or list(known)[:PLOTTED]
        if missing := [name for name in names if name not in known]:
            raise NotFound(
                f"no epoch has a finite measure {missing[0]!r}; there are: "
                f"{', '.join(known) or 'none'}; plot(...).save(FILE) writes the chart"
            )
        if not names:
            raise NotFound("no epoch with a finite measure is finished yet")
        drawn = [line_chart(known[name], name, "epoch", "") for name in names]
        return Chart(drawn[0] if len(drawn) == 1 else stack(drawn, f"{len(self)} epochs"))

    def _curves(self) -> dict[str, dict[str, list[tuple[float, float]]]]:
        """Return the finite points of training and validation by measure, then by line."""
        curves: dict[str, dict[str, list[tuple[float, float]]]] = {}
        for column in self.columns():
            measure = column.removeprefix(VALIDATION)
            line = "training" if measure == column else "validation"
            points = [
                (r["epoch"], r[column]) for r in self.rows if math.isfinite(r.get(column, math.nan))
            ]
            if points and column not in COUNTS:
                curves.setdefault(measure, {})[line] = points
        return curves

    def csv(self) -> str:
        """Return the rows as comma-separated values with a header."""
        out = io.StringIO()
        writer = csv.DictWriter(out, self.columns(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        return out.getvalue()

    def json(self) -> str:
        """Return the rows as a JSON list."""
        return json.dumps(self.rows, indent=1) + "\n"
