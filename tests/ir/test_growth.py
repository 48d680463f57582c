"""Large graphs: work grows with the number of nodes, not with its square.

Counted in calls of Python functions, which a busy machine does not change.
"""

import sys
from functools import partial

import pytest

from triplane.unified_ir import nn, ops
from triplane.unified_ir.autodiff import value_and_grad
from triplane.unified_ir.frontend import trace
from triplane.unified_ir.ir import Module, Role, StateTensor, TensorSpec
from triplane.unified_ir.ir.text import function_text
from triplane.unified_ir.onnx import emit, serialize
from triplane.unified_ir.ops.check import load
from triplane.unified_ir.passes.clean import clean
from triplane.unified_ir.passes.occurrences import repeated
from triplane.unified_ir.passes.recompute import recompute


class Deep(nn.Cell):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.CellList([nn.Dense(2, 2) for _ in range(layers)])

    def construct(self, x):
        for layer in self.layers:
            x = ops.tanh(layer(x))
        return (x * x).mean()


def deep(layers):
    """A network, its function, and that with every gradient."""
    net = Deep(layers)
    forward = trace(net, TensorSpec(("N", 2)))
    return net, forward, value_and_grad(forward, [n for n in forward.param_names if n != "x"])


def calls(work):
    """Calls of functions, and the steps of their loops, that some work takes."""
    count = 0

    def seen(*_):
        nonlocal count
        count += 1

    sys.setprofile(seen)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def saved(net, function, folder):
    state = {k: StateTensor(Role.PARAMETER, p.array) for k, p in net.parameters().items()}
    module = Module(functions={"f": function}, entries={"f": "f"}, state=state, meta={})
    module.save(folder / "deep.tpm")
    return load(folder / "deep.tpm")


WORK = {
    "trace and differentiate": lambda made, _: deep(len(made[0].layers)),
    "clean": lambda made, _: clean(made[2]),
    "write as text": lambda made, _: function_text(made[2]),
    "save and load": lambda made, folder: saved(made[0], made[2], folder),
    "emit": lambda made, _: serialize(emit(made[2])),
    "find repeats": lambda made, _: repeated(made[2]),
    "plan memory": lambda made, _: recompute(made[2], 1 << 40, {"N": 4}),
}


@pytest.mark.parametrize("work", WORK.values(), ids=WORK)
def test_four_times_the_layers_are_at_most_five_times_the_work(work, tmp_path):
    few, many = (calls(partial(work, deep(n), tmp_path)) for n in (40, 160))
    assert many <= 5 * few, (few, many)


@pytest.mark.deep
def test_a_hundred_thousand_nodes_come_back(tmp_path):
    net, _, both = deep(12_500)
    assert len(both.nodes) > 100_000
    assert function_text(saved(net, both, tmp_path).functions["f"]) == function_text(both)
