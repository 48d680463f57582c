"""Golden training runs by PyTorch: tests/golden/train/NAME.npz, 20 steps each.

Run with the peers' interpreter: .venv-peers/bin/python -m benchmarks.oracles.train
A file holds the starting state, the batches, each step's loss and the state at the end, under the
names our cells give them. The last batch of five is smaller; images lie on a constant background,
so that maxima are tied.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn

FOLDER: Final = Path(__file__).parents[2] / "tests" / "golden" / "train"
STEPS: Final = 20
SIZES: Final = (12, 12, 12, 12, 5)


class LastState(nn.Module):
    """An LSTM over a sequence, then a linear layer of its last state; one bias, as ours."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(3, 8, batch_first=True)
        nn.init.zeros_(self.rnn.bias_hh_l0)
        self.rnn.bias_hh_l0.requires_grad = False
        self.head = nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        """x: (N, T, 3) -> (N, 4)."""
        return self.head(self.rnn(x)[1][0][0])


def mlp() -> tuple[nn.Module, dict[str, str], Any]:
    """Two layers with tanh; SGD with momentum."""
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
    names = {k: k for k in model.state_dict()}
    return model, names, torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def cnn() -> tuple[nn.Module, dict[str, str], Any]:
    """Convolution, batch normalization, ReLU, pooling, linear; Adam.

    No bias before the normalization: its gradient is zero but for rounding, which Adam scales up.
    """
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding="same", bias=False), nn.BatchNorm2d(4), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4 * 3 * 3, 4),
    )  # fmt: skip
    names = {k: k for k in model.state_dict() if not k.endswith("num_batches_tracked")}
    return model, names, torch.optim.Adam(model.parameters(), lr=0.02)


def lstm() -> tuple[nn.Module, dict[str, str], Any]:
    """An LSTM and a linear layer; AdamW."""
    model = LastState()
    names = {
        "rnn.weight_ih_l0": "rnn.weight_ih", "rnn.weight_hh_l0": "rnn.weight_hh",
        "rnn.bias_ih_l0": "rnn.bias", "head.weight": "head.weight", "head.bias": "head.bias",
    }  # fmt: skip
    used = [p for p in model.parameters() if p.requires_grad]
    return model, names, torch.optim.AdamW(used, lr=0.02, weight_decay=0.1)


CASES: Final = {"mlp": (mlp, (6,)), "cnn": (cnn, (1, 6, 6)), "lstm": (lstm, (7, 3))}


def batches(shape: tuple[int, ...]) -> tuple[Any, Any]:
    """All samples of an epoch, x: (53, *shape), y: (53,)."""
    rng = np.random.default_rng(11)
    n = sum(SIZES)
    x = rng.standard_normal((n, *shape)).astype(np.float32)
    if len(shape) == 3:
        x *= rng.random((n, *shape)) < 0.5
    return x, rng.integers(0, 4, n)


def run(name: str) -> dict[str, Any]:
    """Everything the file holds."""
    torch.manual_seed(1)
    make, shape = CASES[name]
    model, names, optimizer = make()
    x, y = batches(shape)
    made = {"x": x, "y": y, "sizes": np.array(SIZES), "torch": np.array(torch.__version__)}
    made |= _state("start", model, names)
    losses = []
    ends = np.cumsum(SIZES)
    for t in range(STEPS):
        end = int(ends[t % len(SIZES)])
        rows = slice(end - SIZES[t % len(SIZES)], end)
        loss = nn.functional.cross_entropy(model(torch.tensor(x[rows])), torch.tensor(y[rows]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    logits = model(torch.tensor(x)).detach().numpy()
    return made | _state("end", model, names) | {"losses": np.array(losses), "logits": logits}


def _state(when: str, model: nn.Module, names: Mapping[str, str]) -> dict[str, Any]:
    held = model.state_dict()
    return {f"{when}/{ours}": held[theirs].numpy().copy() for theirs, ours in names.items()}


def main() -> None:
    """Writes the files."""
    torch.set_num_threads(1)
    for name in CASES:
        np.savez_compressed(FOLDER / f"{name}.npz", **run(name))


if __name__ == "__main__":
    main()
