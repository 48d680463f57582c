"""Losses of the first 100 steps of each network against PyTorch's, from equal starts.

python benchmarks/losses.py [CASE...]; PyTorch's losses are committed (`oracles/losses.py`). A
difference is relative to PyTorch's loss; what float32 and float64 differ by within PyTorch stands
beside it, which is what rounding alone makes of a run this long.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import networks
import numpy as np
from harness import table
from side_ours import side

GOLDEN: Final = Path(__file__).parents[1] / "tests" / "golden" / "train" / "losses.npz"
STEPS: Final = 100
HEADS: Final = (
    "network", "loss at 1", "at 100, ours", "PyTorch", "largest difference in 10 steps",
    "in 100 steps", "PyTorch float32 to float64 in 100",
)  # fmt: skip


def ours(case: networks.Case) -> networks.Array:
    """(STEPS,) losses of the trainer's step."""
    step, _ = side(case)
    return np.array([step(*batch) for batch in itertools.islice(networks.batches(case), STEPS)])


def apart(a: networks.Array, b: networks.Array) -> networks.Array:
    """|a - b| / b by step."""
    found: networks.Array = np.abs(a - b) / b
    return found


def row(name: str, found: networks.Array) -> tuple[str, ...]:
    """One line of the table."""
    with np.load(GOLDEN) as held:
        single, double = held[f"{name}/float32"], held[f"{name}/float64"]
    gaps = apart(found, single)
    return (
        name,
        f"{single[0]:.4f}",
        f"{found[-1]:.4f}",
        f"{single[-1]:.4f}",
        f"{gaps[:10].max():.0e}",
        f"{gaps.max():.0e}",
        f"{apart(double, single).max():.0e}",
    )


def main(cases: Sequence[str] = tuple(networks.CASES)) -> str:
    """The table for some cases, all by default."""
    return table(HEADS, [row(name, ours(networks.CASES[name])) for name in cases])


if __name__ == "__main__":
    print(main(sys.argv[1:] or tuple(networks.CASES)))
