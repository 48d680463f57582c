"""Write a run as event files for TensorBoard."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from itertools import chain, count
from pathlib import Path
from typing import BinaryIO

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.graph import Array
from triplane.unified_ir.ops.summaries import HISTOGRAM, IMAGE
from triplane.unified_ir.train import events
from triplane.unified_ir.train.callbacks import Callback
from triplane.unified_ir.train.run import Run


class TensorBoard(Callback):
    """Writes event files for TensorBoard into `folder`, a new one for each call of `fit`.

    Every `every_steps` steps: loss, metrics and summaries of that step under `train/`, and
    `learning_rate`; after each epoch its means under `epoch/` and the measures on held-out data
    under `validation/`. Histograms and images made by `ops` keep their names.
    """

    only_writes = True

    def __init__(
        self,
        folder: str | Path,
        *,
        every_steps: int = 10,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if every_steps < 1:
            raise InvalidInput(f"TensorBoard needs every_steps >= 1, got {every_steps}")
        self.folder, self.every_steps, self.clock = Path(folder), every_steps, clock
        self._file: BinaryIO | None = None

    def on_start(self, run: Run) -> None:
        """See `Callback`."""
        self.close()
        now = self.clock()
        self.folder.mkdir(parents=True, exist_ok=True)
        # "x": never write into a file of another run that started in the same second.
        self._file = _unused(self.folder, now).open("xb")
        self._write(events.first_event(now))

    def on_step(self, run: Run) -> None:
        """See `Callback`."""
        if run.step % self.every_steps == 0:
            values = [events.scalar(f"train/{k}", v) for k, v in run.results.items()]
            values.append(events.scalar("learning_rate", run.learning_rate()))
            self._add(run, [*values, *_pictures(run.tensors)])

    def on_epoch(self, run: Run) -> None:
        """See `Callback`."""
        row = {k: v for k, v in run.history.last.items() if k not in ("epoch", "step")}
        tags = {k: k.replace("validation.", "validation/", 1) for k in row}
        named = {k if "/" in k and k != old else f"epoch/{k}": row[old] for old, k in tags.items()}
        self._add(run, [events.scalar(k, v) for k, v in named.items()])

    def on_end(self, run: Run) -> None:
        """See `Callback`."""
        self.close()

    def close(self) -> None:
        """Close the file; it is complete without this too."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _add(self, run: Run, values: list[bytes]) -> None:
        self._write(events.event(self.clock(), run.step, values))

    def _write(self, event: bytes) -> None:
        """Append one event, which is complete in the file when this returns."""
        if self._file is not None:
            self._file.write(events.record(event))
            self._file.flush()


def _pictures(tensors: dict[str, Array]) -> Iterator[bytes]:
    for name, x in tensors.items():
        if name.startswith(IMAGE):
            yield events.image(name, x)
        elif name.startswith(HISTOGRAM):
            low, high, total, squares, *counts = map(float, x)
            yield events.histogram(
                name, low=low, high=high, total=total, squares=squares, counts=counts
            )


def _unused(folder: Path, now: float) -> Path:
    """Return a file name that TensorBoard expects: seconds, machine, and a number if it exists."""
    stem = f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}"
    paths = chain([folder / stem], (folder / f"{stem}.{number}" for number in count(1)))
    return next(path for path in paths if not path.exists())
