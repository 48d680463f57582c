# mypy: disable-error-code="operator,assignment,union-attr"
"""`compare` names the first node where two ways of running part."""

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput, NotFound
from triplane.unified_ir import nn, ops
from triplane.unified_ir.frontend.compare import compare
from triplane.unified_ir.ir import Role
from triplane.unified_ir.ops.table import TABLE

from .sides import floats

X = floats(1.0, 2.0, 3.0)


class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(np.full((3, 2), 0.1, np.float32))
        self.count = nn.Parameter(np.zeros((), np.float32), role=Role.BUFFER)

    def construct(self, x):
        self.count = self.count + 1.0
        y = x @ self.weight
        return ops.tanh(y) if y.sum() > 0 else y


class Outer(nn.Cell):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def construct(self, x):
        return self.net(x) * 2.0


@pytest.mark.parametrize("right", ["onnx", "eager"])
def test_engines_that_agree_compare_true_and_leave_state_alone(right):
    net = Outer()
    found = compare(net, X, right=right)
    assert found
    assert found.difference is None
    assert "values agree" in str(found)
    assert net.net.count.array == 0.0


def test_the_first_differing_node_is_named_with_line_scope_and_values():
    net = Outer()
    x = floats(1.0, 1.0 + 2**-12, 3.0)
    found = compare(net, x, left="reference", right="ascend", rtol=1e-7, atol=1e-8)
    assert not found
    assert found.difference.op == "MatMul"
    assert found.difference.scope == "net"
    line = Net.construct.__code__.co_firstlineno + 2
    assert found.difference.location.line == line
    assert f"test_compare.py:{line}" in str(found)
    left, right = found.difference.left, found.difference.right
    assert found.difference.max_abs == np.abs(left.astype(float) - right.astype(float)).max()
    assert "in net" in str(found)


def test_a_broken_kernel_is_found(monkeypatch):
    row = TABLE["", "Tanh"]
    monkeypatch.setitem(row.__dict__, "reference", lambda x: np.tanh(x) + np.float32(0.5))
    found = compare(lambda x: ops.tanh(x * 1.0) + 1.0, X)
    assert found.difference.op == "Tanh"
    assert found.difference.max_abs == pytest.approx(0.5, abs=1e-6)


def test_a_decision_baked_into_one_side_shows_as_a_differing_result():
    counter = iter((0.0, 1.0))

    def f(x):
        return x * next(counter)

    found = compare(f, X, left="eager", right="onnx")
    assert found.difference.op == "result y of the traced graph"
    assert found.difference.at == (2,)


def test_two_equal_sides_and_unknown_ones_are_refused():
    with pytest.raises(InvalidInput, match="compare takes two different sides"):
        compare(Net(), X, left="onnx")
    with pytest.raises(NotFound, match="no engine 'nonsense'"):
        compare(Net(), X, left="nonsense")
