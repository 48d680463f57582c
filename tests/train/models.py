"""Small models and data that the tests of training share."""

from typing import Any

import numpy as np

from triplane.unified_ir import nn, optim, train

QUIET: dict[str, Any] = {"progress": "none"}


class Noisy(nn.Cell):
    """Every kind of state: parameters, running statistics, a random key."""

    def __init__(self):
        super().__init__()
        self.first = nn.Dense(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Dense(8, 3)

    def construct(self, x):
        return self.head(self.drop(self.norm(self.first(x)).reshape((-1, 8))))


def data(n=50, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, 4)).astype(np.float32)
    return x, (x[:, 0] > 0).astype(np.int64) + (x[:, 1] > 0)


def trainer(*, seed=0, cell=None, optimizer=None, **options):
    nn.seed(seed)
    return train.Trainer(
        Noisy() if cell is None else cell(),
        loss=nn.SoftmaxCrossEntropy(),
        optimizer=optimizer or optim.Adam(optim.Cosine(0.02, 100)),
        seed=seed,
        **options,
    )


def bits(trained):
    """The bytes of the whole state."""
    return {k: a.tobytes() for k, a in trained.state().items()}
