"""Functions rewritten node by node, or where a rule finds a pattern."""

import numpy as np

from triplane.unified_ir import TensorSpec, ops
from triplane.unified_ir.frontend import trace
from triplane.unified_ir.ir.types import float16
from triplane.unified_ir.ops.evaluate import run_function
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.passes.rewrite import Rewriter, apply_rule, node_of

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
