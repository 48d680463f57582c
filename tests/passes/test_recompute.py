"""Recomputation: the same bits from less memory, and onnxruntime's own profile says how much."""

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import nn, ops, optim, train
from triplane.unified_ir.autodiff import value_and_grad
from triplane.unified_ir.engines import engine
from triplane.unified_ir.engines.footprint import measured, predicted_footprint, within
from triplane.unified_ir.ir import TensorSpec
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.passes.clean import clean
from triplane.unified_ir.passes.fuse import fuse
from triplane.unified_ir.passes.memory import live
from triplane.unified_ir.passes.recompute import recompute

BATCH = 16
SIZES = {"N": BATCH}
CLOSE = 0.1


class Block(nn.Cell):
    def __init__(self, channels):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)

    def construct(self, x):
        return x + ops.gelu(self.norm(self.conv(x)))


class Tower(nn.Cell):
    def __init__(self):
        super().__init__()
        self.blocks = nn.CellList([Block(4) for _ in range(5)])
        self.head = nn.Dense(4, 3)

    def construct(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


@pytest.fixture(scope="module")
def step():
    """A training step, its arguments, and its results without recomputation."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(BATCH, 4, 12, 12)).astype(np.float32)
    y = rng.integers(0, 3, BATCH)
    trainer = train.Trainer(
        Tower(), loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.1, momentum=0.9)
    )
    trainer.prepare(x, y)
    function = trainer.train_function()
    state = trainer.state()
    given = {**{n: state[n] for n in trainer.state_names(function)}, "x": x, "y": y}
    return function, given, results(function, given)


def results(function, given):
    return engine("onnx").compile(function)(*(given[name] for name in function.param_names))


@pytest.mark.parametrize("share", [0.8, 0.6, 0.5])
def test_a_plan_keeps_the_budget_in_onnxruntimes_own_profile_and_the_bits(step, share):
    function, given, wanted = step
    budget = int(predicted_footprint(function, SIZES).peak_bytes * share)
    made, plan = within(function, budget, SIZES)
    assert plan.fits, str(plan)
    assert plan.least_bytes <= plan.peak_bytes <= budget
    peak = measured(made, given).peak_bytes
    assert abs(peak - plan.peak_bytes) <= CLOSE * peak, (peak, str(plan))
    for a, b in zip(results(made, given), wanted, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_what_is_foretold_is_what_is_measured(step):
    function, given, _ = step
    peak = measured(function, given).peak_bytes
    assert abs(predicted_footprint(function, SIZES).peak_bytes - peak) <= CLOSE * peak


def test_a_budget_that_nothing_can_keep_is_refused_with_the_least(step):
    with pytest.raises(InvalidInput, match=r"needs [0-9,]+ bytes .* and the budget is 1,000"):
        recompute(step[0], 1000, SIZES)


def test_a_budget_that_is_kept_already_changes_nothing(step):
    function = step[0]
    made, plan = recompute(function, 1 << 30, SIZES)
    assert plan.again == ()
    assert [n.op for n in made.nodes] == [n.op for n in fuse(clean(function)).nodes]
    assert "0 nodes run again" in str(plan)
    assert plan.peak_bytes == plan.before_bytes


def test_cleaning_does_not_undo_a_plan(step):
    function = step[0]
    made, plan = recompute(function, recompute(function, 1 << 30, SIZES)[1].peak_bytes // 2, SIZES)
    assert plan.again
    cleaned = clean(made)
    peak = live(cleaned.nodes, cleaned.results, SIZES).peak_bytes
    assert peak <= 1.01 * plan.peak_bytes  # sizes that are computed twice are joined


def test_a_tensor_lives_from_its_maker_to_its_last_taker():
    build = Build(TABLE, "f")
    with build:
        x = build.param("x", TensorSpec((4,)))
        a = ops.sin(x)  # 16 bytes to the end of the sum
        b = ops.exp(ops.reshape(a, (2, 2)))  # a view costs nothing
        c = b.sum()
        made = {"y": a * c}
    function = build.finish(made)
    found = live(function.nodes, function.results, {})
    by_op = dict(zip((n.op.name for n in function.nodes), found.bytes_at, strict=True))
    assert by_op["Sin"] == 16
    assert by_op["Reshape"] == 16
    assert by_op["Exp"] == 32
    assert by_op["ReduceSum"] == 36
    assert by_op["Mul"] == 36


def test_a_draw_is_never_made_twice():
    build = Build(TABLE, "f")
    with build:
        x = build.param("x", TensorSpec((64, 64)))
        mask = TABLE["", "RandomNormalLike"](x)
        y = ops.tanh(x @ x)
        wide = ops.concat([y, y, y, y], 0).sum()
        made = {"y": (y * mask).sum() + wide}
    function = build.finish(made)
    lean, _ = recompute(function, recompute(function, 1 << 40, {})[1].least_bytes, {})
    assert [n.op.name for n in lean.nodes].count("RandomNormalLike") == 1


def test_a_size_that_is_not_given_is_named(step):
    with pytest.raises(InvalidInput, match="the size of N in float32"):
        recompute(step[0], 1 << 30, {})


def differentiated(seed):
    """A random function of a matrix, with its gradient; values of its argument."""
    draw = np.random.default_rng(seed)
    build = Build(TABLE, "f")
    with build:
        made = [build.param("x", TensorSpec((6, 6)))]
        for _ in range(24):
            a, b = (made[draw.integers(max(0, len(made) - 6), len(made))] for _ in range(2))
            kind = draw.integers(5)
            made.append(
                (ops.tanh(a), a * b, ops.sigmoid(a) + b, a @ b * 0.3, a.reshape(6, 6))[kind]
            )
        result = {"y": sum(m.mean() for m in made[-4:])}
    function = value_and_grad(build.finish(result), ["x"])
    return function, [draw.normal(size=(6, 6)).astype(np.float32)]


@pytest.mark.parametrize("seed", range(8))
def test_random_programs_keep_their_results(seed):
    function, given = differentiated(seed)
    plan = recompute(function, 1 << 40, {})[1]
    made, less = recompute(function, max(plan.least_bytes, plan.peak_bytes // 2), {})
    assert less.peak_bytes < plan.peak_bytes
    wanted = engine("reference").compile(function)(*given)
    for a, b in zip(engine("reference").compile(made)(*given), wanted, strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(engine("onnx").compile(made)(*given), wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)  # it joins other nodes
