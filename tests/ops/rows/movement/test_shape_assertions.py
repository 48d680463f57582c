"""An asserted size is checked by every engine, and differentiated through."""

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import ops
from triplane.unified_ir.autodiff import value_and_grad
from triplane.unified_ir.engines.onnx import OnnxEngine
from triplane.unified_ir.engines.reference import ReferenceEngine
from triplane.unified_ir.ir import codec, text
from triplane.unified_ir.ir.types import TensorSpec
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.check import check_function
from triplane.unified_ir.ops.table import TABLE

ENGINES = [ReferenceEngine(), OnnxEngine()]


def added():
    """x: (M, K) asserted to be (N, 2) like w, times w, summed."""
    build = Build(TABLE, "f")
    with build:
        w = build.param("w", TensorSpec(("N", 2)))
        x = build.param("x", TensorSpec(("M", "K")))
        y = (ops.assume_shape(x, w.shape) * w).sum()
    return build.finish({"y": y})


W = np.arange(6, dtype=np.float32).reshape(3, 2)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
def test_a_claim_lets_sizes_meet(engine):
    assert engine.compile(added())(W, W + 1)[0] == (W * (W + 1)).sum()


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
@pytest.mark.parametrize("x", [W[:2], W.T, np.ones((6, 1), np.float32)], ids=str)
def test_a_wrong_claim_fails_when_it_runs(engine, x):
    with pytest.raises(InvalidInput):
        engine.compile(added())(W, x)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name)
def test_a_gradient_passes_a_claim(engine):
    gradients = engine.compile(value_and_grad(added()))(W, W + 1)
    np.testing.assert_array_equal(gradients[1], W + 1)
    np.testing.assert_array_equal(gradients[2], W)


def test_files_keep_a_claim():
    function = added()
    check_function(function)
    again = codec.decode_function(codec.encode_function(function))
    assert text.function_text(again) == text.function_text(function)


def test_a_claim_that_cannot_hold_is_refused_at_once():
    build = Build(TABLE, "f")
    with build, pytest.raises(InvalidInput, match="which it cannot have"):
        ops.assume_shape(build.param("x", TensorSpec((3, "M"))), (4, 2))
