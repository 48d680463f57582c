import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import TensorSpec, autodiff, trace
from triplane.unified_ir.engines import engine
from triplane.unified_ir.ir.graph import Function
from triplane.unified_ir.ops.inline import inline


def test_a_gradient_never_replaces_a_result_of_its_name():
    f = trace(lambda w: {"a": (w * w).sum(), "b": (w * 3.0).sum()}, TensorSpec((3,)))
    once = autodiff.value_and_grad(f, of="a")
    for transform in (autodiff.value_and_grad, autodiff.grad):
        with pytest.raises(InvalidInput, match=r"'grad\.w'.*rename"):
            transform(once, of="b")
    renamed = Function("g", once.params, once.results, ("a", "b", "first"), once.nodes)
    assert autodiff.grad(renamed, of="b").result_names == ("grad.w",)


@pytest.mark.parametrize("exponent", [0.0, 1.0, 2.0, 3.0])
def test_derivatives_of_a_power_exist_at_zero(exponent):
    x = np.array([0.0, -2.0])
    f = trace(lambda x: (x**exponent).sum(), TensorSpec((2,), "float64"))
    factor = 1.0
    for order in range(3):
        factor *= exponent - order
        g = autodiff.grad(f)
        found = engine("reference").compile(g)(x)[0]
        np.testing.assert_allclose(found, factor * x ** max(exponent - order - 1, 0))
        f = trace(lambda x, g=g: inline(g, [x])[0].sum(), TensorSpec((2,), "float64"))
