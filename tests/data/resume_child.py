"""Train a small network on augmented records until the end; for `test_resume`, which kills it.

Arguments: records, folder of checkpoints, workers, "threads" or "processes". Prints each step, and
at the end a digest of the weights.
"""

import hashlib
import sys
from pathlib import Path

from triplane.unified_ir import data, nn, optim, train
from triplane.unified_ir.data.transforms import Flip, Noise, Shift

EPOCHS = 4


def tell(what):
    """Write a line for the parent."""
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


class Steps(train.Callback):
    """Prints the number of each step, so that the parent kills within the run."""

    def on_step(self, run):
        tell(run.step)


def main(records: str, folder: str, workers: str, kind: str) -> None:
    """Train, or go on training."""
    nn.seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Dense(64, 16), nn.ReLU(), nn.Dense(16, 10))
    trainer = train.Trainer(
        net, loss=nn.SoftmaxCrossEntropy(), optimizer=optim.Adam(0.01), callbacks=[Steps()]
    )
    samples = (
        data.load(records)
        .where("y", "!=", 3)
        .then(Flip("x"), Shift("x", 1), Noise("x", 0.1))
        .shuffle()
        .batch(16)
    )
    if int(workers):
        samples = samples.load_with(int(workers), processes=kind == "processes")
    keeper = train.Checkpoint(Path(folder), every_steps=1)
    trainer.fit(samples, EPOCHS, checkpoint=keeper, progress="none")
    digest = hashlib.sha256()
    for name, parameter in sorted(net.parameters().items()):
        digest.update(name.encode() + parameter.array.tobytes())
    tell(f"digest {digest.hexdigest()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
