"""Small networks with state, as modules."""

from functools import cache

import numpy as np

from triplane.unified_ir import data, nn, ops
from triplane.unified_ir.frontend import trace
from triplane.unified_ir.ir import Module, StateTensor, TensorSpec
from triplane.unified_ir.quantize import artifact, freeze

IMAGE = TensorSpec(("N", 1, 8, 8))
BIT_DB = 6.0
"""Signal to noise that one bit of a weight is worth."""


def module_of(cell, *specs, result="logits", meta=None):
    """A module whose only entry is `predict`."""
    cell.eval()
    made = trace(cell, *specs, name="predict")
    names = tuple(result if name == "y" else name for name in made.result_names)
    function = type(made)("predict", made.params, made.results, names, made.nodes)
    state = {n: StateTensor(p.role, p.array.copy()) for n, p in cell.parameters().items()}
    return Module({"predict": function}, {"predict": "predict"}, state, meta or {})


def shaken(cell, seed=0):
    """The cell with every parameter drawn anew, so that no bias is 0 and no statistic is 1."""
    rng = np.random.default_rng(seed)
    for name, parameter in cell.parameters().items():
        array = parameter.array
        if name.endswith("running_var"):
            parameter.array = rng.uniform(0.5, 2.0, array.shape).astype(np.float32)
        elif array.dtype == np.float32:
            fan = int(np.prod(array.shape[1:])) if array.ndim > 1 else 4
            drawn = rng.standard_normal(array.shape) / np.sqrt(fan)
            parameter.array = (drawn + name.endswith("norm.weight")).astype(np.float32)
    return cell


class LeNet(nn.Cell):
    """Convolution, BatchNorm, ReLU, pooling, two dense layers."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding="same")
        self.conv2 = nn.Conv2d(8, 16, 3, padding="same")
        self.norm = nn.BatchNorm2d(16)
        self.fc1 = nn.Dense(16 * 2 * 2, 32)
        self.fc2 = nn.Dense(32, 10)

    def construct(self, x):
        x = ops.max_pool(ops.relu(self.conv1(x)), 2)
        x = ops.relu(ops.max_pool(self.norm(self.conv2(x)), 2))
        return self.fc2(ops.relu(self.fc1(ops.flatten(x))))


class Residual(nn.Cell):
    """A skip connection and a global average."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding="same")
        self.left = nn.Conv2d(8, 8, 3, padding="same")
        self.right = nn.Conv2d(8, 8, 1)
        self.head = nn.Dense(8, 10)

    def construct(self, x):
        x = ops.relu(self.stem(x))
        x = ops.relu(self.left(x) + self.right(x))
        return self.head(ops.flatten(ops.global_average_pool(x)))


class Digits(nn.Cell):
    """Fixed convolution, linear head."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 3, padding="same")
        self.head = nn.Dense(16 * 4 * 4, 10)

    def construct(self, x):
        return self.head(ops.flatten(ops.max_pool(ops.relu(self.conv(x)), 2)))


def lenet(meta=None):
    return module_of(shaken(LeNet()), IMAGE, meta=meta)


def residual():
    return module_of(shaken(Residual()), IMAGE)


@cache
def digits():
    """(module, training part, held-out part): random filters, a head by ridge regression."""
    train, held_out = data.digits().split()
    cell = shaken(Digits())
    eye = np.eye(256, dtype=np.float32)
    features = _features(cell, train.x)
    targets = 2.0 * np.eye(10)[train.y] - 1.0
    solved = np.linalg.solve(features.T @ features + 3.0 * eye, features.T @ targets)
    cell.head.weight.array = solved.T.astype(np.float32)
    cell.head.bias.array = np.zeros(10, np.float32)
    return module_of(cell, IMAGE), train, held_out


def _features(cell, x):
    body = module_of(_Body(cell), IMAGE, result="features")
    return artifact(freeze(body, "predict")).session().run({"x": x})["features"].astype(np.float64)


class _Body(nn.Cell):
    def __init__(self, whole):
        super().__init__()
        self.conv = whole.conv

    def construct(self, x):
        return ops.flatten(ops.max_pool(ops.relu(self.conv(x)), 2))


def images(n=64, seed=1):
    return np.random.default_rng(seed).random((n, 1, 8, 8), dtype=np.float32)
