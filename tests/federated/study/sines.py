"""A small regression: noisy sines, each device with a phase of its own."""

from functools import cache

import numpy as np

from triplane.unified_ir import nn, optim, train
from triplane.unified_ir.federated.core.learn import Shard


def sine(number, *, train=12, held_out=20):
    """A device's noisy sine of its own phase; features are 1, sin and cos, so a line fits it."""
    rng = np.random.default_rng(number)
    t = rng.uniform(-np.pi, np.pi, train + held_out)
    phase = rng.uniform(0, 2 * np.pi)
    y = 1 + 2 * np.sin(t + phase) + rng.normal(0, 0.1, len(t))
    x = np.stack([np.ones_like(t), np.sin(t), np.cos(t)], 1)
    data = {"x": x.astype(np.float32), "y": y.astype(np.float32)[:, None]}
    return Shard(*({k: v[part] for k, v in data.items()} for part in np.s_[:train, train:]))


@cache
def sines(count=6, first=0):
    return {f"device-{k}": sine(k) for k in range(first, first + count)}


@cache
def regression(hidden=0):
    nn.seed(4)
    layers = [nn.Dense(3, hidden), nn.Tanh(), nn.Dense(hidden, 1)] if hidden else [nn.Dense(3, 1)]
    trainer = train.Trainer(nn.Sequential(*layers), loss=nn.MSE(), optimizer=optim.SGD(0.1))
    trainer.prepare(np.zeros((1, 3), np.float32), np.zeros((1, 1), np.float32))
    return trainer.export(("predict", "evaluate", "loss"))


def mse(w, b, part):
    return float(np.mean((part["x"].astype(float) @ w.T + b - part["y"]) ** 2))
