"""A small network for the digits, as it begins: the same weights each time."""

from pathlib import Path

import numpy as np

from triplane.unified_ir import nn, optim, train


def digits_trainer() -> train.Trainer:
    """Return the trainer, prepared and without a step of training."""
    nn.seed(0)
    trainer = train.Trainer(
        nn.Sequential(nn.Flatten(), nn.Dense(64, 10)),
        loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.1),
    )  # fmt: skip
    trainer.prepare(np.zeros((1, 1, 8, 8), np.float32), np.zeros(1, np.int64))
    return trainer


def saved_digits(folder: Path) -> Path:
    """Return the model file, written into the folder."""
    path = folder / "digits.tpm"
    digits_trainer().export().save(path)
    return path
