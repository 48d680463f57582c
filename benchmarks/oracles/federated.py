"""Golden gradients of federated algorithms by PyTorch: tests/golden/federated/NAME.npz, float64.

Run with the peers' interpreter: .venv-peers/bin/python -m benchmarks.oracles.federated [FOLDER]
A file holds the state, support and query (of different sizes), anchors, rates, and for each
algorithm the loss and the gradient by parameter: `create_graph=True` through three inner steps.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.func import functional_call

FOLDER: Final = Path(__file__).parents[2] / "tests" / "golden" / "federated"
STEPS: Final = 3
LR: Final = 0.4
PROXIMAL: Final = 0.3
SUPPORT, QUERY, CLASSES = 7, 5, 3

Weights = Mapping[str, Any]


def mlp() -> nn.Module:
    """Two layers with tanh."""
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def cnn() -> nn.Module:
    """Two convolutions with ReLU and pooling, then a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding="same"), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 5, 3, padding="same"), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(5 * 2 * 2, CLASSES),
    )  # fmt: skip


CASES: Final = {"mlp": (mlp, (6,)), "cnn": (cnn, (1, 8, 8))}


class Task:
    """One model, one device's samples."""

    def __init__(self, name: str) -> None:
        make, shape = CASES[name]
        torch.manual_seed(5)
        rng = np.random.default_rng(17)
        self.model = make().double()
        self.start = {k: v.detach().clone() for k, v in self.model.named_parameters()}
        self.support = self.samples(rng, SUPPORT, shape)
        self.query = self.samples(rng, QUERY, shape)
        near = {k: rng.standard_normal(v.shape) * 0.1 for k, v in self.start.items()}
        self.anchor = {k: v + torch.tensor(near[k]) for k, v in self.start.items()}
        self.rates = {
            k: torch.tensor(rng.uniform(0.1, 0.8, v.shape)) for k, v in self.start.items()
        }

    @staticmethod
    def samples(rng: np.random.Generator, n: int, shape: tuple[int, ...]) -> tuple[Any, Any]:
        """x: (n, *shape), y: (n,)."""
        return torch.tensor(rng.standard_normal((n, *shape))), torch.tensor(
            rng.integers(0, CLASSES, n)
        )

    def loss(self, w: Weights, samples: tuple[Any, Any]) -> Any:
        """Mean cross entropy."""
        return nn.functional.cross_entropy(
            functional_call(self.model, dict(w), (samples[0],)), samples[1]
        )

    def inner(self, w: Weights, rates: Weights, *, exact: bool) -> Weights:
        """The weights after the inner steps."""
        for _ in range(STEPS):
            grads = torch.autograd.grad(
                self.loss(w, self.support), list(w.values()), create_graph=exact
            )
            w = {k: v - rates[k] * g for (k, v), g in zip(w.items(), grads, strict=True)}
        return w


def leaves(w: Weights) -> dict[str, Any]:
    """Weights to differentiate by."""
    return {k: v.detach().clone().requires_grad_() for k, v in w.items()}


def of(loss: Any, w: Weights) -> tuple[Any, dict[str, Any]]:
    """The loss and its gradient."""
    return loss, dict(zip(w, torch.autograd.grad(loss, list(w.values())), strict=True))


def batch(task: Task) -> tuple[Any, dict[str, Any]]:
    """The plain gradient on the support."""
    w = leaves(task.start)
    return of(task.loss(w, task.support), w)


def proximal(task: Task) -> tuple[Any, dict[str, Any]]:
    """The gradient of the loss and of the distance to the anchor; the loss alone."""
    w = leaves(task.start)
    away = sum(((w[k] - task.anchor[k]) ** 2).sum() for k in w)
    loss = task.loss(w, task.support)
    return loss, of(loss + PROXIMAL / 2 * away, w)[1]


def maml(task: Task) -> tuple[Any, dict[str, Any]]:
    """Exact through all inner steps."""
    w = leaves(task.start)
    rates = dict.fromkeys(w, LR)
    return of(task.loss(task.inner(w, rates, exact=True), task.query), w)


def fomaml(task: Task) -> tuple[Any, dict[str, Any]]:
    """The gradient where the inner steps end."""
    rates = dict.fromkeys(task.start, LR)
    end = leaves(task.inner(leaves(task.start), rates, exact=False))
    return of(task.loss(end, task.query), end)


def meta_sgd(task: Task) -> tuple[Any, dict[str, Any]]:
    """By weights and by rates."""
    w, rates = leaves(task.start), leaves(task.rates)
    loss = task.loss(task.inner(w, rates, exact=True), task.query)
    both = {**w, **{f"rate.{k}": v for k, v in rates.items()}}
    return of(loss, both)


# fmt: off
ALGORITHMS: Final[Mapping[str, Callable[[Task], tuple[Any, dict[str, Any]]]]] = {
    "fedavg": batch, "fedprox": proximal, "maml": maml, "fomaml": fomaml, "meta-sgd": meta_sgd,
}
# fmt: on


def run(name: str) -> dict[str, Any]:
    """Everything the file holds."""
    task = Task(name)
    made = {f"{part}/{k}": v.numpy() for part, tensors in (
        ("start", task.start), ("anchor", task.anchor), ("rate", task.rates),
    ) for k, v in tensors.items()}  # fmt: skip
    for part, (x, y) in (("support", task.support), ("query", task.query)):
        made |= {f"{part}/x": x.numpy(), f"{part}/y": y.numpy()}
    for algorithm, gradient in ALGORITHMS.items():
        loss, grads = gradient(task)
        made[f"{algorithm}/loss"] = loss.detach().numpy()
        made |= {f"{algorithm}/grad.{k}": g.detach().numpy() for k, g in grads.items()}
    numbers = {"lr": LR, "proximal": PROXIMAL, "steps": STEPS}
    return made | {k: np.asarray(v) for k, v in numbers.items()}


def main() -> None:
    """Writes the files."""
    torch.set_num_threads(1)
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    for name in CASES:
        np.savez_compressed(folder / f"{name}.npz", **run(name))


if __name__ == "__main__":
    main()
