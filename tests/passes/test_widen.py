"""float16 between two casts rounds and overflows on onnxruntime's CPU as it does on numpy."""

import ml_dtypes
import numpy as np
import pytest

from triplane.unified_ir import TensorSpec, ops, trace
from triplane.unified_ir.engines import ENGINES, engine
from triplane.unified_ir.passes.widen import widen_half

X = np.array([[1e-9, 300.0, 1.0 + 2.0**-12]], np.float32)


def product(x):
    """Two products in a row, each rounded: what lies between them is float16 as well."""
    h = x.cast("float16")
    return ((h * h) * 1.0).cast("float32")


@pytest.mark.parametrize("name", list(ENGINES))
def test_small_vanishes_large_overflows_and_digits_are_lost(name):
    made = engine(name).compile(trace(product, TensorSpec((1, 3), "float32")))
    (found,) = made(X)
    assert found.tolist() == [[0.0, np.inf, 1.0]]


@pytest.mark.parametrize("name", list(ENGINES))
def test_bfloat16_keeps_the_range_and_seven_digits(name):
    def squared(x):
        h = x.cast("bfloat16")
        return ((h * h) * 1.0).cast("float32")

    (found,) = engine(name).compile(trace(squared, TensorSpec((1, 3), "float32")))(X)
    narrow = X.astype(ml_dtypes.bfloat16)
    assert found.tolist() == (narrow * narrow).astype(np.float32).tolist()
    assert 0 < found[0, 0] < found[0, 1] < np.inf


def test_the_signature_and_what_is_no_float16_stay():
    function = trace(lambda x: ops.relu(x).cast("float16"), TensorSpec(("N", 3), "float16"))
    wide = widen_half(function)
    assert [p.type for p in wide.params] == [p.type for p in function.params]
    assert [str(r.type) for r in wide.results] == ["float16[N,3]"]
    kinds = [(n.op.name, str(n.outputs[0].type.dtype)) for n in wide.nodes]
    assert kinds == [("Cast", "float32"), ("Relu", "float32"), ("Cast", "float16")]
    plain = trace(ops.relu, TensorSpec((3,), "float32"))
    assert widen_half(plain) is plain
