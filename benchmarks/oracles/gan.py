"""Golden alternating training of two networks by PyTorch: tests/golden/train/gan.npz.

Run with the peers' interpreter: .venv-peers/bin/python -m benchmarks.oracles.gan
The critic learns by SGD with momentum, then the generator by Adam through the critic. The file
holds both starting states, noise and real samples of each step, the gradients of the first step,
each step's losses and both states at the end, under the names that our cells give them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.nn.functional import softplus

FILE: Final = Path(__file__).parents[2] / "tests" / "golden" / "train" / "gan.npz"
STEPS: Final = 12
ROWS: Final = 16


def network(inputs: int, outputs: int) -> nn.Sequential:
    """Two linear layers with tanh between them."""
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


def state(prefix: str, model: nn.Module) -> dict[str, Any]:
    """Return the arrays of a model."""
    return {f"{prefix}/{k}": v.detach().numpy().copy() for k, v in model.state_dict().items()}


def gradients(prefix: str, model: nn.Module) -> dict[str, Any]:
    """Return the gradients of a model's parameters."""
    return {f"{prefix}/{k}": p.grad.numpy().copy() for k, p in model.named_parameters()}  # type: ignore[union-attr]


def run() -> dict[str, Any]:
    """Return everything the file holds."""
    torch.manual_seed(1)
    rng = np.random.default_rng(5)
    generator, critic = network(3, 2), network(2, 1)
    of_generator = torch.optim.Adam(generator.parameters(), lr=0.02)
    of_critic = torch.optim.SGD(critic.parameters(), lr=0.1, momentum=0.9)
    noise = rng.standard_normal((STEPS, ROWS, 3)).astype(np.float32)
    real = (rng.standard_normal((STEPS, ROWS, 2)) * 0.5 + [2.0, -1.0]).astype(np.float32)
    arrays = {"noise": noise, "real": real, "torch": np.array(torch.__version__)}
    arrays |= state("start/generator", generator) | state("start/critic", critic)
    losses = []
    for t in range(STEPS):
        z, x = torch.tensor(noise[t]), torch.tensor(real[t])
        of_critic.zero_grad()
        judged = softplus(-critic(x)).mean() + softplus(critic(generator(z).detach())).mean()
        judged.backward()
        if t == 0:
            arrays |= gradients("grad/critic", critic)
        of_critic.step()
        of_generator.zero_grad()
        fooled = softplus(-critic(generator(z))).mean()
        fooled.backward()
        if t == 0:
            arrays |= gradients("grad/generator", generator)
        of_generator.step()
        losses.append([judged.item(), fooled.item()])
    arrays |= state("end/generator", generator) | state("end/critic", critic)
    return arrays | {"losses": np.array(losses)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    np.savez_compressed(FILE, **run())
