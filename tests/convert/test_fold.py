"""Folding keeps what a function means."""

import numpy as np
import pytest
from tests.quantize import nets

from triplane.unified_ir import TensorSpec, nn, ops
from triplane.unified_ir.convert.fold import fold, fold_constants
from triplane.unified_ir.quantize import artifact, freeze


def kinds(frozen):
    return [node.op.name for node in frozen.function.nodes]


def results(frozen, x):
    return artifact(frozen).session().run({"x": x})["logits"]


class ConvNorm(nn.Cell):
    def __init__(self, groups=1, *, bias=True):
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, groups=groups, bias=bias)
        self.norm = nn.BatchNorm2d(8)

    def construct(self, x):
        return self.norm(self.conv(x))


class DenseNorm(nn.Cell):
    def __init__(self):
        super().__init__()
        self.fc = nn.Dense(6, 5)
        self.norm = nn.BatchNorm1d(5)

    def construct(self, x):
        return self.norm(self.fc(x))


IMAGE, ROW = TensorSpec(("N", 4, 6, 6)), TensorSpec(("N", 6))


@pytest.mark.parametrize(
    ("cell", "spec"),
    [
        (ConvNorm(), IMAGE),
        (ConvNorm(groups=2), IMAGE),
        (ConvNorm(bias=False), IMAGE),
        (DenseNorm(), ROW),
    ],
)
def test_batch_norm_vanishes_into_the_product_before_it(cell, spec):
    frozen = freeze(nets.module_of(nets.shaken(cell), spec), "predict")
    folded = fold(frozen)
    x = np.random.default_rng(0).standard_normal((3, *spec.shape[1:])).astype(np.float32)
    assert "BatchNormalization" in kinds(frozen)
    assert "BatchNormalization" not in kinds(folded)
    np.testing.assert_allclose(results(folded, x), results(frozen, x), rtol=2e-5, atol=2e-5)


class Shared(nn.Cell):
    """The product is read beside the normalization."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding="same")
        self.norm = nn.BatchNorm2d(4)

    def construct(self, x):
        y = self.conv(x)
        return self.norm(y) + y


class NormFirst(nn.Cell):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(4)

    def construct(self, x):
        return self.norm(ops.relu(x))


@pytest.mark.parametrize("cell", [Shared(), NormFirst()])
def test_batch_norm_that_cannot_fold_stays(cell):
    frozen = freeze(nets.module_of(nets.shaken(cell), IMAGE), "predict")
    folded = fold(frozen)
    x = np.random.default_rng(0).standard_normal((2, 4, 6, 6)).astype(np.float32)
    assert "BatchNormalization" in kinds(folded)
    np.testing.assert_array_equal(results(folded, x), results(frozen, x))


class Tied(nn.Cell):
    """A weight computed from the state."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Dense(6, 6)

    def construct(self, x):
        return x @ ((self.fc.weight * 1.0).transpose(1, 0) * 0.5)


def test_what_depends_on_state_alone_is_computed_once():
    frozen = freeze(nets.module_of(nets.shaken(Tied()), ROW), "predict")
    folded = fold_constants(frozen)
    x = np.random.default_rng(0).standard_normal((2, 6)).astype(np.float32)
    assert [k for k in kinds(folded) if k != "Constant"] == ["MatMul"]
    assert list(folded.weights) == ["fc.weight.folded"]
    np.testing.assert_allclose(results(folded, x), results(frozen, x), rtol=1e-6)


class Cosine(nn.Cell):
    """A head whose rows are of length 1, and weights that sum to 1."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Dense(6, 6)

    def construct(self, x):
        unit = self.fc.weight / ops.vector_norm(self.fc.weight, 2, 1, keepdims=True)
        shares = ops.exp(self.fc.bias - ops.logsumexp(self.fc.bias))
        return x @ unit + shares


def test_reductions_of_a_parameter_are_computed_once():
    frozen = freeze(nets.module_of(nets.shaken(Cosine()), ROW), "predict")
    folded = fold_constants(frozen)
    x = np.random.default_rng(0).standard_normal((2, 6)).astype(np.float32)
    assert [k for k in kinds(folded) if k != "Constant"] == ["MatMul", "Add"]
    np.testing.assert_allclose(results(folded, x), results(frozen, x), rtol=1e-6)


class Broadcast(nn.Cell):
    def __init__(self):
        super().__init__()
        self.fc = nn.Dense(64, 64)

    def construct(self, x):
        return x + ops.expand(self.fc.bias * 1.0, (1024, 64)).sum([0])


def test_a_constant_is_not_blown_up():
    frozen = freeze(nets.module_of(nets.shaken(Broadcast()), TensorSpec(("N", 64))), "predict")
    folded = fold_constants(frozen)
    assert "Expand" in kinds(folded)
