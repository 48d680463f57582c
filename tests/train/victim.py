"""A training process to be killed: `victim.py FOLDER` trains with checkpoints, says each step."""

import sys
from pathlib import Path

from tests.train.models import QUIET, data, trainer

from triplane.unified_ir import train

EPOCHS, BATCH = 3, 6


class Say(train.Callback):
    """Waits for a line after each step, so that whoever kills decides when."""

    def on_step(self, run):
        sys.stdout.write(f"{run.step}\n")
        sys.stdout.flush()
        sys.stdin.readline()


def main(folder):
    made = trainer(callbacks=[Say()])
    checkpoint = train.Checkpoint(folder, every_steps=4)
    made.fit(data(), EPOCHS, batch_size=BATCH, checkpoint=checkpoint, **QUIET)
    made.save(Path(folder) / "final.tpc")


if __name__ == "__main__":
    main(sys.argv[1])
