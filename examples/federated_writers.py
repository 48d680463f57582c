"""MNIST by writer: every algorithm on 539 writers, scored on them and on 297 that never took part.

TRIPLANE_DATA names the folder of mnist_by_writer.npz (x, y, writer, split).

Run it: python examples/federated_writers.py [ALGORITHM ...]   (some minutes each on two cores)
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from triplane.unified_ir import nn, ops, optim, train
from triplane.unified_ir.federated.algorithms import Hyper
from triplane.unified_ir.federated.study import Study, Trial, page, simulate
from triplane.unified_ir.federated.study.source import Source, devices_of
from triplane.unified_ir.ir import Module

FILE: Final = "mnist_by_writer.npz"
RATES: Final = (0.03, 0.1)
"""Of adaptation, for algorithms that learn by batches."""
BASE: Final = Study(
    algorithm="fedavg", rounds=40, devices=10, steps=3, batch_size=20, support=20, query=20,
    hyper=Hyper(lr=0.1, inner_steps=3),
)  # fmt: skip
# fmt: off
STUDIES: Final = {
    "fedavg":   replace(BASE, rates=RATES),
    "fedprox":  replace(BASE, algorithm="fedprox", rates=RATES),
    "fedadam":  replace(BASE, algorithm="fedadam", rates=RATES,
                        hyper=Hyper(lr=0.1, inner_steps=3, server_lr=0.01)),
    "reptile":  replace(BASE, algorithm="reptile", rates=RATES),
    "maml":     replace(BASE, algorithm="maml", hyper=Hyper(lr=0.1, meta_lr=0.1)),
    "fomaml":   replace(BASE, algorithm="fomaml", hyper=Hyper(lr=0.1, meta_lr=0.1)),
    "meta-sgd": replace(BASE, algorithm="meta-sgd", hyper=Hyper(lr=0.1, meta_lr=0.1)),
}
# fmt: on


class TwoConvolutions(nn.Cell):
    """215,000 parameters; x: (N, 1, 28, 28) -> logits (N, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 16, 5, padding="same")
        self.second = nn.Conv2d(16, 32, 5, padding="same")
        self.hidden = nn.Dense(32 * 7 * 7, 128)
        self.head = nn.Dense(128, 10)

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        """x: (N, 1, 28, 28) in 0..1 -> (N, 10)."""
        x = ops.max_pool(ops.relu(self.first(x)), 2)
        x = ops.max_pool(ops.relu(self.second(x)), 2)
        return self.head(ops.relu(self.hidden(ops.flatten(x))))


def model() -> Module:
    """The untrained network."""
    nn.seed(0)
    trainer = train.Trainer(
        TwoConvolutions(), loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.1)
    )
    trainer.prepare(np.zeros((1, 1, 28, 28), np.float32), np.zeros(1, np.int64))
    return trainer.export(("predict", "evaluate", "loss"))


def source(path: Path) -> Source:
    """A device per writer; half of its digits score it."""
    return Source(
        data=str(path), way="group", group="writer", split="split",
        held_out=0.5, least=10,
    )  # fmt: skip


def trial(study: Study, path: Path) -> Trial:
    """One algorithm."""
    module = model()
    seen, unseen = devices_of(source(path), module)
    return simulate(module, seen, study, unseen=unseen)


def main(names: tuple[str, ...]) -> None:
    """Prints accuracy in percent over devices and writes federated_writers.html."""
    path = Path(os.environ.get("TRIPLANE_DATA", ".")) / FILE
    trials = []
    for name in names or tuple(STUDIES):
        made = trial(STUDIES[name], path)
        trials.append(made)
        for seen, group in ((True, "training"), (False, "unseen")):
            rate, found = made.best_rate(seen=seen) or (None, made.summary(seen=seen))
            assert found is not None
            print(
                f"{name:9} {group:8} {found.devices:4} devices: {100 * found.before:5.1f} before, "
                f"{100 * found.after:5.1f} adapted (rate {rate or 'own'}), worst tenth "
                f"{100 * found.before_worst_tenth:5.1f} and {100 * found.after_worst_tenth:5.1f}, "
                f"{made.bytes_up / 1e6:.0f} MB up, {made.seconds:.0f} s",
                flush=True,
            )
    Path("federated_writers.html").write_text(page(trials, "MNIST by writer"))


if __name__ == "__main__":
    main(tuple(sys.argv[1:]))
