"""Small ONNX graphs for the runtime's tests, written with the `onnx` package."""

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from triplane.unified_ir.runtime import weight_offsets


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, tuple],
    outputs: Mapping[str, tuple],
    initializers: Mapping[str, np.ndarray] | None = None,
    external: Sequence[TensorProto] = (),
    types: Mapping[str, int] | None = None,
) -> bytes:
    """Serialize a graph of opset 21, IR 10; every tensor is float32 unless `types` says."""
    types = types or {}

    def infos(named: Mapping[str, tuple]) -> list[onnx.ValueInfoProto]:
        return [
            helper.make_tensor_value_info(name, types.get(name, TensorProto.FLOAT), shape)
            for name, shape in named.items()
        ]

    inits = [numpy_helper.from_array(np.asarray(v), k) for k, v in (initializers or {}).items()]
    graph = helper.make_graph(nodes, "graph", infos(inputs), infos(outputs), [*inits, *external])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return made.SerializeToString(deterministic=True)


def external(name: str, dtype: int, shape: Sequence[int], offset: int, length: int) -> TensorProto:
    """Declare an initializer stored in `weights.safetensors` at `offset`."""
    tensor = TensorProto(name=name, data_type=dtype, dims=shape)
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (
        ("location", "weights.safetensors"),
        ("offset", str(offset)),
        ("length", str(length)),
    ):
        tensor.external_data.add(key=key, value=value)
    return tensor


def linear() -> bytes:
    """y = x @ w, with `w: (2, 2)` an initializer of ones and `x: (N, 2)`."""
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    return model([node], {"x": ("N", 2)}, {"y": ("N", 2)}, {"w": np.ones((2, 2), np.float32)})


def sgd_step() -> bytes:
    """One step of least squares y = x @ w at rate 0.1: the state is `w: (2, 1)`, the loss a scalar.

    loss = mean((x w - y)^2),  w' = w - 0.1 * 2/N x^T (x w - y).  x: (N, 2), y: (N, 1).
    A column, not a vector: onnxruntime 1.31 fuses Transpose into MatMul, and that kernel is wrong
    for a right operand of rank 1.
    """
    node = helper.make_node
    nodes = [
        node("MatMul", ["x", "w"], ["p"]),
        node("Sub", ["p", "y"], ["e"]),
        node("Mul", ["e", "e"], ["se"]),
        node("ReduceMean", ["se"], ["loss"], keepdims=0),
        node("Transpose", ["x"], ["xt"], perm=[1, 0]),
        node("MatMul", ["xt", "e"], ["g"]),
        node("Shape", ["y"], ["n64"], end=1),
        node("Cast", ["n64"], ["n"], to=TensorProto.FLOAT),
        node("Div", ["g", "n"], ["mean"]),
        node("Mul", ["mean", "rate"], ["update"]),
        node("Sub", ["w", "update"], ["w:next"]),
    ]
    return model(
        nodes,
        {"w": (2, 1), "x": ("N", 2), "y": ("N", 1)},
        {"loss": (), "w:next": (2, 1)},
        {"rate": np.array(0.2, np.float32)},
    )


def classifier(weights: Mapping[str, np.ndarray]) -> bytes:
    """y = x @ w + b with `w: (3, 2)` and `b: (2,)` external, at the offsets a bundle gives them."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["xw"]),
        helper.make_node("Add", ["xw", "b"], ["y"]),
    ]
    stored = [
        external(name, TensorProto.FLOAT, weights[name].shape, offset, length)
        for name, (offset, length) in weight_offsets(weights).items()
    ]
    return model(nodes, {"x": ("N", 3)}, {"y": ("N", 2)}, external=stored)


def squared_error() -> bytes:
    """loss = mean((x w - y)^2), which changes no state."""
    node = helper.make_node
    nodes = [
        node("MatMul", ["x", "w"], ["p"]),
        node("Sub", ["p", "y"], ["e"]),
        node("Mul", ["e", "e"], ["se"]),
        node("ReduceMean", ["se"], ["loss"], keepdims=0),
    ]
    return model(nodes, {"w": (2, 1), "x": ("N", 2), "y": ("N", 1)}, {"loss": ()})


def product() -> bytes:
    """p = x w, with `w: (2, 1)` state."""
    return model(
        [helper.make_node("MatMul", ["x", "w"], ["p"])],
        {"w": (2, 1), "x": ("N", 2)},
        {"p": ("N", 1)},
    )


def counting() -> bytes:
    """y = x + trips, one by one: as many nodes run as the caller says. trips: (), x: (1,)."""
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["going"], ["going_on"]),
            helper.make_node("Add", ["sum", "one"], ["sum_on"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("trip", TensorProto.INT64, []),
            helper.make_tensor_value_info("going", TensorProto.BOOL, []),
            helper.make_tensor_value_info("sum", TensorProto.FLOAT, [1]),
        ],
        [
            helper.make_tensor_value_info("going_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("sum_on", TensorProto.FLOAT, [1]),
        ],
    )
    return model(
        [helper.make_node("Loop", ["trips", "", "x"], ["y"], body=body)],
        {"trips": (), "x": (1,)},
        {"y": (1,)},
        {"one": np.ones(1, np.float32)},
        types={"trips": TensorProto.INT64},
    )
