"""Emitted graphs of converted functions."""

import numpy as np
import onnx
import pytest
from tests.quantize import nets

from triplane.unified_ir import TensorSpec, ops
from triplane.unified_ir.convert.fold import fold
from triplane.unified_ir.frontend import trace
from triplane.unified_ir.onnx import OnnxTarget, emit
from triplane.unified_ir.quantize import artifact, freeze


@pytest.mark.parametrize("opset", [17, 21, 26])
def test_nothing_unread_is_emitted(opset):
    flat = trace(lambda x: ops.flatten(x) * 2.0, TensorSpec(("N", 3, 4)))
    graph = emit(flat, target=OnnxTarget(opset)).graph
    read = {name for node in graph.node for name in node.input} | {y.name for y in graph.output}
    assert [node.op_type for node in graph.node if not read & set(node.output)] == []
    assert [t.name for t in graph.initializer if t.name not in read] == []
    onnx.checker.check_model(emit(flat, target=OnnxTarget(opset)), full_check=True)


@pytest.mark.parametrize("make", [nets.lenet, nets.residual])
@pytest.mark.parametrize("opset", [17, 21, 26])
def test_predict_gives_the_same_numbers_at_every_opset(make, opset):
    x = nets.images()
    plain = fold(freeze(make(), "predict"))
    expected = artifact(plain).session().run({"x": x})["logits"]
    made = artifact(plain, OnnxTarget(opset))
    assert {o.version for o in onnx.load_from_string(made.model).opset_import} == {opset}
    session = made.session()
    assert session.inputs[0].shape == ("N", 1, 8, 8)
    np.testing.assert_allclose(session.run({"x": x})["logits"], expected, rtol=1e-6, atol=1e-6)


def test_weights_lie_outside_the_graph():
    made = artifact(fold(freeze(nets.lenet(), "predict")))
    held = onnx.load_from_string(made.model).graph.initializer
    outside = {t.name for t in held if t.data_location == onnx.TensorProto.EXTERNAL}
    assert outside == set(made.weights)
    assert len(made.model) < 3000
