"""The gradient of a pool over a wide plane stays small and exact."""

from __future__ import annotations

import numpy as np

from triplane.unified_ir import TensorSpec, trace
from triplane.unified_ir.autodiff import value_and_grad
from triplane.unified_ir.engines import engine
from triplane.unified_ir.onnx import emit, serialize
from triplane.unified_ir.ops import max_pool


def test_a_wide_plane_embeds_no_matrix_and_keeps_the_first_maximum() -> None:
    function = trace(lambda x: max_pool(x, 2).sum(), TensorSpec((1, 1, 2, 4096)))
    both = value_and_grad(function)
    assert len(serialize(emit(both))) < 20_000
    x = np.zeros((1, 1, 2, 4096), np.float32)
    _, gradient = engine("onnx").compile(both)(x)
    first = np.zeros_like(x)
    first[0, 0, 0, ::2] = 1
    np.testing.assert_array_equal(gradient, first)
