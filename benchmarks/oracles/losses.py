"""Golden losses of the benchmark's networks by PyTorch: tests/golden/train/losses.npz.

Run with the peers' interpreter: .venv-peers/bin/python -m benchmarks.oracles.losses
Of each case in `networks.CASES`, from its starting weights on its batches, the losses of the first
100 steps in float32, and of the same run in float64: how far these part is what rounding alone does
to a run of this length, so it says how closely anybody can be asked to follow.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

ROOT: Final = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import networks  # noqa: E402 - a module of the folder above, which both interpreters import
import side_pytorch  # noqa: E402

GOLDEN: Final = ROOT / "tests" / "golden" / "train" / "losses.npz"
STEPS: Final = 100


def losses(case: networks.Case, dtype: torch.dtype) -> Any:
    """(STEPS,) float64."""
    net = side_pytorch.network(case).to(dtype)
    trained = [p for p in net.parameters() if p.requires_grad]
    optimizer: Any = torch.optim.SGD(trained, lr=case.lr, momentum=case.momentum)
    if case.adam:
        optimizer = torch.optim.Adam(trained, lr=case.lr)
    found = []
    for x, labels in itertools.islice(networks.batches(case), STEPS):
        given = torch.from_numpy(x)
        given = given.to(dtype) if given.is_floating_point() else given
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(given), torch.from_numpy(labels))
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return np.array(found)


def main() -> None:
    """Writes the file."""
    torch.set_num_threads(1)
    made: dict[str, Any] = {"torch": np.array(torch.__version__)}
    for name, case in networks.CASES.items():
        made[f"{name}/float32"] = losses(case, torch.float32)
        made[f"{name}/float64"] = losses(case, torch.float64)
    np.savez_compressed(GOLDEN, **made)


if __name__ == "__main__":
    main()
