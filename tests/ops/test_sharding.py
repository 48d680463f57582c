# mypy: disable-error-code="arg-type"
"""Strategies written in code: which node gets one, and what is refused, with the user's line."""

from types import SimpleNamespace

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import TensorSpec, nn, ops, trace
from triplane.unified_ir.autodiff import value_and_grad
from triplane.unified_ir.engines.reference import ReferenceEngine
from triplane.unified_ir.ir.codec import decode_function, encode_function
from triplane.unified_ir.ir.parse import parse_function
from triplane.unified_ir.ir.text import function_text
from triplane.unified_ir.ops.inline import with_sizes
from triplane.unified_ir.passes.clean import clean
from triplane.unified_ir.passes.sharding import plan, report
from triplane.unified_ir.passes.sharding.problem import (
    with_dividing_strategies,
    with_strategies_outside,
)
from triplane.unified_ir.train.identity import of_function

X, W = TensorSpec(("N", 8)), TensorSpec((8, 12))
FULL = np.ones((8, 12))


def of(function, op):
    """The strategies of the nodes of an operator."""
    return [n.strategy for n in function.nodes if n.op.name == op]


def test_the_node_that_reads_the_operands_has_the_strategy():
    function = trace(ops.matmul.shard((4, 1), (1, 2)), X, W)
    assert of(function, "MatMul") == [((4, 1), (1, 2))]


@pytest.mark.parametrize(
    ("call", "op", "strategy"),
    [
        (lambda t: ops.relu.shard((2, 4))(t.x), "Relu", ((2, 4),)),
        (lambda t: ops.matmul.shard((1, 2), (2, 1))(t.x, FULL), "MatMul", ((1, 2), (2, 1))),
        (lambda t: ops.embedding.shard((1, 4), (2,))(t.w, np.array([1, 0])), "Gather",
         ((1, 4), (2,))),
        (lambda t: ops.concat.shard((2, 1), (2, 1))([t.x, t.x * 2.0], 1), "Concat",
         ((2, 1), (2, 1))),
        (lambda t: ops.matmul.shard((2, 1), (1, 4))(t.x, ops.transpose(t.x)), "MatMul",
         ((2, 1), (1, 4))),
        (lambda t: ops.mul.shard((2, 1), (2, 1))(t.x, t.x), "Mul", ((2, 1), (2, 1))),
        (lambda t: ops.add.shard((2, 4), (4,))(t.x, np.ones(8)), "Add", ((2, 4), (4,))),
        (lambda t: ops.sum.shard((2, 1))(t.x, 1), "ReduceSum", ((2, 1), (1,))),
    ],
)  # fmt: skip
def test_constants_and_axes_of_the_call_stay_whole(call, op, strategy):
    assert of(trace(lambda x, w: call(SimpleNamespace(x=x, w=w)), X, W), op) == [strategy]


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda t: ops.matmul.shard((4, 1))(t.x, t.w), "slices for 1 tensors, and the call has 2"),
        (lambda t: ops.matmul.shard((4,), (1, 1))(t.x, t.w), "has 2 axes; a strategy has a number"),
        (lambda t: ops.matmul.shard((1, 3), (3, 1))(t.x, t.w), "which 3 slices do not divide"),
        (lambda t: ops.matmul.shard((4, 1), (2, 1))(t.x, t.w), "are cut together"),
        (lambda t: ops.softmax.shard((1, 2))(t.x, 1), "axis 1 of operand 0 stays whole"),
        (lambda t: ops.matmul.shard(((4, 1), (1, 1)))(t.x, t.w), "whole numbers >= 1"),
        (lambda t: ops.matmul.shard((4, 0), (1, 1))(t.x, t.w), "whole numbers >= 1"),
        (lambda t: ops.matmul.shard((True, 1), (1, 1))(t.x, t.w), "whole numbers >= 1"),
        (lambda t: ops.matmul.shard()(t.x, t.w), "whole numbers >= 1"),
        (lambda t: ops.matmul.shard((8192, 1), (1, 1))(t.x, t.w), "at most 4096 in all"),
        (lambda t: ops.linear.shard((1, 2, 1), (1, 1))(ops.unsqueeze(t.x, 0), FULL.T),
         "no node of its own that reads all its tensors"),
        (lambda t: nn.ReLU().shard((1, 1), (1, 1))(t.x), "has slices for 2 tensors"),
        (lambda t: nn.ReLU().shard((1, 1, 1))(t.x), "has 2 axes"),
    ],
)  # fmt: skip
def test_what_cannot_be_split_is_refused_at_the_users_line(call, why):
    with pytest.raises(InvalidInput, match=why) as caught:
        trace(lambda x, w: call(SimpleNamespace(x=x, w=w)), X, W)
    assert f"test_sharding.py:{call.__code__.co_firstlineno}" in str(caught.value)


class Layer(nn.Cell):
    """A cell with a second input that is no tensor."""

    def construct(self, x, times, y):
        return x * times + y


def test_a_cell_cuts_its_tensors_before_it_reads_them():
    cell = Layer()
    function = trace(lambda x: cell.shard((4, 1), None)(x, 2.0, x * 1.0), X)
    assert of(function, "Identity") == [((4, 1),)]
    x = np.ones((2, 8), np.float32)
    assert np.array_equal(cell.shard((4, 1), None)(x, 2.0, x), np.full((2, 8), 3, np.float32))
    named = trace(lambda x: cell.shard((4, 1), (2, 1))(x, y=x * 1.0, times=2.0), X)
    assert of(named, "Identity") == [((4, 1),), ((2, 1),)]


def test_strategies_survive_cleaning_text_bytes_and_gradients():
    function = trace(
        lambda x, w: ops.relu.shard((4, 1))(ops.matmul.shard((4, 1), (1, 1))(x, w)).sum(), X, W
    )
    text = function_text(function)
    assert "MatMul(%x, %w) shard((4, 1), (1, 1))  # " in text
    for copy in (
        clean(function), parse_function(text), decode_function(encode_function(function)),
    ):  # fmt: skip
        assert function_text(copy) == text
    gradient = value_and_grad(function, wrt=["w"])
    assert of(gradient, "MatMul")[0] == ((4, 1), (1, 1))
    assert of(gradient, "Relu") == [((4, 1),)]
    assert not any(n.strategy for n in gradient.nodes if n.meta.scope.startswith("grad"))


def test_the_operands_of_a_differentiated_body_stay_cut():
    function = trace(lambda x, w: ops.gelu.shard((4, 2))(x @ w).sum(), X, W)
    gradient = value_and_grad(function, wrt=["w"])
    assert of(gradient, "Identity") == [((4, 2),)]
    assert not of(gradient, "Gelu")
    rng = np.random.default_rng(0)
    args = [rng.standard_normal((4, 8)).astype(np.float32), FULL[:8].astype(np.float32)]
    plain = value_and_grad(trace(lambda x, w: ops.gelu(x @ w).sum(), X, W), wrt=["w"])
    for a, b in zip(*(ReferenceEngine().compile(f)(*args) for f in (gradient, plain)), strict=True):
        assert np.array_equal(a, b)


def test_equal_nodes_of_different_strategies_are_not_merged():
    function = trace(lambda x: ops.exp.shard((2, 1))(x) + ops.exp.shard((1, 2))(x), X)
    assert of(clean(function), "Exp") == [((2, 1),), ((1, 2),)]


def test_a_strategy_changes_no_result_of_one_device():
    plain = trace(ops.matmul, X, W)
    split = trace(ops.matmul.shard((4, 1), (1, 2)), X, W)
    rng = np.random.default_rng(0)
    args = [rng.standard_normal((3, 8)).astype(np.float32), FULL[:8].astype(np.float32)]
    for function in (plain, split):
        (y,) = ReferenceEngine().compile(function)(*args)
        assert np.array_equal(y, args[0] @ args[1])


def test_a_run_goes_on_with_strategies_that_it_began_without():
    cell = Layer()
    plain = trace(lambda x: cell(x, 2.0, ops.exp(x)), X)
    split = trace(lambda x: cell.shard((4, 1), None)(x, 2.0, ops.exp.shard((2, 1))(x)), X)
    assert of(split, "Identity") == [((4, 1),)]
    assert of_function(split) == of_function(plain)


def test_the_planner_keeps_strategies_and_says_so():
    function = trace(
        lambda x, w: ops.relu(ops.matmul.shard((2, 2), (2, 1))(x, w)), X, W
    )  # fmt: skip
    best = plan(function, 4, sizes={"N": 64})
    assert best.strategies()[0] == ((2, 2), (2, 1))
    assert [n.is_pinned for n in best.nodes] == [True, False]
    (line,) = [t for t in report.table(best) if t.startswith("as written")]
    assert "MatMul tests/ops/test_sharding.py:" in line
    assert any("the strategy of this node" in t for t in report.explanation(best, 0))
    again = plan(best.with_strategies(), 4, sizes={"N": 64})
    assert again.strategies() == best.strategies()
    with pytest.raises(InvalidInput, match=r"no mesh of 6 devices \(\(6,\), .* has every split"):
        plan(function, 6, sizes={"N": 64})


def test_other_sizes_leave_a_strategy_that_does_not_divide_out():
    function = trace(ops.matmul.shard((4, 1), (1, 1)), X, W)
    fixed = with_sizes(function, {"N": 6})
    assert of(decode_function(encode_function(fixed)), "MatMul") == [((4, 1), (1, 1))]
    assert of(with_dividing_strategies(fixed, {}), "MatMul") == [()]
    assert of(with_dividing_strategies(function, {"N": 8}), "MatMul") == [((4, 1), (1, 1))]


def test_sizes_that_do_not_divide_the_results_leave_a_strategy_out():
    """The 4 rows of 2 samples have four equal slices, but not the 2 rows of the result."""
    rows = TensorSpec(("N", 4))
    function = trace(
        lambda x: ops.reshape.shard((4, 1))(ops.reshape(x, (-1, 2)), (-1, 4)), rows
    )  # fmt: skip
    for n, strategies in ((4, [((4, 1), (1,))]), (2, [])):
        left = with_dividing_strategies(function, {"N": n})
        assert [s for s in of(left, "Reshape") if s] == strategies


def test_a_strategy_inside_a_loop_is_refused_by_line():
    def loop(x):
        return ops.fori_loop(3, lambda _, y: ops.relu.shard((2, 1))(y), x)

    with pytest.raises(InvalidInput, match=r"Relu at .*test_sharding.py:\d+ .* loops and cond"):
        plan(trace(loop, X), 2, sizes={"N": 4})


class Square(nn.Cell):
    """Its gradient is its own, and so is the split of its product."""

    def construct(self, x):
        return ops.mul.shard((4, 1), (4, 1))(x, x)

    def bprop(self, x, y, g):
        return 2.0 * x * g


def test_a_cell_with_a_bprop_is_opened_around_the_strategies_in_it():
    function = trace(lambda x: ops.relu(nn.ReLU()(Square()(x) + 1.0)), X)
    with pytest.raises(InvalidInput, match=r"Mul at .*test_sharding.py:[0-9]+ .* \(--out-model\)"):
        plan(function, 4, sizes={"N": 8})
    opened = with_strategies_outside(function)
    assert of(opened, "Mul") == [((4, 1), (4, 1))]
    place = next(n.meta.location for n in opened.nodes if n.op.name == "Mul")
    assert str(place).rpartition(":")[2] == str(Square.construct.__code__.co_firstlineno + 1)
    assert ((4, 1), (4, 1)) in plan(opened, 4, sizes={"N": 8}).strategies().values()
    x = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
    run = ReferenceEngine().compile
    np.testing.assert_array_equal(run(opened)(x)[0], run(function)(x)[0])


def test_a_cell_with_a_bprop_and_no_strategies_stays():
    class Plain(Square):
        def construct(self, x):
            return x * x

    function = trace(Plain(), X)
    assert function_text(with_strategies_outside(function)) == function_text(function)
