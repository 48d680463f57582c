"""Progress on standard error: a bar on a terminal, else a line per epoch."""

from __future__ import annotations

import sys
from typing import Any, Literal, TextIO

from triplane.unified_ir.train.callbacks import Callback
from triplane.unified_ir.train.history import Row
from triplane.unified_ir.train.run import Run

Style = Literal["auto", "bar", "lines", "none"]


class Progress(Callback):
    """Shows a run. "auto" is a bar on a terminal, and lines otherwise."""

    def __init__(self, style: Style = "auto", *, stream: TextIO | None = None) -> None:
        self.stream = stream if stream is not None else sys.stderr
        if style == "auto":
            style = "bar" if self.stream.isatty() else "lines"
        self.style = style
        self._bar: Any = None
        self._task: Any = None

    def on_start(self, run: Run) -> None:
        """See `Callback`."""
        if self.style == "bar":
            self._start_bar(run)

    def on_step(self, run: Run) -> None:
        """See `Callback`."""
        if self._bar is not None:
            done = run.place.position
            self._bar.update(self._task, completed=done, note=_text(run.place.means()))

    def on_epoch(self, run: Run) -> None:
        """See `Callback`."""
        if self.style == "none":
            return
        rate = f"lr {run.learning_rate():.3g}"
        self.say(f"epoch {run.epoch}/{run.epochs}  {_text(run.history.last)}  {rate}")
        if self._bar is not None:
            self._bar.update(self._task, completed=0, epoch=run.epoch + 1)

    def on_end(self, run: Run) -> None:
        """See `Callback`."""
        self.close()

    def say(self, line: str) -> None:
        """Print a line beside the progress."""
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False)
        elif self.style != "none":
            print(line, file=self.stream, flush=True)

    def close(self) -> None:
        """Remove the bar, also after an error."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _start_bar(self, run: Run) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self._bar = Bar(
            TextColumn("epoch {task.fields[epoch]}"), BarColumn(), MofNCompleteColumn(),
            TimeRemainingColumn(), TextColumn("{task.fields[note]}"),
            console=Console(file=self.stream), transient=True,
        )  # fmt: skip
        self._bar.start()
        self._task = self._bar.add_task(
            "train", total=run.batches, completed=run.place.position, epoch=run.epoch + 1, note=""
        )


def _text(row: Row) -> str:
    return "  ".join(f"{k} {v:.4f}" for k, v in row.items() if k not in ("epoch", "step"))
