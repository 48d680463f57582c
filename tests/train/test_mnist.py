"""Real handwriting, where the data is at hand: a convolutional network reads unseen writers."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from triplane.unified_ir import data, nn, optim, train
from triplane.unified_ir.data.transforms import Scale

DATA = Path(os.environ.get("TRIPLANE_DATA", "")) / "mnist_by_writer.npz"


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_file(), reason="TRIPLANE_DATA holds no mnist_by_writer.npz")
def test_a_lenet_reads_digits_of_writers_it_never_saw() -> None:
    with np.load(DATA, allow_pickle=False) as found:
        x, y, writer = found["x"], found["y"], found["writer"]
    unseen = writer % 10 == 0
    few = slice(0, 6000)
    training = data.arrays(x[~unseen][few][:, None], y[~unseen][few]).then(Scale("x"))
    held_out = data.arrays(x[unseen][:2000][:, None], y[unseen][:2000]).then(Scale("x"))
    nn.seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 6, 5, padding="same"), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dense(400, 84), nn.ReLU(), nn.Dense(84, 10),
    )  # fmt: skip
    trainer = train.Trainer(net, loss=nn.SoftmaxCrossEntropy(), optimizer=optim.Adam(0.003))
    trainer.fit(training, epochs=2, progress="none")
    assert trainer.evaluate(held_out)["accuracy"] > 0.94
