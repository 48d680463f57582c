"""Compare every algorithm on MNIST by writer: 539 writers learn, 295 others never take part.

All algorithms use the same rounds, writers, steps and samples in a step. Their hyperparameters were
chosen by `--tune` on training writers alone: each setting of `TRIED` runs for 40 rounds with 100 of
these writers and is scored after adaptation on 50 others; the best setting that stays finite for
all rounds was taken (Meta-SGD above a meta-rate of 0.05 does not). FedAvg and the other algorithms
that learn by batches adapt at the best of six rates.

TRIPLANE_DATA names the folder that contains mnist_by_writer.npz (x, y, writer, split).

Run it: python examples/federated_writers.py [--tune] [ALGORITHM ...]   (some minutes each)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import nn, ops, optim, train
from triplane.unified_ir.federated.algorithms import Hyper
from triplane.unified_ir.federated.core.learn import Shard
from triplane.unified_ir.federated.study import Study, Trial, page, simulate
from triplane.unified_ir.federated.study.source import SampleSource, devices_of
from triplane.unified_ir.ir import Module

FILE: Final = "mnist_by_writer.npz"
RATES: Final = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
"""Rates of adaptation to try for algorithms that learn by batches."""
BASE: Final = Study(
    algorithm="fedavg", rounds=300, devices=10, steps=3, batch_size=40, support=20, query=20,
    evaluate_every=100, hyper=Hyper(lr=0.1, inner_steps=3),
)  # fmt: skip
# fmt: off
STUDIES: Final = {
    "fedavg":   replace(BASE, rates=RATES, hyper=Hyper(lr=0.3)),
    "fedprox":  replace(BASE, algorithm="fedprox", rates=RATES,
                        hyper=Hyper(lr=0.3, proximal=0.01)),
    "fedadam":  replace(BASE, algorithm="fedadam", rates=RATES,
                        hyper=Hyper(lr=0.1, server_lr=0.03)),
    "reptile":  replace(BASE, algorithm="reptile", rates=RATES, hyper=Hyper(lr=0.3)),
    "maml":     replace(BASE, algorithm="maml", hyper=Hyper(lr=0.03, meta_lr=0.3)),
    "fomaml":   replace(BASE, algorithm="fomaml", hyper=Hyper(lr=0.03, meta_lr=0.3)),
    "meta-sgd": replace(BASE, algorithm="meta-sgd", hyper=Hyper(lr=0.03, meta_lr=0.05)),
}
TRIED: Final[Mapping[str, tuple[Hyper, ...]]] = {
    "fedavg":   tuple(Hyper(lr=a) for a in (0.03, 0.1, 0.3, 1.0)),
    "fedprox":  tuple(Hyper(lr=a, proximal=m) for a in (0.1, 0.3) for m in (0.01, 0.1)),
    "fedadam":  (*(Hyper(lr=a, server_lr=s) for a in (0.03, 0.1) for s in (0.003, 0.01, 0.03)),
                 Hyper(lr=0.1, server_lr=0.1), Hyper(lr=0.3, server_lr=0.03)),
    "reptile":  tuple(Hyper(lr=a, server_lr=s) for a in (0.1, 0.3) for s in (0.5, 1.0)),
    "maml":     tuple(Hyper(lr=a, meta_lr=b) for a, b in
                      ((0.01, 0.3), (0.03, 0.1), (0.03, 0.2), (0.03, 0.3), (0.1, 0.1), (0.1, 0.3))),
    "fomaml":   tuple(Hyper(lr=a, meta_lr=b) for a, b in
                      ((0.01, 0.3), (0.03, 0.1), (0.03, 0.2), (0.03, 0.3))),
    "meta-sgd": tuple(Hyper(lr=a, meta_lr=b) for a, b in
                      ((0.01, 0.1), (0.03, 0.05), (0.03, 0.1), (0.03, 0.2), (0.03, 0.3),
                       (0.1, 0.1))),
}
# fmt: on
TUNING_ROUNDS: Final = 40
TUNING_WRITERS: Final = (100, 50)
"""How many of the training writers to learn with, and how many to score on."""


class TwoConvolutions(nn.Cell):
    """54,000 parameters; x: (N, 1, 28, 28) -> logits (N, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 8, 5, stride=2, padding=2)
        self.second = nn.Conv2d(8, 16, 5, stride=2, padding=2)
        self.hidden = nn.Dense(16 * 7 * 7, 64)
        self.head = nn.Dense(64, 10)

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        """x: (N, 1, 28, 28) in 0..1 -> (N, 10)."""
        x = (x - 0.13) / 0.31
        x = ops.relu(self.second(ops.relu(self.first(x))))
        logits: ops.Tensor = self.head(ops.relu(self.hidden(ops.flatten(x))))
        return logits


def model() -> Module:
    """Return the untrained network."""
    nn.seed(0)
    trainer = train.Trainer(
        TwoConvolutions(), loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.1)
    )
    trainer.prepare(np.zeros((1, 1, 28, 28), np.float32), np.zeros(1, np.int64))
    return trainer.export(("predict", "evaluate", "loss"))


def source(path: Path) -> SampleSource:
    """Return the dataset with one device for each writer, scored on half of its digits."""
    return SampleSource(
        data=str(path), way="group", group="writer", split="split",
        held_out=0.5, least=10,
    )  # fmt: skip


def trial(study: Study, path: Path, folder: Path | None = None) -> Trial:
    """Run one algorithm; folder: where its progress is saved, so that it can be resumed."""
    module = model()
    seen, unseen = devices_of(source(path), module)
    return simulate(module, seen, study, unseen=unseen, folder=folder)


def tune(name: str, path: Path) -> None:
    """Print the accuracy of each setting of an algorithm on writers that it did not learn from."""
    module = model()
    few, others = _some(devices_of(source(path), module)[0])
    for hyper in TRIED[name]:
        study = replace(STUDIES[name], hyper=hyper, rounds=TUNING_ROUNDS, evaluate_every=0)
        try:
            scores = _scores_text(simulate(module, few, study, unseen=others))
        except InvalidInput as error:
            scores = str(error)
        print(f"{name:9} {_setting_text(hyper):24} {scores}", flush=True)


def _setting_text(hyper: Hyper) -> str:
    """Return the hyperparameters that differ from the defaults."""
    values, defaults = dict(hyper), dict(Hyper())
    return ", ".join(f"{k} {v:g}" for k, v in values.items() if v != defaults[k])


def _scores_text(run: Trial) -> str:
    rate, scores = run.best_rate(seen=False) or (None, run.summary(seen=False))
    assert scores is not None
    return (
        f"{100 * scores.before:5.1f} before, {100 * scores.after:5.1f} adapted "
        f"(rate {rate or 'own'}), loss {run.rounds[-1].loss:.3f}"
    )


def _some(shards: Mapping[str, Shard]) -> tuple[dict[str, Shard], dict[str, Shard]]:
    learning, scored = TUNING_WRITERS
    chosen = sorted(shards.items())[: learning + scored]
    return dict(chosen[:learning]), dict(chosen[learning:])


def show(run: Trial) -> None:
    """Print accuracy in percent over devices."""
    for seen, group in ((True, "training"), (False, "unseen")):
        rate, scores = run.best_rate(seen=seen) or (None, run.summary(seen=seen))
        assert scores is not None
        print(
            f"{run.algorithm:9} {group:8} {scores.devices:4} devices: {100 * scores.before:5.1f} "
            f"before, {100 * scores.after:5.1f} adapted (rate {rate or 'own'}), worst tenth "
            f"{100 * scores.before_worst_tenth:5.1f} and {100 * scores.after_worst_tenth:5.1f}, "
            f"{run.bytes_up / 1e6:.0f} MB up, {run.seconds:.0f} s",
            flush=True,
        )


def main(arguments: tuple[str, ...]) -> None:
    """Try settings, or compare the algorithms and write federated_writers.html."""
    path = Path(os.environ.get("TRIPLANE_DATA", ".")) / FILE
    names = tuple(name for name in arguments if name != "--tune") or tuple(STUDIES)
    if "--tune" in arguments:
        for name in names:
            tune(name, path)
        return
    trials = []
    for name in names:
        trials.append(trial(STUDIES[name], path))
        show(trials[-1])
    Path("federated_writers.html").write_text(page(trials, "MNIST by writer"))


if __name__ == "__main__":
    main(tuple(sys.argv[1:]))
