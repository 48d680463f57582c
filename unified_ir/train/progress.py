"""Progress on standard error: one line that moves on a terminal, else a line per epoch."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from typing import Any, Final, Literal, TextIO, get_args

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.train.callbacks import Callback
from triplane.unified_ir.train.history import VALIDATION, Row
from triplane.unified_ir.train.run import Run

Style = Literal["auto", "bar", "lines", "none"]

REFRESH_S: Final = 0.1
"""Seconds between two drawings of the moving line."""
COLUMNS: Final = 80
"""Width of a terminal that does not tell its own."""
_BAR: Final = 24
"""Characters of the bar, where there is room for them."""
_LEAST_BAR: Final = 8


class Progress(Callback):
    """Shows a run. "auto" is one moving line ("bar") on a terminal, and "lines" otherwise.

    stream: where to, by default standard error. InvalidInput: another style.
    """

    only_writes = True

    def __init__(self, style: Style = "auto", *, stream: TextIO | None = None) -> None:
        if style not in get_args(Style):
            names = ", ".join(map(repr, get_args(Style)))
            raise InvalidInput(f"progress is one of {names}, or a Progress; got {style!r}")
        self.stream = stream if stream is not None else sys.stderr
        if style == "auto":
            moves = self.stream.isatty() and os.environ.get("TERM") != "dumb"
            style = "bar" if moves else "lines"
        self.style = style
        self._live: Any = None
        self._drawn_s = self._started_s = 0.0
        self._first = 0

    def on_start(self, run: Run) -> None:
        """See `Callback`."""
        if self.style == "bar":
            self._start()
            self._first, self._started_s = run.place.position, time.monotonic()
            self._draw(run, run.epoch + 1, run.place.position, {})

    def on_step(self, run: Run) -> None:
        """See `Callback`."""
        if self._live is not None and time.monotonic() - self._drawn_s >= REFRESH_S:
            last = run.history.rows[-1] if run.history.rows else {}
            held_out = {k: x for k, x in last.items() if k.startswith(VALIDATION)}
            row = {**run.place.means(), **held_out}
            self._draw(run, run.epoch + 1, run.place.position, row)

    def on_epoch(self, run: Run) -> None:
        """See `Callback`."""
        if self._live is not None:
            self._draw(run, run.epoch, run.batches or 0, run.history.last)
            self._first, self._started_s = 0, time.monotonic()
        elif self.style != "none":
            measures = "  ".join(_measures(run.history.last))
            self.say(f"epoch {run.epoch}/{run.epochs}  {measures}  lr {run.learning_rate():.3g}")

    def on_end(self, run: Run) -> None:
        """See `Callback`."""
        self.close()

    def say(self, line: str) -> None:
        """Print a line beside the progress."""
        if self._live is not None:
            self._live.console.print(line, markup=False, highlight=False)
        elif self.style != "none":
            print(line, file=self.stream, flush=True)

    def say_devices(self, engine: Any) -> None:
        """Print on which devices an engine runs, if it chooses, and let it tell of its plans."""
        devices: Any = getattr(engine, "devices", None)
        if devices is not None:
            self.say(f"engine {engine.name} on {devices}")
        if hasattr(devices, "say"):
            devices.say = self.say

    def close(self) -> None:
        """Leave the line as it is, also after an error."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _start(self) -> None:
        from rich.console import Console
        from rich.live import Live

        # What a callback prints appears above the line, unless standard output goes elsewhere. No
        # thread draws, since only the training thread may read the run.
        self._live = Live(
            console=Console(file=self.stream),
            auto_refresh=False,
            redirect_stdout=sys.stdout.isatty(),
        )
        self._live.start()

    def _draw(self, run: Run, epoch: int, done: int, row: Row) -> None:
        from rich.text import Text

        self._drawn_s = time.monotonic()
        # A terminal may break a line already at its last column, so that one stays free.
        width = _columns(self.stream) - 1
        text = f"epoch {epoch}/{run.epochs} {self._batches(width, done, run.batches)}"
        for measure in _measures(_pairs(row)):
            if len(text) + 2 + len(measure) > width:
                break
            text += f"  {measure}"
        self._live.console.width = width
        self._live.update(Text(text, no_wrap=True, overflow="crop"), refresh=True)

    def _batches(self, width: int, done: int, total: int | None) -> str:
        """Return the bar, the number of batches, and the time that the epoch still takes."""
        if not total:
            return f"{done} batches"
        size = min(_BAR, max(_LEAST_BAR, width // 6))
        full = round(size * done / total)
        left = ""
        if self._first < done < total:
            batch_s = (self._drawn_s - self._started_s) / (done - self._first)
            left = f" {_clock(batch_s * (total - done))} left"
        blocks = "━─" if "utf" in str(self.stream.encoding).lower() else "#-"
        return f"{blocks[0] * full}{blocks[1] * (size - full)} {done}/{total}{left}"


def _columns(stream: TextIO) -> int:
    """Return the width of the stream's own terminal: other streams may be on another, or none."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or COLUMNS
    except (OSError, ValueError):
        return COLUMNS


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _pairs(row: Row) -> Row:
    """Return the measures, each followed by that of held-out data, which is cut off last."""
    own = [name for name in row if not name.startswith(VALIDATION)]
    names = [n for name in own for n in (name, VALIDATION + name)]
    return {name: row[name] for name in names if name in row}


def _measures(row: Row) -> Iterator[str]:
    shown = (name for name in row if name not in {"epoch", "step"})
    return (f"{' '.join(name.split())} {row[name]:.4f}" for name in shown)
