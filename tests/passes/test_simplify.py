import numpy as np
import pytest

from triplane.unified_ir import ops
from triplane.unified_ir.autodiff import value_and_grad
from triplane.unified_ir.autodiff.reverse import record_vjp
from triplane.unified_ir.ir import TensorSpec
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.evaluate import run_function
from triplane.unified_ir.ops.inline import inline
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.passes.simplify import pool_before_relu, swish_of_product

PLANES = TensorSpec((2, 2, 6, 6), "float64")
WEIGHTS = np.random.default_rng(1).standard_normal(200)
X = np.random.default_rng(2).standard_normal((2, 2, 6, 6))


def function(body):
    build = Build(TABLE, "f")
    with build:
        made = body(build.param("x", PLANES))
    return build.finish(made if isinstance(made, dict) else {"y": made})


def names(f):
    return [n.op.name for n in f.nodes if n.op.name != "Constant"]


def gradient(f):
    """The gradient of a weighted sum, by the rules alone: no rewrite in between."""
    build = Build(TABLE, "g")
    with build:
        x = build.param("x", PLANES)
        (y,), pull = record_vjp(f, [x], [0])
        weight = WEIGHTS[: int(np.prod(y.type.concrete({})))].reshape(y.type.concrete({}))
        (g,) = pull([build.constant(weight)])
    return build.finish({"y": y, "g": g})


def planes(kind):
    rng = np.random.default_rng(0)
    x = rng.standard_normal(PLANES.concrete({}))
    return {"any": x, "ties": np.round(x), "negative": -np.abs(x), "zero": x * 0.0}[kind]


@pytest.mark.parametrize("kind", ["any", "ties", "negative", "zero"])
@pytest.mark.parametrize("window", [(2, 2, 0), (3, 2, 1), (2, 1, 0)])
def test_pooling_first_changes_no_value_and_no_gradient(kind, window):
    kernel, stride, padding = window
    f = function(lambda x: ops.max_pool(ops.relu(x), kernel, stride=stride, padding=padding))
    moved = pool_before_relu(f)
    assert names(moved) == ["MaxPool", "Relu"]
    for a, b in zip(
        run_function(TABLE, gradient(f), [planes(kind)]),
        run_function(TABLE, gradient(moved), [planes(kind)]),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


def test_what_something_else_reads_stays():
    def read_again(x):
        r = ops.relu(x)
        return {"r": r, "p": ops.max_pool(r, 2)}

    twice = function(read_again)
    assert pool_before_relu(twice) is twice
    other = function(lambda x: ops.max_pool(ops.tanh(x), 2))
    assert pool_before_relu(other) is other

    def with_positions(x):
        pool = TABLE["", "MaxPool"]
        y, at = pool.all_outputs(ops.relu(x), outputs=2, kernel_shape=(2, 2))
        return {"y": y, "at": at}

    positions = function(with_positions)
    assert pool_before_relu(positions) is positions


def test_a_chain_of_pools_moves_each_of_its_activations():
    def body(x):
        y = ops.max_pool(ops.relu(x), 2, stride=1)
        return ops.max_pool(ops.relu(y * 2.0 - 1.0), 2)

    f = function(body)
    assert names(pool_before_relu(f)) == ["MaxPool", "Relu", "Mul", "Sub", "MaxPool", "Relu"]
    build = Build(TABLE, "sum")
    with build:
        (y,) = inline(f, [build.param("x", PLANES)])
        total = y.sum()
    summed = value_and_grad(build.finish({"loss": total}))
    assert names(summed).index("MaxPool") < names(summed).index("Relu")


def test_a_product_with_its_own_sigmoid_has_the_gradient_of_silu():
    f = function(lambda x: x * ops.sigmoid(x))
    made = swish_of_product(f)
    assert names(made) == ["Swish"]
    found = run_function(TABLE, gradient(made), [X])
    for a, b in zip(found, run_function(TABLE, gradient(f), [X]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)
    passes = [n for n in names(gradient(made)) if n in {"Mul", "Add", "Sub"}]
    assert len(passes) == 5


@pytest.mark.parametrize(
    "body",
    [
        lambda x: {"y": (s := ops.sigmoid(x)) * x, "s": s},
        lambda x: ops.sigmoid(x + 1.0) * x,
        lambda x: ops.sigmoid(x).sum() * x,
    ],
)
def test_other_products_with_a_sigmoid_stay(body):
    f = function(body)
    assert swish_of_product(f) is f
