"""Plans with a graph that never ends, or that takes ever more memory."""

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from tests.attacks.endless import loop_body
from tests.federated.core import plans

GREEDY = 1 << 20
"""Numbers that each turn of the greedy loop adds."""


def endless(graph, output):
    """The graph (ONNX), but that it counts to 2^62 before it gives `output`, a scalar."""
    model = onnx.load_from_string(graph)
    (last,) = [node for node in model.graph.node if output in node.output]
    last.output[:] = ["answer"]
    _constants(model, ever=np.array(2**62), yes=np.array(True))
    model.graph.node.append(
        helper.make_node("Loop", ["ever", "yes", "answer"], [output], body=loop_body())
    )
    return model.SerializeToString()


def greedy(graph, output):
    """The same, and each turn takes four megabytes more."""
    model = onnx.load_from_string(graph)
    (last,) = [node for node in model.graph.node if output in node.output]
    last.output[:] = ["answer"]
    _constants(
        model, ever=np.array(2**62), yes=np.array(True), nothing=np.zeros(1, np.float32),
        more=np.ones(GREEDY, np.float32), axes=np.array([0]),
    )  # fmt: skip
    info = helper.make_tensor_value_info
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["on"], ["again"]),
            helper.make_node("Concat", ["so_far", "more"], ["further"], axis=0),
        ],
        "turn",
        [
            info("turn", TensorProto.INT64, []),
            info("on", TensorProto.BOOL, []),
            info("so_far", TensorProto.FLOAT, ["n"]),
        ],
        [info("again", TensorProto.BOOL, []), info("further", TensorProto.FLOAT, ["m"])],
    )
    node = helper.make_node
    model.graph.node.extend(
        [
            node("Add", ["nothing", "answer"], ["first"]),
            node("Loop", ["ever", "yes", "first"], ["all"], body=body),
            node("ReduceMean", ["all", "axes"], [output], keepdims=0),
        ]
    )
    return model.SerializeToString()


def entries(entry, output, change=endless):
    """Those of `plans`, one of them changed."""
    given = {
        "local_update": plans.local_update(), "adapt": plans.adapt(),
        "evaluate": plans.evaluate(), "predict": plans.predict(),
    }  # fmt: skip
    return given | {entry: change(given[entry], output)}


def _constants(model, **values):
    model.graph.initializer.extend(numpy_helper.from_array(x, n) for n, x in values.items())
