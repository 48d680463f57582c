"""Exact meta-gradients through embeddings and loops: an LSTM over sequences of any length."""

import numpy as np
import pytest

from triplane.unified_ir import nn, optim, train
from triplane.unified_ir.federated.algorithms import ALGORITHMS, plan_of
from triplane.unified_ir.federated.algorithms.objective import objective_of
from triplane.unified_ir.ir import TensorSpec
from triplane.unified_ir.runtime import Plan

from .given import HYPER, call

EPSILON = 1e-6


class Reader(nn.Cell):
    def __init__(self):
        super().__init__()
        self.letters = nn.Embedding(11, 5)
        self.memory = nn.LSTM(5, 6)
        self.head = nn.Dense(6, 3)

    def construct(self, x):
        _, (h, _) = self.memory(self.letters(x))
        return self.head(h)


def module(dtype):
    nn.seed(1)
    cell = Reader()
    for p in cell.parameters().values():
        p.array = p.array.astype(dtype)
    trainer = train.Trainer(cell, loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.1))
    trainer.prepare(TensorSpec(("N", "T"), "int64"), TensorSpec(("N",), "int64"))
    return trainer.export(("predict", "evaluate", "loss"))


def episode():
    """Support and query differ in number and in length."""
    rng = np.random.default_rng(0)
    return {
        "support.x": rng.integers(0, 11, (7, 4)), "support.y": rng.integers(0, 3, 7),
        "query.x": rng.integers(0, 11, (5, 6)), "query.y": rng.integers(0, 3, 5),
    }  # fmt: skip


@pytest.mark.slow
def test_the_meta_gradient_is_the_slope_through_a_loop():
    made = module("float64")
    function = ALGORITHMS["maml"].gradient(objective_of(made), HYPER.inner_steps)
    start = {k: t.array for k, t in made.state.items()}
    given = {**start, **episode(), "hyper.lr": np.asarray(HYPER.lr)}
    found = call(function, given)
    rng = np.random.default_rng(1)
    direction = {k: rng.standard_normal(x.shape) for k, x in start.items()}
    ahead, behind = (
        call(function, {**given, **{k: start[k] + s * EPSILON * direction[k] for k in start}})
        for s in (1, -1)
    )
    slope = float(ahead["loss"] - behind["loss"]) / (2 * EPSILON)
    wanted = sum(float((direction[k] * found[f"grad.{k}"]).sum()) for k in start)
    assert slope == pytest.approx(wanted, rel=1e-6)


@pytest.mark.slow
def test_a_device_takes_that_step_on_onnxruntime(tmp_path):
    path = tmp_path / "a.plan"
    plan_of(module("float32"), "maml", HYPER, path)
    plan = Plan.load(path)
    before = plan.state()
    plan.run("local_update", episode())
    function = ALGORITHMS["maml"].gradient(objective_of(module("float64")), HYPER.inner_steps)
    exact = {k: x.astype(np.float64) for k, x in before.items()}
    found = call(function, {**exact, **episode()})
    for k, x in plan.state("parameter").items():
        moved = (before[k] - x) / HYPER.meta_lr
        np.testing.assert_allclose(moved, found[f"grad.{k}"], rtol=5e-3, atol=5e-6, err_msg=k)
