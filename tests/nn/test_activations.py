"""Activations as cells: the values of their papers, on every engine by way of their operators."""

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import nn

X = np.array([[-3.0, -0.5, 0.0], [0.5, 1.0, 7.0]], np.float32)


def softplus(x):
    return np.log1p(np.exp(x))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


CASES = [
    (nn.LeakyReLU(0.2), np.where(X > 0, X, 0.2 * X)),
    (nn.PReLU(slope=0.3), np.where(X > 0, X, 0.3 * X)),
    (nn.ELU(1.5), np.where(X > 0, X, 1.5 * np.expm1(X))),
    (nn.SELU(), 1.0507009873554805 * np.where(X > 0, X, 1.6732632423543772 * np.expm1(X))),
    (nn.SiLU(), X * sigmoid(X)),
    (nn.Mish(), X * np.tanh(softplus(X))),
    (nn.HardSigmoid(), np.clip(X / 6 + 0.5, 0, 1)),
    (nn.HardSwish(), X * np.clip(X / 6 + 0.5, 0, 1)),
    (nn.ReLU6(), np.clip(X, 0, 6)),
    (nn.Softplus(), softplus(X)),
    (nn.Softsign(), X / (1 + np.abs(X))),
    (nn.Softmax(), np.exp(X) / np.exp(X).sum(-1, keepdims=True)),
    (nn.Softmax(0), np.exp(X) / np.exp(X).sum(0, keepdims=True)),
    (nn.LogSoftmax(), X - np.log(np.exp(X).sum(-1, keepdims=True))),
    (nn.Identity(), X),
]


@pytest.mark.parametrize(("cell", "wanted"), CASES, ids=lambda c: type(c).__name__)
def test_a_cell_computes_its_formula(cell, wanted):
    np.testing.assert_allclose(cell(X), wanted, rtol=1e-5, atol=1e-6)


def test_a_slope_per_channel_is_along_axis_one():
    cell = nn.PReLU(2)
    cell.load({"weight": np.array([0.1, 0.2], np.float32)})
    x = -np.ones((3, 2, 4, 4), np.float32)
    wanted = x * np.array([0.1, 0.2], np.float32).reshape(2, 1, 1)
    np.testing.assert_allclose(cell(x), wanted)
    with pytest.raises(InvalidInput, match=r"PReLU\(2\) .*N, 2"):
        cell(np.ones((3, 5), np.float32))


def test_unflatten_is_the_way_back():
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    np.testing.assert_array_equal(nn.Sequential(nn.Flatten(), nn.Unflatten(3, 4))(x), x)
