"""Functions rewritten node by node, or where a rule finds a pattern."""

import numpy as np
import pytest

from triplane.unified_ir import TensorSpec, ops
from triplane.unified_ir.frontend import custom_vjp, trace
from triplane.unified_ir.ir import Module
from triplane.unified_ir.ir.types import float16
from triplane.unified_ir.ops.check import check_function
from triplane.unified_ir.ops.evaluate import run_function
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.passes.clean import share
from triplane.unified_ir.passes.rewrite import Rewriter, apply_rule, node_of
from triplane.unified_ir.quantize import artifact, freeze

X = TensorSpec((2, 3))


def gelu_of_sum(x, y):
    return ops.gelu(x + y) * (x + 1.0)


def test_a_function_with_other_parts_keeps_the_rest():
    f = trace(gelu_of_sum, X, X)
    other = f.with_(nodes=f.nodes[::-1], result_names=["z"])
    assert (other.name, other.params, other.results) == (f.name, f.params, f.results)
    assert (other.result_names, other.nodes) == (("z",), f.nodes[::-1])
    assert f.with_().nodes == f.nodes


def test_producers_and_reads_cover_every_value():
    f = trace(gelu_of_sum, X, X)
    assert {v for n in f.nodes for v in n.outputs} == f.producers().keys()
    assert all(v in n.outputs for v, n in f.producers().items())
    reads = f.reads()
    assert reads[f.params[0]] == 2
    assert reads[f.results[0]] == 1


class Spreading(Rewriter):
    def visit(self, node):
        self.note(node)
        body = self.body(node) if node.op.name == "Gelu" else None
        if body is None:
            self.keep(node)
        else:
            self.spread(node, body)


def test_a_body_in_place_of_its_node_computes_the_same():
    f = trace(gelu_of_sum, X, X)
    spread = Spreading().rewrite(f)
    assert "Gelu" not in {n.op.name for n in spread.nodes}
    args = [np.random.default_rng(k).standard_normal((2, 3)).astype(np.float32) for k in (0, 1)]
    (wanted,), (found,) = (run_function(TABLE, g, args) for g in (f, spread))
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)


@custom_vjp(lambda x, y, g: x * 0.0 + y * g)
def positives(x):
    """How many elements are positive; the size of `compress` is known only at run time."""
    return ops.full(ops.compress(x, x > 0.0).shape, 1.0, "float32").sum()


@custom_vjp(lambda x, y, g: x * 0.0 + y * g)
def balance(x):
    # The first node is opened in turn, and a later one introduces a size as well.
    return positives(x) - ops.full(ops.compress(x, x < 0.0).shape, 1.0, "float32").sum()


def balance_in_a_branch(x):
    return ops.cond(x.sum() > 0.0, lambda x: balance(x) + balance(-2.0 * x), lambda x: x.sum(), x)


class Opening(Rewriter):
    def visit(self, node):
        self.note(node)
        body = self.body(node) if node.op.domain else None
        self.keep(node) if body is None else self.spread(node, body)


@pytest.mark.parametrize(("of", "wanted"), [(balance, 4.0), (balance_in_a_branch, 0.0)])
def test_sizes_that_nested_bodies_introduce_keep_names_of_their_own(of, wanted):
    x = np.array([1, 2, 3, 4, 5, -1], np.float32)
    opened = trace(of, TensorSpec((6,)))
    for _ in range(3):  # names that an earlier rewriter gave are not given again
        opened = share(Opening().rewrite(opened))
        check_function(opened)
        assert run_function(TABLE, opened, [x])[0] == wanted


def test_a_frozen_function_keeps_apart_the_sizes_of_nested_bodies():
    function = trace(lambda x: {"y": balance(x)}, TensorSpec((6,)), name="predict")
    frozen = freeze(Module({"predict": function}, {"predict": "predict"}, {}, {}), "predict")
    x = np.array([1, 2, 3, 4, 5, -1], np.float32)
    assert artifact(frozen).session().run({"x": x})["y"] == 4.0


class Halving(Rewriter):
    def visit(self, node):
        self.cast(node.inputs[0], float16, node)
        self.keep(node)


def test_a_value_is_converted_once_however_many_nodes_read_it():
    f = trace(lambda x: ops.sin(x) + ops.cos(x), X)
    halved = Halving().rewrite(f)
    casts = [n.inputs[0] for n in halved.nodes if n.op.name == "Cast"]
    assert len(casts) == len(set(casts)) == 2


def never(view, node):
    return None


def test_a_rule_that_never_applies_leaves_the_function_itself():
    f = trace(gelu_of_sum, X, X)
    assert apply_rule(f, never) is f


def as_negated_sine(view, node):
    sine = view.node(node.inputs[0], "Sin") if node.op.name == "Neg" else None
    return None if sine is None else [node_of("Cos", sine.inputs, node.outputs[0], node)]


def test_a_pattern_is_found_only_where_nothing_else_reads_its_parts():
    alone = apply_rule(trace(lambda x: -ops.sin(x), X), as_negated_sine)
    assert [n.op.name for n in alone.nodes] == ["Cos"]

    def shared(x):
        sine = ops.sin(x)
        return -sine + sine

    function = trace(shared, X)
    assert apply_rule(function, as_negated_sine) is function
