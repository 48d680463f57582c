"""Functions with fixed weights."""

import numpy as np
import pytest
from tests.quantize import nets

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import TensorSpec, nn, ops
from triplane.unified_ir.frontend import Parameter, trace
from triplane.unified_ir.ir import Module, Role, StateTensor
from triplane.unified_ir.quantize import artifact, freeze


class Weighted(nn.Cell):
    def __init__(self, role):
        super().__init__()
        self.w = Parameter(np.ones(3, np.float32), role=role)
        self.unused = Parameter(np.ones(3, np.float32))

    def construct(self, x):
        return x * self.w


SPEC = TensorSpec(("N", 3))


@pytest.mark.parametrize(
    ("role", "why"), [(Role.PERSONAL, "never leaves its device"), (Role.KEY, "random numbers")]
)
def test_state_that_no_bundle_may_hold_is_refused_by_name(role, why):
    with pytest.raises(InvalidInput, match=f"(?s)'w'.*{why}|{why}.*'w'"):
        freeze(nets.module_of(Weighted(role), SPEC), "predict")


def test_only_what_is_read_is_kept():
    frozen = freeze(nets.module_of(Weighted(Role.PARAMETER), SPEC), "predict")
    assert list(frozen.weights) == ["w"]
    assert [p.name for p in frozen.inputs] == ["x"]


def test_what_an_entry_assigns_to_state_is_left_out():
    function = trace(lambda x: {"y": x * 2.0, "count": x.sum()}, SPEC, name="predict")
    state = {"count": StateTensor(Role.BUFFER, np.zeros((), np.float32))}
    module = Module({"predict": function}, {"predict": "predict"}, state, {})
    assert freeze(module, "predict").function.result_names == ("y",)
    only = trace(lambda x: {"count": x.sum()}, SPEC, name="predict")
    with pytest.raises(InvalidInput, match="only state"):
        freeze(Module({"predict": only}, {"predict": "predict"}, state, {}), "predict")


def test_products_inside_custom_gradients_are_opened():
    def construct(x, w):
        return ops.custom_gradient(
            lambda a, b: a @ b,
            lambda a, b, _, g: (g @ b.transpose(1, 0), a.transpose(1, 0) @ g),
            x,
            w,
        )

    made = trace(construct, SPEC, TensorSpec((3, 2)), name="predict")
    state = {"w": StateTensor(Role.PARAMETER, np.ones((3, 2), np.float32))}
    module = Module({"predict": made}, {"predict": "predict"}, state, {})
    frozen = freeze(module, "predict")
    assert "MatMul" in [node.op.name for node in frozen.function.nodes]
    assert artifact(frozen).session().run({"x": np.ones((1, 3), np.float32)})["y"].tolist() == [
        [3.0, 3.0]
    ]
