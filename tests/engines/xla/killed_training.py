"""A process to be killed: `killed_training.py FOLDER` trains in launches and says each step."""

import sys
from pathlib import Path

import numpy as np

from triplane.unified_ir import nn, optim, train

EPOCHS, BATCH, STEPS = 3, 4, 33


class Data:
    """Batches whose reading takes place on another thread, at times after the next launch began."""

    def __init__(self):
        rng = np.random.default_rng(0)
        self.x, self.y = rng.normal(size=(44, 3)).astype(np.float32), rng.integers(0, 2, 44)

    def batches(self, size, *, seed, epoch):
        order = np.random.default_rng([seed, epoch]).permutation(len(self))
        for start in range(0, len(self), size):
            yield self.x[order[start : start + size]], self.y[order[start : start + size]]

    def __len__(self):
        return len(self.x)


class Say(train.Callback):
    """Waits for a line after each step, so that whoever kills decides when."""

    def on_step(self, run):
        sys.stdout.write(f"{run.step}\n")
        sys.stdout.flush()
        sys.stdin.readline()


def trained(checkpoint=None, callbacks=()):
    nn.seed(0)
    trainer = train.Trainer(
        nn.Dense(3, 2), loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.1, momentum=0.9),
        engine="xla", steps_per_launch=3, callbacks=callbacks,
    )  # fmt: skip
    trainer.fit(Data(), EPOCHS, batch_size=BATCH, checkpoint=checkpoint, progress="none")
    return trainer


if __name__ == "__main__":
    folder = sys.argv[1]
    run = trained(train.Checkpoint(folder, every_steps=4), [Say()])
    run.save(Path(folder) / "final.tpc")
    trained().save(Path(folder) / "undisturbed.tpc")
