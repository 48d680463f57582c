import numpy as np

from triplane.unified_ir import ops
from triplane.unified_ir.engines import engine
from triplane.unified_ir.ir import TensorSpec
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.passes.clean import clean, drop_dead, share


def function(body, **specs):
    build = Build(TABLE, "f")
    with build:
        made = body(**{k: build.param(k, spec) for k, spec in specs.items()})
    return build.finish(made)


def names(f):
    return [n.op.name for n in f.nodes if n.op.name != "Constant"]


VECTOR = TensorSpec((3,))


def test_dead_nodes_go_and_the_signature_stays():
    def body(x, unused):
        ops.exp(unused)
        return {"y": ops.sin(x)}

    f = drop_dead(function(body, x=VECTOR, unused=VECTOR))
    assert names(f) == ["Sin"]
    assert f.param_names == ("x", "unused")


def test_equal_expressions_are_computed_once():
    f = function(lambda x: {"a": ops.sin(x) + 1.0, "b": ops.sin(x) + 1.0}, x=VECTOR)
    cleaned = clean(f)
    assert names(cleaned) == ["Sin", "Add"]
    assert cleaned.result_names == ("a", "b")
    assert cleaned.results[0] is cleaned.results[1]


def test_equality_looks_at_attributes_operand_order_and_number_of_outputs():
    def body(x, y):
        return {
            "a": ops.concat([x, y]), "b": ops.concat([y, x]),
            "c": ops.leaky_relu(x, alpha=0.1), "d": ops.leaky_relu(x, alpha=0.2),
        }  # fmt: skip

    assert len(names(share(function(body, x=VECTOR, y=VECTOR)))) == 4

    def pools(x):
        pool = TABLE["", "MaxPool"]
        y, index = pool.all_outputs(x, outputs=2, kernel_shape=(2,))
        return {"y": y, "index": index, "z": pool(x, kernel_shape=(2,))}

    assert len(names(share(function(pools, x=TensorSpec((1, 1, 4)))))) == 2


def test_each_random_node_draws_its_own_numbers():
    noise = TABLE["", "RandomNormal"]
    f = function(lambda x: {"a": x + noise(shape=(3,)), "b": x + noise(shape=(3,))}, x=VECTOR)
    assert names(share(f)).count("RandomNormal") == 2


def test_large_constants_are_equal_by_content():
    table = np.arange(100, dtype=np.float32)

    def body(x):
        other = table.copy()
        other[50] += 1
        return {"a": x + table, "b": x + table.copy(), "c": x + other}

    f = clean(function(body, x=TensorSpec((100,))))
    assert names(f) == ["Add", "Add"]


def test_nodes_with_regions_are_left_apart():
    def body(x):
        loops = [ops.fori_loop(2, lambda _, c: ops.tanh(c), x) for _ in range(2)]
        return {"y": loops[0] + loops[1]}

    assert names(clean(function(body, x=VECTOR))).count("Loop") == 2


def test_cleaning_twice_changes_nothing_more_and_keeps_the_meaning():
    def body(x):
        y = ops.exp(x) * ops.exp(x)
        ops.log(y)
        return {"y": y + ops.exp(x), "x": x}

    f = function(body, x=VECTOR)
    once = clean(f)
    assert names(clean(once)) == names(once) == ["Exp", "Mul", "Add"]
    x = np.array([0.1, 0.2, 0.3], np.float32)
    for a, b in zip(
        engine("reference").compile(f)(x), engine("reference").compile(once)(x), strict=True
    ):
        np.testing.assert_array_equal(a, b)
