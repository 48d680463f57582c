"""Graphs that never come to an end."""

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def loop_body():
    """One more turn, whatever came before."""
    info, boolean = helper.make_tensor_value_info, TensorProto.BOOL
    return helper.make_graph(
        [
            helper.make_node("Identity", ["more"], ["again"]),
            helper.make_node("Add", ["so_far", "so_far"], ["further"]),
        ],
        "turn",
        [
            info("turn", TensorProto.INT64, []),
            info("more", boolean, []),
            info("so_far", TensorProto.FLOAT, []),
        ],
        [info("again", boolean, []), info("further", TensorProto.FLOAT, [])],
    )


def endless_for(model, output, rows):
    """The model (ONNX, input `x`), but that it never answers so many rows."""
    graph = onnx.load_from_string(model)
    (last,) = [node for node in graph.graph.node if output in node.output]
    last.output[:] = ["answer"]
    constants = {
        "rows": np.array([rows], np.int64), "first": np.array([0]), "next": np.array([1]),
        "once": np.array(1), "ever": np.array(2**62), "yes": np.array(True),
        "nothing": np.array(0, np.float32),
    }  # fmt: skip
    graph.graph.initializer.extend(numpy_helper.from_array(x, n) for n, x in constants.items())
    node = helper.make_node
    graph.graph.node.extend(
        [
            node("Shape", ["x"], ["shape"]),
            node("Slice", ["shape", "first", "next"], ["count"]),
            node("Equal", ["count", "rows"], ["is_asked"]),
            node("Squeeze", ["is_asked"], ["asked"]),
            node("Where", ["asked", "ever", "once"], ["turns"]),
            node("Loop", ["turns", "yes", "nothing"], ["waste"], body=loop_body()),
            node("Add", ["answer", "waste"], [output]),
        ]
    )
    return graph.SerializeToString()
