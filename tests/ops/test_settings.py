"""Axes, bounds and shapes that are computed while a graph runs: sizes are open, never guessed."""

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.autodiff import value_and_grad
from triplane.unified_ir.engines import engine
from triplane.unified_ir.ir import TensorSpec
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.ops.tensor import emit

X = np.arange(14, dtype=np.float32).reshape(7, 2)
CASES = {
    "Slice": ((np.array([-3]), np.array([100])), "open_0_0,2", X[-3:]),
    "Pad": ((np.array([1, 0, 0, 2]),), "open_0_0,open_0_1", np.pad(X, ((1, 0), (0, 2)))),
    "Expand": ((np.array([2, 1, 2]),), "open_0_0,open_0_1,open_0_2", np.stack([X, X])),
    "Reshape": ((np.array([2, -1]),), "open_0_0,open_0_1", X.reshape(2, 7)),
}


def computed(op, settings):
    build = Build(TABLE)
    with build:
        x = build.param("x", TensorSpec((7, 2)))
        rest = [build.param(f"s{i}", TensorSpec(s.shape, s.dtype)) for i, s in enumerate(settings)]
        y = emit(op, x, *rest)
    return build.finish({"y": y}), y


@pytest.mark.parametrize("name", ["onnx", "reference"])
@pytest.mark.parametrize("op", CASES)
def test_computed_settings_give_open_sizes_and_the_right_values(op, name):
    settings, shape, wanted = CASES[op]
    function, y = computed(op, settings)
    assert str(y.type) == f"float32[{shape}]"
    (found,) = engine(name).compile(function)(X, *settings)
    np.testing.assert_array_equal(found, wanted)


def test_a_gradient_through_computed_amounts_is_refused_by_name():
    build = Build(TABLE)
    with build:
        x, pads = build.param("x", TensorSpec((2, 3))), build.param("p", TensorSpec((4,), "int64"))
        loss = emit("Pad", x, pads).sum()
    with pytest.raises(InvalidInput, match=r"of Pad .* need constant amounts"):
        value_and_grad(build.finish({"loss": loss}), ["x"])
