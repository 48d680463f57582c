# ruff: noqa: ARG005 - the forms under test, as users write them
# mypy: disable-error-code="operator,assignment"
"""Gradients written by hand: functions and cells, in every mode, to the second order."""

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import grad, graph, nn, ops, trace
from triplane.unified_ir.frontend import custom_vjp
from triplane.unified_ir.ir import Role

from .sides import everywhere, floats

X = floats(1.0, -2.0, 3.0)


@custom_vjp(lambda x, scale, y, g: (g * 10.0 * x, None))
def odd_square(x, scale):
    return x * x if scale == 1.0 else x * x * scale


def test_a_function_is_differentiated_by_its_own_rule():
    np.testing.assert_array_equal(everywhere(odd_square, X, 2.0), X * X * 2)
    np.testing.assert_array_equal(everywhere(grad(lambda x: odd_square(x, 2.0).sum()), X), X * 10)


def test_a_rule_is_operators_and_differentiates_again():
    first = grad(lambda x: odd_square(x, 1.0).sum())
    np.testing.assert_array_equal(everywhere(grad(lambda x: (first(x) * x).sum()), X), X * 20)


class Reversed(nn.Cell):
    """Gradient reversal, with a buffer that both methods read."""

    def __init__(self):
        super().__init__()
        self.strength = nn.Parameter(np.array(3.0, np.float32), role=Role.BUFFER)

    def construct(self, x):
        if self.strength > 100.0:
            return x * 0.0
        return x * 1.0

    def bprop(self, x, y, g):
        return -g * self.strength


class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(floats(2.0, 2.0, 2.0))
        self.back = Reversed()

    def construct(self, x):
        return (self.back(x * self.weight) * x).sum()


def test_a_cells_bprop_replaces_the_gradient_of_its_construct():
    net = Net()
    assert everywhere(net, X) == (X * X * 2).sum()
    np.testing.assert_allclose(everywhere(grad(net), X), X * 2 - 3 * 2 * X)
    assert trace(net, X).param_names == ("x", "weight", "back.strength")


def test_a_bprop_cell_with_trained_parameters_is_refused_by_name():
    class Owner(Reversed):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(floats(1.0))

    with pytest.raises(InvalidInput, match=r"Owner defines bprop and owns the trained .*\['w'\]"):
        Owner()(X)


def test_a_bprop_cell_may_not_assign_a_buffer():
    class Assigns(Reversed):
        def construct(self, x):
            self.strength = self.strength + 1.0
            return x

    with pytest.raises(InvalidInput, match="'strength' is assigned in Assigns, whose bprop"):
        Assigns()(X)


def test_a_wrong_number_of_cotangents_is_refused_by_name():
    @custom_vjp(lambda x, y, y_out=None, **_: (x,))
    def two(x, y):
        return x * y

    with pytest.raises((InvalidInput, TypeError)):
        grad(lambda x: two(x, x).sum())(X)

    @custom_vjp(lambda a, b, y, g: g)
    def product(a, b):
        return a * b

    with pytest.raises(InvalidInput, match=r"must return one cotangent per input \(2\)"):
        product(X, X)


def test_a_captured_tensor_is_refused():
    @graph
    def f(x):
        k = x * 2.0

        @custom_vjp(lambda v, y, g: g)
        def inner(v):
            return v * k

        return inner(x)

    with pytest.raises(InvalidInput, match="must take everything it uses as an argument"):
        f(X)


def test_a_rule_may_clip_the_gradient_of_an_operator():
    @custom_vjp(lambda x, y, g: ops.clip(g, -1.0, 1.0))
    def passed(x):
        return x

    found = everywhere(grad(lambda x: (passed(x) * floats(5.0, -7.0, 0.5)).sum()), X)
    np.testing.assert_array_equal(found, floats(1.0, -1.0, 0.5))
