"""The gradient of a pool stays small and exact whatever its plane and its values."""

import numpy as np
import pytest

from triplane.unified_ir import TensorSpec, trace
from triplane.unified_ir.autodiff import value_and_grad
from triplane.unified_ir.engines import engine
from triplane.unified_ir.onnx import emit, serialize
from triplane.unified_ir.ops import max_pool


def gradient(x, name="onnx", kernel=2):
    both = value_and_grad(trace(lambda x: max_pool(x, kernel).sum(), TensorSpec(x.shape)))
    return both, engine(name).compile(both)(x)[1]


def test_a_wide_plane_embeds_no_plane_and_keeps_the_first_maximum():
    both, found = gradient(np.zeros((1, 1, 2, 4096), np.float32))
    assert len(serialize(emit(both))) < 5_000
    first = np.zeros((1, 1, 2, 4096), np.float32)
    first[0, 0, 0, ::2] = 1
    np.testing.assert_array_equal(found, first)


@pytest.mark.parametrize("name", ["onnx", "reference"])
@pytest.mark.parametrize("extreme", [np.inf, -np.inf, np.finfo(np.float32).max])
def test_an_extreme_maximum_leaves_the_windows_beside_it_alone(extreme, name):
    x = np.arange(16, dtype=np.float32).reshape(1, 1, 4, 4)
    x[0, 0, :2, :2] = extreme
    wanted = np.zeros_like(x)
    wanted[0, 0, [0, 1, 3, 3], [0, 3, 1, 3]] = 1
    np.testing.assert_array_equal(gradient(x, name)[1], wanted)
