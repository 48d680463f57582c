"""Networks, samples and callbacks of tests that train on XLA."""

import numpy as np

from triplane.unified_ir import data, nn, ops, train


class At(train.Callback):
    """Calls `do` after one step."""

    def __init__(self, step, do):
        self.step, self.do = step, do

    def on_step(self, run):
        if run.step == self.step:
            self.do(run)


class Net(nn.Cell):
    """What a launch must carry and devices must share: statistics, a random key, weights."""

    def __init__(self):
        super().__init__()
        self.hidden = nn.Dense(64, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.25)
        self.head = nn.Dense(16, 10)

    def construct(self, x):
        return self.head(self.drop(ops.relu(self.norm(self.hidden(ops.flatten(x))))))


def digits(first, last):
    """Digits of the shipped set: (N, 1, 8, 8) in 0..1, and their labels."""
    held = np.load(data.__path__[0] + "/digits.npz")
    x = held["x"][first:last].astype(np.float32)[:, None] / 16
    return x, held["y"][first:last].astype(np.int64)


def drawn_samples(n):
    """n samples of 3 numbers and their labels, 0 or 1, and the same as batches of 2."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(n, 3)).astype(np.float32), rng.integers(0, 2, n)
    return x, y, [(x[i : i + 2], y[i : i + 2]) for i in range(0, n, 2)]
