"""Functions that tests of graph pictures draw, and a real browser."""

from functools import partial

import numpy as np
import pytest
from tests.ir import graphs
from tests.support.browser import chromium

from triplane.unified_ir import nn, ops, optim, train, zoo
from triplane.unified_ir.ir.graph import Function, Meta, Node, OpId, Value
from triplane.unified_ir.ir.types import TensorSpec

FUNCTIONS = {
    f"{name}-{order}": partial(lambda name, order: graphs.with_gradients(name)[order], name, order)
    for name in graphs.WITH_REGIONS
    for order in range(3)
}
FUNCTIONS |= {name: partial(graphs.module().entry, name) for name in ("predict", "train_step")}


class Tower(nn.Cell):
    """Six equal layers with an activation between them, which stands in the outer cell."""

    def __init__(self):
        super().__init__()
        self.layers = nn.CellList([nn.Dense(4, 4) for _ in range(6)])

    def construct(self, x):
        for layer in self.layers:
            x = ops.tanh(layer(x))
        return x


def step_of(net, x, y, loss):
    """The module of a network with its training step."""
    trainer = train.Trainer(net, loss=loss, optimizer=optim.SGD(0.1, momentum=0.9))
    trainer.prepare(x, y)
    return trainer.export(entries=("train_step", "predict"))


@pytest.fixture(scope="session")
def resnet():
    images, labels = np.zeros((2, 3, 32, 32), np.float32), np.zeros(2, np.int64)
    return step_of(zoo.resnet8(), images, labels, nn.SoftmaxCrossEntropy())


@pytest.fixture(scope="session")
def tower():
    x = np.zeros((2, 4), np.float32)
    return step_of(Tower(), x, x, nn.MSE())


@pytest.fixture(params=FUNCTIONS)
def function(request):
    return FUNCTIONS[request.param]()


@pytest.fixture(scope="session")
def random_function():
    """A function of `nodes` nodes, each of which reads two of the last `near` values."""

    def make(nodes, scopes=("",), near=40, seed=0):
        rng = np.random.default_rng(seed)
        values, made = [Value(TensorSpec((4,)), "x")], []
        for _ in range(nodes):
            read = tuple(values[-1 - int(i)] for i in rng.integers(0, min(near, len(values)), 2))
            y = Value(TensorSpec((4,)))
            op, scope = (
                OpId("", str(rng.choice(["Add", "Mul", "Sub"])), 14),
                str(rng.choice(scopes)),
            )
            made.append(Node(op, read, (y,), meta=Meta(None, scope)))
            values.append(y)
        return Function("random", (values[0],), (values[-1],), ("y",), tuple(made))

    return make


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("browser")) as opened:
        yield opened
