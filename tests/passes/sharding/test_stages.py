"""Pipeline stages: the cut is the best one, and the parts compute what the whole does."""

import json
from itertools import combinations, pairwise

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import nn, ops, optim, train
from triplane.unified_ir.engines.reference import ReferenceProgram
from triplane.unified_ir.ir.types import TensorSpec
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.passes.sharding import LinkCost, Topology
from triplane.unified_ir.passes.sharding.planner import MARGIN
from triplane.unified_ir.passes.sharding.stage_report import stage_record, stage_table
from triplane.unified_ir.passes.sharding.stages import (
    Cuts,
    best_bounds,
    microbatches_of,
    parts,
    plan_stages,
)
from triplane.unified_ir.train.pipelined import forward_of

SLOW = Topology(flops_per_s=1e9, memory_bytes_per_s=1e9, inside=LinkCost(1e-6, 1e9))


def chain(layers=6, size=8):
    """A chain of products whose input is added again at the end: the cuts send two values."""
    build = Build(TABLE, "chain")
    with build:
        x = build.param("x", TensorSpec(("N", size)))
        y = first = ops.relu(x)
        for i in range(layers):
            y = ops.relu(ops.matmul(y, build.param(f"w{i}", TensorSpec((size, size)))))
        sizes = build.dims([x.shape[0]]).reshape(()).cast("float32")
        tied = ops.matmul(y, build.param("w0.again", TensorSpec((size, size))))
        return build.finish({"y": tied + first, "mean": (y.sum() / sizes)})


@pytest.mark.parametrize("seed", range(20))
def test_the_cut_is_the_best_of_all(seed):
    rng = np.random.default_rng(seed)
    n, stages = int(rng.integers(4, 9)), int(rng.integers(2, 5))
    costs = rng.integers(1, 10, (n + 1, n + 1)).astype(float)
    costs[rng.random(costs.shape) < 0.2] = np.inf
    sent = rng.integers(1, 10, n + 1).astype(float)

    def value(bounds):
        return max(costs[q, p] for q, p in pairwise(bounds)), sum(sent[list(bounds[1:-1])])

    every = [(0, *inner, n) for inner in combinations(range(1, n), stages - 1)]
    least = min(map(value, every))
    chosen = best_bounds(lambda p: costs[:p, p], np.array([*sent[:n], 0.0]), stages)
    if np.isinf(least[0]):
        assert chosen is None
    else:
        assert value(chosen) == least


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_the_stages_together_compute_the_whole(stages):
    function = chain()
    rng = np.random.default_rng(stages)
    values = {p.name: rng.normal(size=(8, 8)).astype(np.float32) for p in function.params}
    values["x"] = values["x"][:4]
    plan = plan_stages(function, stages, 2, sizes={"N": 4}, topology=SLOW)
    for i in range(1, len(function.nodes) - stages):
        bounds = (*range(i, i + stages - 1), len(function.nodes))
        for cut in (plan.bounds, (0, *bounds)):
            have = dict(values)
            for part in parts(function, cut):
                inputs = [have[n] for n in part.function.param_names]
                # What a stage gets: the batch, its own parameters, and what the one before sends.
                assert set(part.function.param_names) == {"x", *part.received, *part.state}
                results = ReferenceProgram(part.function, ())(*inputs)
                have = values | dict(zip(part.function.result_names, results, strict=True))
            whole = ReferenceProgram(function, ())(*(values[n] for n in function.param_names))
            for name, x in zip(function.result_names, whole, strict=True):
                np.testing.assert_array_equal(have[name], x)


def test_a_stage_counts_a_parameter_once_and_others_share_it():
    build = Build(TABLE, "tied")
    with build:
        y = build.param("x", TensorSpec(("N", 8)))
        w = build.param("w", TensorSpec((8, 8)))
        for _ in range(4):
            y = ops.matmul(y, w)
        function = build.finish({"y": y})
    plan = plan_stages(function, 2, 2, sizes={"N": 2})
    assert [stage.parameter_bytes for stage in plan.stages] == [256, 256]
    assert plan.shared == ("w",)
    assert plan_stages(function, 1, 2, sizes={"N": 2}).shared == ()


def test_what_a_cut_sends_is_what_later_nodes_read():
    function = chain(layers=3)
    sent = Cuts(function, {"N": 4}, Topology()).sent_bytes
    pieces = parts(function, range(len(function.nodes) + 1))
    for position, part in enumerate(pieces[1:], 1):
        kinds = [part.function.param(n).type for n in part.received]
        assert sent[position] == sum(np.prod(t.concrete({"N": 4})) * 4 for t in kinds)


@pytest.mark.parametrize(("stages", "count"), [(1, 1), (2, 3), (4, 8), (5, 2)])
def test_the_schedule_keeps_the_order_of_a_pipeline(stages, count):
    trainer = train.Trainer(
        nn.Sequential(*[nn.Dense(8, 8) for _ in range(6)]),
        loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.1),
    )  # fmt: skip
    trainer.prepare(np.zeros((4, 8), np.float32), np.zeros(4, np.int64))
    plan = plan_stages(forward_of(trainer), stages, count, sizes={"N": 2}, copies=2)
    rows = plan.schedule()
    steps = {(s, job): t for s, row in enumerate(rows) for t, job in enumerate(row) if job}
    for m in range(1, count + 1):
        for s in range(stages):
            assert f"F{m}" in rows[s]
            if s:  # what the stage before sends arrives one step later; gradients the other way
                assert steps[s, f"F{m}"] == steps[s - 1, f"F{m}"] + 1
                assert steps[s - 1, f"B{m}"] == steps[s, f"B{m}"] + 1
            assert steps[s, f"B{m}"] > steps[s, f"F{m}"]
    assert len(steps) == 2 * stages * count
    assert plan.bubble == pytest.approx((stages - 1) / (count + stages - 1))
    assert plan.seconds == (count + stages - 1) * max(stage.seconds for stage in plan.stages)


def test_the_schedule_of_two_stages_by_hand():
    plan = plan_stages(chain(), 2, 3, sizes={"N": 4}, copies=2)
    assert plan.schedule() == [
        ["F1", "F2", "F3", "", "", "B1", "B2", "B3"],
        ["", "F1", "F2", "F3", "B1", "B2", "B3", ""],
    ]
    lines = list(stage_table(plan))
    assert "stage 1 F1 F2 F3 .  .  B1 B2 B3" in lines
    assert "bubble           25.0% of the time a device waits: (S-1)/(M+S-1) = 1/4" in lines
    assert max(map(len, stage_table(plan_stages(chain(), 5, 999, sizes={"N": 1})))) <= 80
    record = json.loads(json.dumps(stage_record(plan)))
    assert [s["nodes"] for s in record["stages"]] == [list(x) for x in pairwise(plan.bounds)]


def test_memory_is_a_limit():
    function = chain(layers=8, size=32)
    free = plan_stages(function, 2, 4, sizes={"N": 1}, copies=4, topology=SLOW)
    most = max(stage.memory_bytes for stage in free.stages)
    same = plan_stages(
        function, 2, 4, sizes={"N": 1}, copies=4, topology=SLOW, memory_bytes=round(most * MARGIN)
    )
    assert same.bounds == free.bounds
    with pytest.raises(InvalidInput, match=r"fits 50,000 bytes .* the smallest needs [\d,]+ with"):
        plan_stages(function, 2, 4, sizes={"N": 1}, copies=4, memory_bytes=50_000)


@pytest.mark.parametrize(
    ("stages", "count", "why"),
    [
        (40, 2, "too few for 40 stages"),
        (0, 2, "stages must be a number from 1 to 4096, got 0"),
        (2, 0, "microbatches is a whole number from 1 to 4,096, got 0"),
        (2, 2, "has the size N, which is not given"),
    ],
)
def test_what_cannot_be_cut_is_refused(stages, count, why):
    sizes = {} if "not given" in why else {"N": 4}
    with pytest.raises(InvalidInput, match=why):
        plan_stages(chain(), stages, count, sizes=sizes)


@pytest.mark.parametrize(
    ("rows", "wanted", "count"), [(32, 8, 8), (12, 8, 6), (7, 4, 1), (3, 8, 3)]
)
def test_microbatches_are_equal(rows, wanted, count):
    assert microbatches_of(rows, wanted) == count
