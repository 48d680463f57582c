"""ONNX's Dropout: its mask is the runtime's, its gradient follows that very mask."""

import numpy as np
import pytest

from triplane.unified_ir import TensorSpec, trace
from triplane.unified_ir.autodiff import value_and_grad
from triplane.unified_ir.engines import engine
from triplane.unified_ir.ops.rows.randomness.onnx_dropout import dropout_row

X = np.full((200, 50), 3.0, np.float32)


def dropped(x):
    return dropout_row(x, np.float32(0.25), np.array(True))


@pytest.mark.parametrize("name", ["onnx", "reference"])
def test_a_share_is_dropped_and_the_rest_scaled(name):
    (y,) = engine(name).compile(trace(dropped, TensorSpec(X.shape)))(X)
    np.testing.assert_allclose(np.unique(y), [0, 4], rtol=1e-6)
    assert 0.22 < (y == 0).mean() < 0.28


@pytest.mark.parametrize("name", ["onnx", "reference"])
def test_the_gradient_is_dropped_where_the_value_was(name):
    both = value_and_grad(trace(lambda x: (dropped(x) ** 2.0).sum(), TensorSpec(X.shape)))
    total, g = engine(name).compile(both)(X)
    np.testing.assert_allclose((g * X).sum() / 2, total, rtol=1e-4)
    np.testing.assert_allclose(np.unique(g), [0, 2 * 4 / 0.75], rtol=1e-5)
