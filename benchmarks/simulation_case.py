"""The study that both sides of `simulation.py` run; needs numpy only.

FedAvg over devices with 20 samples each: a round is five steps of SGD on all of a device's samples,
so nothing is drawn and both sides compute the same weights, to the rounding of float32.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

FEATURES: Final = 64
HIDDEN: Final = 8
CLASSES: Final = 10
SAMPLES: Final = 20
STEPS: Final = 5
LR: Final = 0.1
WEIGHTS: Final = FEATURES * HIDDEN + HIDDEN + HIDDEN * CLASSES + CLASSES

Weights = dict[str, Any]


def start() -> Weights:
    """The model that all begin with: matrices are (outputs, inputs)."""
    rng = np.random.default_rng(0)
    drawn = {"hidden": (HIDDEN, FEATURES), "head": (CLASSES, HIDDEN)}
    weights: Weights = {}
    for name, shape in drawn.items():
        scale = shape[1] ** -0.5
        weights[f"{name}.weight"] = (scale * rng.standard_normal(shape)).astype(np.float32)
        weights[f"{name}.bias"] = np.zeros(shape[0], np.float32)
    return weights


def samples(number: int) -> tuple[Any, Any]:
    """A device's x: (SAMPLES, FEATURES) float32 and y: (SAMPLES,) int64."""
    rng = np.random.default_rng(number)
    y = rng.integers(0, CLASSES, SAMPLES)
    centres = np.random.default_rng(0).standard_normal((CLASSES, FEATURES))
    x = centres[y] + rng.standard_normal((SAMPLES, FEATURES))
    return x.astype(np.float32), y


def trained(weights: Weights, x: Any, y: Any) -> tuple[Weights, float]:
    """Weights after a device's steps in numpy, and the mean loss of the steps."""
    w, losses = dict(weights), []
    for _ in range(STEPS):
        hidden = np.maximum(x @ w["hidden.weight"].T + w["hidden.bias"], 0)
        logits = hidden @ w["head.weight"].T + w["head.bias"]
        shifted = logits - logits.max(1, keepdims=True)
        logs = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
        losses.append(-logs[np.arange(len(y)), y].mean())
        g = np.exp(logs)
        g[np.arange(len(y)), y] -= 1
        g /= np.float32(len(y))
        back = (g @ w["head.weight"]) * (hidden > 0)
        gradients = {
            "hidden.weight": back.T @ x, "hidden.bias": back.sum(0),
            "head.weight": g.T @ hidden, "head.bias": g.sum(0),
        }  # fmt: skip
        w = {name: value - np.float32(LR) * gradients[name] for name, value in w.items()}
    return w, float(np.mean(losses))
