"""A file of weights that is written over after it was imported."""

import numpy as np
import onnx
from onnx import TensorProto, helper

from triplane.unified_ir import import_onnx
from triplane.unified_ir.onnx.source import SHARED_BYTES

N = SHARED_BYTES // 4 + 1


def export(folder, value):
    node = helper.make_node("Mul", ["x", "w"], ["y"])
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [N])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [N])],
        [onnx.numpy_helper.from_array(np.full(N, value, np.float32), "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, folder / "m.onnx", save_as_external_data=True, location="weights.bin")


def test_a_module_keeps_its_numbers_when_the_file_they_came_from_is_written_over(tmp_path):
    export(tmp_path, 1.0)
    module = import_onnx(tmp_path / "m.onnx")
    with (tmp_path / "weights.bin").open("r+b") as file:
        file.write(np.full(N, 7.0, "<f4").tobytes())
    (held,) = module.state.values()
    assert set(np.unique(held.array)) == {1.0}
    with (tmp_path / "weights.bin").open("r+b") as file:
        file.truncate(16)
    assert held.array.sum() == N
