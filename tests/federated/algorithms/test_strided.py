"""Exact meta-gradients through convolutions that stride, as the writers' study has them."""

import numpy as np
import pytest

from triplane.unified_ir import nn, ops
from triplane.unified_ir.federated.algorithms import ALGORITHMS, plan_of
from triplane.unified_ir.federated.algorithms.hyper import RATE
from triplane.unified_ir.federated.algorithms.objective import objective_of
from triplane.unified_ir.runtime import Plan

from .given import HYPER, call, exported

EPSILON = 1e-6
META = sorted(name for name, row in ALGORITHMS.items() if row.episodes and name != "fomaml")
"""fomaml's gradient is no slope at the start; test_gradients has its own."""


class Strided(nn.Cell):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 3, 5, stride=2, padding=2)
        self.second = nn.Conv2d(3, 4, 3, stride=2, padding=1)
        self.head = nn.Dense(4 * 2 * 2, 3)

    def construct(self, x):
        x = (x - 0.13) / 0.31
        x = ops.relu(self.second(ops.relu(self.first(x))))
        return self.head(ops.flatten(x))


def module(dtype):
    nn.seed(3)
    return exported(Strided(), (1, 7, 7), dtype)


def episode(dtype):
    """The same numbers in either precision."""
    rng = np.random.default_rng(2)
    found = {}
    for part, n in (("support", 6), ("query", 4)):
        found[f"{part}.x"] = rng.random((n, 1, 7, 7)).astype(np.float32).astype(dtype)
        found[f"{part}.y"] = rng.integers(0, 3, n)
    return found


def given(of, dtype):
    state = {k: t.array for k, t in of.state.items()}
    rates = {RATE + path: np.full_like(of.state[path].array, HYPER.lr) for path in of.trained}
    return {**state, **rates, "hyper.lr": np.asarray(HYPER.lr, dtype)}


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", META)
def test_the_meta_gradient_is_the_slope(algorithm):
    of = objective_of(module("float64"))
    function = ALGORITHMS[algorithm].gradient(of, HYPER.inner_steps)
    start = {**given(of, "float64"), **episode("float64")}
    found = call(function, start)
    moving = [name.removeprefix("grad.") for name in found if name.startswith("grad.")]
    rng = np.random.default_rng(1)
    direction = {k: rng.standard_normal(start[k].shape) for k in moving}
    ahead, behind = (
        call(function, {**start, **{k: start[k] + s * EPSILON * direction[k] for k in moving}})
        for s in (1, -1)
    )
    slope = float(ahead["loss"] - behind["loss"]) / (2 * EPSILON)
    wanted = sum(float((direction[k] * found[f"grad.{k}"]).sum()) for k in moving)
    assert slope == pytest.approx(wanted, rel=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", META)
def test_a_device_takes_that_step_on_onnxruntime(tmp_path, algorithm):
    path = tmp_path / "a.plan"
    plan_of(module("float32"), algorithm, HYPER, path)
    plan = Plan.load(path)
    before = plan.state()
    plan.run("local_update", episode("float32"))
    of = objective_of(module("float64"))
    function = ALGORITHMS[algorithm].gradient(of, HYPER.inner_steps)
    exact = {k: x.astype(np.float64) for k, x in before.items()}
    found = call(function, {**exact, **episode("float64")})
    for k, x in plan.state("parameter").items():
        moved = (before[k] - x) / HYPER.meta_lr
        np.testing.assert_allclose(moved, found[f"grad.{k}"], rtol=5e-3, atol=1e-5, err_msg=k)
