"""Batch normalization without running statistics: meta-gradients through the batch's own."""

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import nn, ops
from triplane.unified_ir.federated.algorithms import ALGORITHMS, plan_of
from triplane.unified_ir.federated.algorithms.objective import objective_of
from triplane.unified_ir.runtime import Plan

from .given import HYPER, call, exported

META = sorted(name for name, row in ALGORITHMS.items() if row.episodes)
EPSILON = 1e-5
RNG = np.random.default_rng(2)
ROWS = {k: RNG.standard_normal((7, 4)) for k in ("support", "query")}
LABELS = {k: RNG.integers(0, 3, 7) for k in ROWS}
DIRECTION = RNG.standard_normal((5, 4))


class Net(nn.Cell):
    def __init__(self, **options):
        super().__init__()
        nn.seed(1)
        self.body, self.norm = nn.Dense(4, 5), nn.BatchNorm1d(5, **options)
        self.head = nn.Dense(5, 3)

    def construct(self, x):
        return self.head(ops.tanh(self.norm(self.body(x))))


def module(dtype):
    return exported(Net(track_running_stats=False), (4,), dtype)


def samples(part):
    return {"x": ROWS[part], "y": LABELS[part]}


def test_a_meta_gradient_is_the_slope_through_the_inner_step():
    net = module("float64")
    of, row = objective_of(net), ALGORITHMS["maml"]
    state = {k: t.array for k, t in net.state.items()}
    state |= {"hyper.lr": np.array(0.3), "hyper.meta_lr": np.array(0.3)}

    def objective(weight):
        given = {**state, "body.weight": weight}
        moved = call(row.adapt(of), {**given, **samples("support")})
        return float(call(net.entry("loss"), {**given, **moved, **samples("query")})["loss"])

    function = row.gradient(of, 1)
    batch = {f"{p}.{k}": a for p in ROWS for k, a in samples(p).items()}
    grads = call(function, {**state, **batch})
    weight = state["body.weight"]
    ahead, behind = (objective(weight + s * EPSILON * DIRECTION) for s in (1, -1))
    slope = (ahead - behind) / (2 * EPSILON)
    assert slope == pytest.approx((grads["grad.body.weight"] * DIRECTION).sum(), rel=1e-6)


@pytest.mark.parametrize("name", META)
def test_a_meta_algorithm_takes_it_and_says_so_where_statistics_are_tracked(name, tmp_path):
    plan_of(module("float32"), name, HYPER, tmp_path / "a.plan")
    assert not any("running" in k for k in Plan.load(tmp_path / "a.plan").roles)
    with pytest.raises(InvalidInput, match="track_running_stats=False"):
        plan_of(exported(Net(), (4,)), name, HYPER, tmp_path / "b.plan")
