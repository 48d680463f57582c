"""Emitted graphs of converted functions."""

import onnx
import pytest

from triplane.unified_ir import TensorSpec, ops
from triplane.unified_ir.frontend import trace
from triplane.unified_ir.onnx import OnnxTarget, emit


@pytest.mark.parametrize("opset", [17, 21, 26])
def test_nothing_unread_is_emitted(opset):
    flat = trace(lambda x: ops.flatten(x) * 2.0, TensorSpec(("N", 3, 4)))
    graph = emit(flat, target=OnnxTarget(opset)).graph
    read = {name for node in graph.node for name in node.input} | {y.name for y in graph.output}
    assert [node.op_type for node in graph.node if not read & set(node.output)] == []
    assert [t.name for t in graph.initializer if t.name not in read] == []
    onnx.checker.check_model(emit(flat, target=OnnxTarget(opset)), full_check=True)
