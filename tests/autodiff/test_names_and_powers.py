import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import TensorSpec, autodiff, nn, trace
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


class Activated(nn.Cell):
    """One cell whose operator is differentiated through its body."""

    def __init__(self):
        super().__init__()
        self.act = nn.GELU()

    def construct(self, x):
        return self.act(x).sum()


def test_nodes_of_a_body_stand_where_the_node_of_the_operator_stands():
    both = autodiff.value_and_grad(trace(Activated(), TensorSpec((3,))))
    scopes = {n.op.name: n.meta.scope for n in both.nodes if n.op.name in {"Erf", "Exp"}}
    assert scopes == {"Erf": "act", "Exp": "grad.act"}
    files = {n.meta.location.file.split("/")[-1] for n in both.nodes if n.meta.location}
    assert files == {"test_names_and_powers.py"}
