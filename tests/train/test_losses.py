"""A hundred steps of each benchmark network against PyTorch's losses, from equal starts.

Bounds are relative to PyTorch's loss: over the first 10 steps, and over all 100. Where the second
is wide, PyTorch's own float64 run parts from its float32 run as far (batch normalization with
momentum at a high rate, maxima near ties), or Adam makes a step of what rounding leaves in a
gradient of the size of its epsilon.
"""

import importlib
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

# fmt: off
BOUNDS = {
    "MLP B64 momentum":      (2e-6, 2e-5),
    "LeNet B32 SGD":         (2e-6, 2e-5),
    "LeNet B128 SGD":        (2e-6, 2e-4),
    "LEAF CNN B10 SGD":      (2e-6, 3e-2),
    "LEAF CNN B32 SGD":      (2e-5, 3e-2),
    "CNN B32 Adam":          (2e-6, 5e-3),
    "ResNet-8 B32 momentum": (5e-3, 1.0),
    "Char LSTM B10 SGD":     (2e-6, 2e-5),
    "Transformer B16 Adam":  (2e-6, 2e-5),
}
# fmt: on
QUICK = ("MLP B64 momentum", "LeNet B32 SGD", "Transformer B16 Adam")


@pytest.fixture
def losses(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("losses")


def follows(losses, name):
    """Within the bounds; the run got somewhere where PyTorch's did."""
    with np.load(losses.GOLDEN) as held:
        expected = held[f"{name}/float32"]
    gaps = losses.apart(losses.ours(losses.networks.CASES[name]), expected)
    early, late = BOUNDS[name]
    assert gaps[:10].max() <= early
    assert gaps.max() <= late


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_a_hundred_losses_follow_pytorch(name, losses):
    follows(losses, name)


@pytest.mark.deep
@pytest.mark.parametrize("name", sorted(BOUNDS.keys() - set(QUICK)))
def test_a_hundred_losses_of_larger_networks_follow_pytorch(name, losses):
    follows(losses, name)


def test_every_network_of_the_benchmark_has_its_golden_and_its_bounds(losses):
    with np.load(losses.GOLDEN) as held:
        kept = {k.split("/")[0] for k in held.files} - {"torch"}
        assert all(len(held[k]) == 100 for k in held.files if k != "torch")
    assert kept == set(losses.networks.CASES) == BOUNDS.keys()
