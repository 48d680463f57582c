"""onnxsim's side: its training loop over a forward model in ONNX. Runs in its own interpreter.

It takes static shapes and no integer labels, so the batch is fixed and labels come one-hot. It
leaves the number of threads to onnxruntime, which takes the processors it may use: one here.
"""

from __future__ import annotations

from typing import Any

import networks
import numpy as np
import onnx
import onnxsim
from onnx import TensorProto, helper, numpy_helper
from worker import Step, one_processor_per_thread, serve


def forward(case: networks.Case) -> onnx.ModelProto:
    """The stack of layers and the mean cross-entropy as a model with its starting weights."""
    network = case.network
    assert isinstance(network, networks.Stack)
    nodes, x = [], "x"
    for i, layer in enumerate(network.layers):
        held = [f"{i}.weight", f"{i}.bias"]
        if isinstance(layer, networks.Conv):
            nodes += [
                helper.make_node("Conv", [x, *held], [f"c{i}"], pads=[layer.padding] * 4),
                helper.make_node("Relu", [f"c{i}"], [f"r{i}"]),
                helper.make_node(
                    "MaxPool", [f"r{i}"], [f"p{i}"], kernel_shape=[2, 2], strides=[2, 2]
                ),
            ]
            x = f"p{i}"
            continue
        if i and isinstance(network.layers[i - 1], networks.Conv):
            nodes.append(helper.make_node("Reshape", [x, "flat"], [f"f{i}"]))
            x = f"f{i}"
        nodes.append(helper.make_node("Gemm", [x, *held], [f"d{i}"], transB=1))
        x = f"d{i}"
        if i + 1 < len(network.layers):
            nodes.append(helper.make_node("Relu", [x], [f"r{i}"]))
            x = f"r{i}"
    nodes += [
        helper.make_node("Softmax", [x], ["chances"], axis=1),
        helper.make_node("Log", ["chances"], ["logs"]),
        helper.make_node("Mul", ["logs", "labels"], ["chosen"]),
        helper.make_node("ReduceMean", ["chosen"], ["mean"], axes=[0, 1], keepdims=0),
        helper.make_node("Mul", ["mean", "scale"], ["loss"]),
    ]
    image = (case.batch, network.channels, network.side, network.side)
    shapes = {"x": image, "labels": (case.batch, network.classes)}
    graph = helper.make_graph(
        nodes,
        "step",
        [helper.make_tensor_value_info(k, TensorProto.FLOAT, v) for k, v in shapes.items()],
        [helper.make_tensor_value_info("loss", TensorProto.FLOAT, [])],
        [
            *(numpy_helper.from_array(v, k) for k, v in networks.weights(case).items()),
            numpy_helper.from_array(np.array([case.batch, -1]), "flat"),
            numpy_helper.from_array(np.float32(-network.classes).reshape(()), "scale"),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def side(case: networks.Case) -> tuple[Step, dict[str, Any]]:
    """A training step from the case's starting weights."""
    one_processor_per_thread()
    optimizer = "adam" if case.adam else "sgd_momentum"
    loop = onnxsim.compile_training_loop(
        forward(case), "loss", list(networks.weights(case)), optimizer=optimizer
    )
    ones = np.eye(case.network.classes, dtype=np.float32)

    def step(x: networks.Array, labels: networks.Array) -> float:
        return float(loop({"x": x, "labels": ones[labels]}, lr=case.lr))

    return step, {"version": f"onnxsim {onnxsim.__version__}"}


if __name__ == "__main__":
    serve(side)
