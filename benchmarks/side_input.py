"""One way to give training its batches as a process: it trains an epoch on command.

Commands and replies are JSON, one per line, on standard input and output, as in `worker.py`. All
sides train the same network on the same augmented samples, on one thread; only where the batches
come from differs.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from worker import threads

from triplane.unified_ir import data, nn, optim, train, zoo
from triplane.unified_ir.data import transforms
from triplane.unified_ir.data.dataset import Dataset
from triplane.unified_ir.data.step import Step
from triplane.unified_ir.engines.onnx import OnnxEngine
from triplane.unified_ir.frontend.cell import Cell
from triplane.unified_ir.runtime.session import SessionOptions
from triplane.unified_ir.train.run import Run

SEED: Final = 7
BATCH: Final = 64
CLASSES: Final = 10


@dataclass(frozen=True)
class Case:
    """A network, the shape of its samples of uint8, the batches of an epoch, and the steps.

    steps: what samples pass through after `data.load`. pixels: as `data.load` takes it.
    """

    network: Callable[[], Cell]
    shape: tuple[int, ...]
    batches: int
    steps: tuple[Step, ...]
    pixels: bool | None = None


_SHIFTED = (transforms.Shift("x", 2), transforms.Flip("x"))
_CROPPED = (transforms.RandomCrop("x", (32, 32), padding=4), transforms.Flip("x"))
_SCALE = transforms.Scale("x")
_NORMALIZE = transforms.Normalize("x", (0.49, 0.48, 0.45), (0.25, 0.24, 0.26))

CASES: Final = {
    "LeNet": Case(zoo.LeNet, (1, 28, 28), 96, _SHIFTED),
    "LeNet, bytes": Case(zoo.LeNet, (1, 28, 28), 96, (*_SHIFTED, _SCALE), pixels=False),
    "ResNet-8": Case(zoo.resnet8, (3, 32, 32), 24, (*_CROPPED, _NORMALIZE)),
    "ResNet-8, bytes": Case(
        zoo.resnet8, (3, 32, 32), 24, (*_CROPPED, _SCALE, _NORMALIZE), pixels=False
    ),
}
"""`data.load` scales pixels before all other steps; "bytes" are scaled after the augmentation."""


def write(case: Case, path: Path) -> None:
    """Write the samples of a case as a record set."""
    rng = np.random.default_rng(SEED)
    n = case.batches * BATCH
    x = rng.integers(0, 256, (n, *case.shape), dtype=np.uint8)
    data.arrays(x, rng.integers(0, CLASSES, n)).write(path)


def augmented(case: Case, path: Path) -> Dataset:
    """Return the pipeline of a case: records, augmentation, shuffling, batches."""
    return data.load(path, pixels=case.pixels).then(*case.steps).shuffle().batch(BATCH)


def precomputed(dataset: Dataset) -> list[tuple[Any, ...]]:
    """Return the batches of epoch 0 in memory, each in arrays of its own."""
    batches = dataset.batches(BATCH, seed=SEED)
    return [tuple(np.array(a) for a in batch) for batch in batches]


SIDES: Final[dict[str, Callable[[Dataset], Any]]] = {
    "in memory": precomputed,
    "in memory again": precomputed,
    "no worker": lambda dataset: dataset,
    "1 worker": lambda dataset: dataset.load_with(1),
    "2 workers": lambda dataset: dataset.load_with(2),
    "1 process": lambda dataset: dataset.load_with(1, processes=True),
}


class EpochClock(train.Callback):
    """Seconds of each step within an epoch, start and end of the epoch included.

    wall_s; cpu_s: of all threads of this process; thread_s: CPU time of the training thread.
    """

    def __init__(self) -> None:
        self.epochs: list[dict[str, float]] = []

    def on_start(self, run: Run) -> None:
        """See `Callback`."""
        self._start, self._steps = _now(), 0

    def on_step(self, run: Run) -> None:
        """See `Callback`."""
        self._steps += 1

    def on_epoch(self, run: Run) -> None:
        """See `Callback`."""
        now = _now()
        self.epochs.append({k: (now[k] - self._start[k]) / self._steps for k in now})
        self._start, self._steps = now, 0


def _now() -> dict[str, float]:
    return {
        "wall_s": time.perf_counter(),
        "cpu_s": time.process_time(),
        "thread_s": time.thread_time(),
    }


def trainer_of(case: Case, clock: EpochClock) -> train.Trainer:
    """Return a trainer with the same weights on every side."""
    nn.seed(SEED)
    return train.Trainer(
        case.network(),
        loss=nn.SoftmaxCrossEntropy(),
        optimizer=optim.SGD(0.01, momentum=0.9),
        engine=OnnxEngine(options=SessionOptions(threads=threads())),
        seed=SEED,
        callbacks=[clock],
    )


def main() -> None:
    """Answer `{"do": "start" | "run", ...}` until standard input ends."""
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "start":
            case, path = CASES[order["case"]], Path(order["path"])
            samples = SIDES[order["side"]](augmented(case, path))
            clock = EpochClock()
            trainer = trainer_of(case, clock)
        # The first epoch, of "start", compiles the step and compares the records' checksums.
        trainer.fit(samples, 1, batch_size=BATCH, progress="none")
        reply = {**clock.epochs[-1], "loss": trainer.history.rows[0]["loss"]}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
