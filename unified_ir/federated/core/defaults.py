"""What holds where nobody says otherwise: one table for runs, studies, devices and their commands.

The figures are those that studies on images of digits found good (docs/federated.md). No import, so
that a command's help can show them.
"""

from typing import Final

ALGORITHM: Final = "fedavg"
ROUNDS: Final = 50

# A device's work in a round.
STEPS: Final = 5
BATCH_SIZE: Final = 32
SUPPORT: Final = 20
QUERY: Final = 20

# Rates and the like; see `algorithms.Hyper`.
LR: Final = 0.05
META_LR: Final = 0.05
INNER_STEPS: Final = 3
PROXIMAL: Final = 0.01
SERVER_LR: Final = 1.0
ADAM_LR: Final = 0.03
BETA1: Final = 0.9
BETA2: Final = 0.99
FLOOR: Final = 1e-3

# Who takes part in a round of a run, and for how long it goes on.
DEVICES: Final = 2
QUORUM: Final = 0.8
DEADLINE_S: Final = 600.0
PATIENCE_S: Final = 60.0

KEEP: Final = 0.1
"""Share of entries that `top-k` sends."""
HELD_OUT: Final = 0.2
"""Share of a device's samples that are never learned from."""
