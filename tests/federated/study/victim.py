"""A study to be killed: `victim.py FOLDER KIND` says each round and waits for a line."""

import sys
from pathlib import Path

from tests.federated.study.given import Personalized, module, plain, shards, study

from triplane.unified_ir.federated.study import simulate

# fmt: off
KINDS = {
    "fedadam":  (plain,        {"algorithm": "fedadam", "evaluate_every": 1}),
    "personal": (Personalized, {"evaluate_every": 2, "compression": "int8", "devices": 3}),
}
# fmt: on


def say(row):
    sys.stdout.write(f"{row.number}\n")
    sys.stdout.flush()
    sys.stdin.readline()


def main(folder, kind):
    cell, options = KINDS[kind]
    simulate(
        module(cell), shards(), study(**options), unseen=shards(1, first=8), folder=Path(folder),
        on_round=say,
    )  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
