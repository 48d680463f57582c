"""Default options of runs, studies, devices and their commands.

The values did well in studies on images of digits (docs/federated.md). The defaults of an
algorithm's hyperparameters are in its row (`algorithms.table`).
"""

from typing import Final

ALGORITHM: Final = "fedavg"
ROUNDS: Final = 50

# A device's work in a round.
STEPS: Final = 5
BATCH_SIZE: Final = 32
SUPPORT: Final = 20
QUERY: Final = 20

# Who takes part in a round of a run, and for how long it goes on.
DEVICES: Final = 2
QUORUM: Final = 0.8
DEADLINE_S: Final = 600.0
PATIENCE_S: Final = 60.0

# What a masked round tolerates: shares of its devices, and the probability that it does not hold.
LOST_SHARE: Final = 0.1
COLLUDING_SHARE: Final = 0.1
MASK_FAILURE: Final = 1e-6

KEEP: Final = 0.1
"""Share of entries that `top-k` sends."""
HELD_OUT: Final = 0.2
"""Share of a device's samples that are kept for scoring."""
