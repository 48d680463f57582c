"""Values that a graph and its subgraphs share keep one name each."""

import numpy as np
import onnx
import pytest

from triplane.unified_ir import ops
from triplane.unified_ir.engines import engine
from triplane.unified_ir.ir import TensorSpec
from triplane.unified_ir.onnx import emit
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.table import TABLE

X = np.array([0.5, -0.25], np.float32)


def function(body):
    build = Build(TABLE, "f")
    with build:
        results = body(build.param("x", TensorSpec((2,))))
    return build.finish(results)


def captured_result(x):
    """`y` is a result, and a branch reads it."""
    y = ops.tanh(x)
    return {"y": y, "z": ops.cond(x.sum() > 0.0, lambda x: x * y, lambda x: x + y, x)}


def captured_twice(x):
    """Both branches give back what they captured; one of them twice."""
    y = ops.tanh(x)
    u, v = ops.cond(x.sum() > 0.0, lambda _: (y, y), lambda x: (x, y), x)
    return {"u": u, "v": v}


def repeated(x):
    """A branch computes one value and gives it back twice."""

    def then(x):
        doubled = x * x
        return doubled, doubled

    u, v = ops.cond(x.sum() > 0.0, then, lambda x: (x, x + 1.0), x)
    return {"u": u, "v": v}


def captured_in_a_loop(x):
    y = ops.sin(x)
    return {"y": y, "z": ops.fori_loop(3, lambda _, c: c + y, x)}


@pytest.mark.parametrize("body", [captured_result, captured_twice, repeated, captured_in_a_loop])
def test_values_that_subgraphs_capture_or_repeat_can_be_results(body):
    traced = function(body)
    onnx.checker.check_model(emit(traced), full_check=True)
    expected = engine("reference").compile(traced)(X)
    results = engine("onnx").compile(traced)(X)
    for result, wanted in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, wanted, rtol=1e-6)
