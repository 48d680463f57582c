"""A small study: points in the plane, each device with a line of its own."""

from functools import cache

import numpy as np

from triplane.unified_ir import nn, optim, train
from triplane.unified_ir.federated.algorithms import Hyper
from triplane.unified_ir.federated.core.learn import Shard
from triplane.unified_ir.federated.study import Study

HYPER = Hyper(lr=0.2, meta_lr=0.1, inner_steps=2)


class Personalized(nn.Cell):
    """A shared layer and a bias that never leaves the device."""

    def __init__(self):
        super().__init__()
        self.hidden = nn.Dense(2, 4)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Dense(4, 2)
        self.own = nn.Personal(np.zeros(2, np.float32))

    def construct(self, x):
        return self.head(self.drop(nn.Tanh()(self.hidden(x)))) + self.own


class OwnLayer(nn.Cell):
    """A hidden layer of each device's own before a shared head."""

    def __init__(self):
        super().__init__()
        self.own = nn.Personal(np.random.default_rng(1).normal(size=(2, 8)).astype(np.float32))
        self.head = nn.Dense(8, 2)

    def construct(self, x):
        return self.head(nn.ReLU()(x @ self.own))


class Normed(nn.Cell):
    """Statistics of batches, and a shared layer."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.head = nn.Dense(2, 2)

    def construct(self, x):
        return self.head(self.norm(x))


def half_frozen():
    cell = plain()
    next(iter(cell.parameters().values())).trainable = False
    return cell


def plain():
    return nn.Sequential(nn.Dense(2, 4), nn.Tanh(), nn.Dense(4, 2))


@cache
def module(cell=plain):
    nn.seed(4)
    trainer = train.Trainer(cell(), loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.1))
    trainer.prepare(np.zeros((1, 2), np.float32), np.zeros(1, np.int64))
    return trainer.export(("predict", "evaluate", "loss"))


def part(rng, n, angle):
    x = rng.standard_normal((n, 2)).astype(np.float32)
    return {"x": x, "y": (x @ [np.cos(angle), np.sin(angle)] > 0).astype(np.int64)}


def shards(count=4, first=0):
    """Devices of different sizes and different questions."""
    found = {}
    for i in range(first, first + count):
        rng = np.random.default_rng(i)
        found[f"device-{i}"] = Shard(part(rng, 16 + 4 * i, i), part(rng, 10, i))
    return found


def study(algorithm="fedavg", **options):
    given = {"rounds": 4, "steps": 2, "batch_size": 6, "support": 5, "query": 5, "hyper": HYPER}
    return Study(algorithm=algorithm, **{**given, **options})


def bits(trial):
    """Everything of a trial that must not depend on when it ran."""
    rows = [(r.number, r.devices, r.loss, r.bytes_up, r.bytes_down) for r in trial.rounds]
    state = {k: x.tobytes() for k, x in trial.state.items()}
    return rows, list(trial.scores), dict(trial.sweep), state, list(trial.start)


def there(x):
    """A value that may be None in general and is not here."""
    assert x is not None
    return x


def least_squares(devices):
    """A linear model, and devices whose problems y = x w_k differ so much that their losses do."""
    shards = {}
    for k in range(devices):
        rng = np.random.default_rng(k)
        x = rng.normal(0, 1 + 0.05 * (k % 8), (40, 3)).astype(np.float32)
        y = (x @ rng.normal(0, 2, (3, 1))).astype(np.float32)
        shards[f"device-{k:02}"] = Shard({"x": x, "y": y}, {"x": x[:4], "y": y[:4]})
    trainer = train.Trainer(nn.Dense(3, 1, bias=False), loss=nn.MSE(), optimizer=optim.SGD(0.1))
    trainer.prepare(np.zeros((2, 3), np.float32), np.zeros((2, 1), np.float32))
    return trainer.export(), shards
