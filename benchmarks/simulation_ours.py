"""Our side of `simulation.py`: `simulate`, let through round by round.

    python benchmarks/simulation_ours.py ENGINE DEVICES

A line of standard input lets that many rounds through; the answer is the wall seconds of each, and
the loss of the last one.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
from simulation_case import CLASSES, FEATURES, HIDDEN, LR, SAMPLES, STEPS, samples, start

from triplane.unified_ir import Module, nn, ops, optim, train
from triplane.unified_ir.federated.algorithms import defaults
from triplane.unified_ir.federated.core.learn import Shard
from triplane.unified_ir.federated.study import RoundRow, Study, simulate

NO_END = 1_000_000


class Net(nn.Cell):
    """A network of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Dense(FEATURES, HIDDEN)
        self.head = nn.Dense(HIDDEN, CLASSES)

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        """x: (N, FEATURES) -> (N, CLASSES)."""
        return self.head(ops.relu(self.hidden(x)))


def module() -> Module:
    """The model with the weights that both sides begin with."""
    net = Net()
    for name, parameter in net.parameters().items():
        parameter.array = start()[name]
    trainer = train.Trainer(net, loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(LR))
    trainer.prepare(np.zeros((1, FEATURES), np.float32), np.zeros(1, np.int64))
    return trainer.export(("predict", "evaluate", "loss"))


class Gate:
    """Answers after the rounds that were asked for, and waits for the next number of rounds."""

    def __init__(self) -> None:
        self._left, self._seconds = 0, list[float]()
        self.wait()

    def wait(self) -> None:
        """Wait for a number of rounds; end where there is none."""
        line = sys.stdin.readline()
        if not line:
            raise SystemExit
        self._left, self._seconds, self._began = int(line), [], time.perf_counter()

    def on_round(self, row: RoundRow) -> None:
        """See `simulate`."""
        self._seconds.append(time.perf_counter() - self._began)
        self._left -= 1
        if not self._left:
            print(json.dumps({"seconds": self._seconds, "loss": row.loss}), flush=True)
            self.wait()
        self._began = time.perf_counter()


def main(engine: str, devices: int) -> None:
    """Run rounds until standard input ends."""
    shards = {}
    for number in range(devices):
        x, y = samples(number)
        shards[f"device-{number:06}"] = Shard({"x": x, "y": y}, {})
    study = Study(
        algorithm="fedavg", rounds=NO_END, hyper=defaults("fedavg").but(lr=LR), steps=STEPS,
        batch_size=SAMPLES, engine=engine,
    )  # fmt: skip
    simulate(module(), shards, study, on_round=Gate().on_round)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
