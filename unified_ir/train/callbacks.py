"""Callbacks: code that runs at given moments of a training run, and the common cases."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final, Literal

from triplane.proto.disk import write_atomic
from triplane.proto.errors import InvalidInput
from triplane.proto.suggestions import check_choice
from triplane.unified_ir.train.history import Row
from triplane.unified_ir.train.run import Run

SHARES: Final = ("accuracy", "f1", "precision", "recall", "top5")
"""Measures for which a larger value is better."""


class Callback:
    """Called at given moments of a run; subclass it and override the methods you need.

    An exception from a callback ends the run; the cell then holds the state up to that point.
    """

    def on_start(self, run: Run) -> None:
        """Run before the first step, after a checkpoint was loaded."""

    def on_step(self, run: Run) -> None:
        """Run after each update; `run.results` are its results."""

    def on_epoch(self, run: Run) -> None:
        """Run after each epoch; `run.history.last` is its row."""

    def on_end(self, run: Run) -> None:
        """Run after the last epoch or an early stop, but not after an error."""


class Record(Callback):
    """Keeps the results of every step in `steps`."""

    def __init__(self) -> None:
        self.steps: list[Row] = []

    def on_step(self, run: Run) -> None:
        """See `Callback`."""
        self.steps.append(dict(run.results))


class EarlyStop(Callback):
    """Stops when `measure` has not improved for `patience` epochs.

    better: "smaller" or "larger"; by default larger for accuracies and other shares, see `SHARES`.
    It depends on the history alone, so a resumed run stops where an uninterrupted one would.
    """

    def __init__(
        self,
        measure: str = "validation.loss",
        *,
        patience: int = 3,
        min_change: float = 0.0,
        better: Literal["smaller", "larger"] | None = None,
    ) -> None:
        if patience < 1 or min_change < 0:
            raise InvalidInput(
                f"EarlyStop needs patience >= 1 and min_change >= 0, got {patience}, {min_change}"
            )
        if better is not None:
            check_choice("EarlyStop's better", better, ("smaller", "larger"))
        self.measure, self.patience, self.min_change = measure, patience, min_change
        share = measure.rpartition(".")[2] in SHARES
        self.sign = -1.0 if (better or ("larger" if share else "smaller")) == "larger" else 1.0

    def on_start(self, run: Run) -> None:
        """See `Callback`."""
        # A run that had already stopped early must not train another epoch when it is resumed.
        if len(run.history):
            self.on_epoch(run)

    def on_epoch(self, run: Run) -> None:
        """See `Callback`."""
        # Recomputed from the whole history at each epoch, so that no state has to be saved in
        # checkpoints.
        best, since = math.inf, 0
        for value in run.history[self.measure]:
            better = self.sign * value < best - self.min_change
            best, since = (self.sign * value, 0) if better else (best, since + 1)
        if since >= self.patience:
            run.stop()


class HistoryFile(Callback):
    """Writes the history to a file, atomically: CSV or JSON, by its suffix."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if self.path.suffix not in _FORMATS:
            raise InvalidInput(
                f"a history file ends in {' or '.join(_FORMATS)}, got {self.path.name}"
            )

    def on_epoch(self, run: Run) -> None:
        """See `Callback`."""
        write_atomic(self.path, _FORMATS[self.path.suffix](run.history).encode())


_FORMATS: Final = {".csv": lambda h: h.csv(), ".json": lambda h: h.json()}
