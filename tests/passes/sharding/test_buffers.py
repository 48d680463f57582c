"""What a compiler holds for a graph: copies for convolutions, nothing for what is folded."""

from triplane.unified_ir import ops
from triplane.unified_ir.ir.types import TensorSpec
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.passes.sharding import plan_with_layouts

KIB = 1024


def temporaries(make, **shapes):
    """Bytes of temporaries, results included, on one device."""
    build = Build(TABLE, "graph")
    with build:
        y = make(*(build.param(n, TensorSpec(shape)) for n, shape in shapes.items()))
    function = build.finish({"y": y})
    whole = {p.name: (-1,) for p in function.params}
    return plan_with_layouts(function, (1,), whole).memory.temporaries


def test_transpositions_that_products_read_take_no_memory():
    shapes = {"x": (16, 64), "w": (32, 64)}
    result = 16 * 32 * 4
    assert temporaries(lambda x, w: x @ w.T, **shapes) == result
    # Another reader needs the transposed tensor itself.
    assert temporaries(lambda w: w.T.sum(0), w=(32, 64)) == 64 * 32 * 4 + 32 * 4


def test_elementwise_results_take_the_memory_of_what_they_read_last():
    x = {"x": (KIB,)}
    assert temporaries(lambda x: ops.tanh(ops.exp(ops.tanh(x))), **x) <= 2 * 4 * KIB

    # The first result is read again at the end, so the second one needs memory of its own.
    def again(x):
        first = ops.tanh(x)
        return ops.exp(ops.exp(ops.exp(first))) * first

    assert temporaries(again, **x) == 3 * 4 * KIB


def test_convolutions_hold_parameters_and_results_twice():
    """The weights' copy is one, however many convolutions read them."""
    shapes = {"x": (1, 8, 16, 16), "w": (8, 8, 1, 1)}
    weights, plane = 8 * 8 * 4, 8 * 16 * 16 * 4
    assert temporaries(ops.conv, **shapes) == weights + plane + 2 * plane
    twice = temporaries(lambda x, w: ops.conv(ops.conv(x, w), w), **shapes)
    assert twice == weights + 2 * plane + 2 * plane
