"""Twelve devices ask "is this digit one of my five?", each with five digits of its own.

No single model can answer all of these questions. Six devices learn together, once by FedAvg and
once by exact MAML, with the same rounds, steps and bytes. Then all twelve adapt the result to forty
of their own samples in three steps, and are scored on samples that neither learning nor adaptation
has seen.

Run it: python examples/federated_digits.py [SEED ...]
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Final

import numpy as np

from triplane.unified_ir import data, nn, ops, optim, train
from triplane.unified_ir.federated.algorithms import Hyper
from triplane.unified_ir.federated.core.draws import Array, Draws
from triplane.unified_ir.federated.core.learn import Shard
from triplane.unified_ir.federated.study import Study, Trial, evenly, simulate, summary
from triplane.unified_ir.ir import Module

DEVICES: Final = 12
TRAINING: Final = 6
SEEDS: Final = (0, 1, 2)
RATES: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
"""Rates of adaptation to try for FedAvg; MAML adapts at the rate it was learned for."""
FEDAVG: Final = Study(
    algorithm="fedavg", hyper=Hyper(lr=1.0, inner_steps=3), rates=RATES,
    rounds=200, steps=1, batch_size=40, support=40, query=40,
)  # fmt: skip
"""The best of the rates 0.1, 0.3, 1 and 3, and of batch sizes 40 and 80."""
MAML: Final = replace(
    FEDAVG, algorithm="maml", hyper=Hyper(lr=0.5, meta_lr=0.5, inner_steps=3), rates=()
)


class Question(nn.Cell):
    """Two layers; x: (N, 1, 8, 8) -> logits (N, 2) of no and yes."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Dense(64, 64)
        self.head = nn.Dense(64, 2)

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        """x: (N, 1, 8, 8) in 0..1 -> (N, 2)."""
        logits: ops.Tensor = self.head(ops.relu(self.hidden(ops.flatten(x))))
        return logits


def question(device: str, seed: int) -> list[int]:
    """Return the five digits to which a device answers yes."""
    return sorted(int(k) for k in Draws(seed, 0, device, "question").permutation(10)[:5])


def shards(seed: int) -> dict[str, Shard]:
    """Return 150 digits for each device, 60 of them held out for scoring; y is yes or no."""
    digits = data.digits()
    samples: dict[str, Array] = {"x": np.asarray(digits.x), "y": np.asarray(digits.y)}
    parts = evenly(samples, DEVICES, held_out=0.4, seed=seed)
    return {name: _asked(shard, question(name, seed)) for name, shard in parts.items()}


def _asked(shard: Shard, five: list[int]) -> Shard:
    parts = (
        {"x": part["x"], "y": np.isin(part["y"], five).astype(np.int64)}
        for part in (shard.train, shard.held_out)
    )
    return Shard(*parts)


def model(seed: int) -> Module:
    """Return the untrained network."""
    nn.seed(seed)
    trainer = train.Trainer(Question(), loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.1))
    trainer.prepare(np.zeros((1, 1, 8, 8), np.float32), np.zeros(1, np.int64))
    return trainer.export(("predict", "evaluate", "loss"))


def trial(study: Study, seed: int) -> Trial:
    """Run a study on the first six devices; the other six are only scored."""
    devices = shards(seed)
    names = sorted(devices)
    return simulate(
        model(seed),
        {name: devices[name] for name in names[:TRAINING]},
        replace(study, seed=seed),
        unseen={name: devices[name] for name in names[TRAINING:]},
    )


def main(seeds: tuple[int, ...] = SEEDS) -> None:
    """Print accuracy in percent: the mean over devices and seeds, and the worst device."""
    print("                     before adaptation   after adaptation   worst device   bytes up")
    trials = {study.algorithm: [trial(study, seed) for seed in seeds] for study in (FEDAVG, MAML)}
    for seen, group in ((True, "training"), (False, "unseen")):
        for name, runs in trials.items():
            scores = [score for run in runs for score in run.final(seen=seen)]
            total = summary(scores)
            assert total is not None
            worst = min(score.after for score in scores)
            print(
                f"{group:8} {name:8} {100 * total.before:21.1f} {100 * total.after:18.1f} "
                f"{100 * worst:14.1f} {runs[0].bytes_up:10,}"
            )


if __name__ == "__main__":
    main(tuple(map(int, sys.argv[1:])) or SEEDS)
