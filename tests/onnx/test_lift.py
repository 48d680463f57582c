"""Old definitions of operators: lifted models give what onnxruntime gives of the old ones."""

from itertools import pairwise
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, defs, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import import_onnx
from triplane.unified_ir.engines import engine
from triplane.unified_ir.onnx import EmittedInitializer, emit, serialize
from triplane.unified_ir.onnx.lift import LIFTS, REPLACED, VERSIONS
from triplane.unified_ir.onnx.newer import NEWER
from triplane.unified_ir.ops.row import MEANING_OPSET
from triplane.unified_ir.ops.table import TABLE

RNG = np.random.default_rng(0)
CUBE = RNG.standard_normal((2, 3, 4)).astype(np.float32)
IMAGE = RNG.standard_normal((2, 4, 3, 5)).astype(np.float32)
VECTOR = np.arange(1, 5, dtype=np.float32) / 4


NORM = [IMAGE, *[VECTOR] * 4]
GRID = RNG.uniform(-1, 1, (2, 3, 3, 2)).astype(np.float32)
EMPTY = np.zeros(0, np.float32)


def ints(*values):
    return np.array(values, np.int64)


def floats(*values):
    return np.array(values, np.float32)


PLACES = ints(0, 1).reshape(1, 2, 1)
PER_GROUP = [IMAGE, VECTOR[:2], VECTOR[2:]]
# fmt: off
CASES: dict[str, tuple[int, str, list[Any], dict, int]] = {
    "Softmax-1": (7, "Softmax", [CUBE], {"axis": 1}, 1),
    "Softmax-11": (11, "Softmax", [CUBE], {}, 1),
    "LogSoftmax-11": (11, "LogSoftmax", [CUBE], {"axis": 0}, 1),
    "Hardmax-11": (11, "Hardmax", [CUBE], {"axis": 1}, 1),
    "BatchNormalization-7": (7, "BatchNormalization", NORM, {}, 1),
    "BatchNormalization-9": (9, "BatchNormalization", NORM, {"epsilon": 0.1}, 1),
    "Clip-6": (7, "Clip", [CUBE], {"min": -0.5, "max": 0.5}, 1),
    "Clip-6 open": (10, "Clip", [CUBE], {"min": -0.5}, 1),
    "Dropout-7": (7, "Dropout", [CUBE], {"ratio": 0.4}, 1),
    "Dropout-10": (10, "Dropout", [CUBE], {}, 1),
    "Pad-2": (7, "Pad", [CUBE], {"pads": [0, 1, 0, 0, 0, 2], "value": 7.0}, 1),
    "Slice-1": (7, "Slice", [CUBE], {"starts": [1, -3], "ends": [3, 1000], "axes": [1, 2]}, 1),
    "Slice-1 no axes": (9, "Slice", [CUBE], {"starts": [0, 1], "ends": [1, 3]}, 1),
    "Split-2": (7, "Split", [CUBE], {"axis": 2, "split": [1, 3]}, 2),
    "Split-2 equal": (11, "Split", [CUBE], {"axis": 2}, 2),
    "Split-13": (13, "Split", [CUBE], {"axis": 2}, 2),
    "Squeeze-1": (7, "Squeeze", [CUBE[:, :1]], {"axes": [1]}, 1),
    "Unsqueeze-11": (11, "Unsqueeze", [CUBE], {"axes": [0, 2]}, 1),
    "TopK-1": (7, "TopK", [CUBE], {"k": 2, "axis": 2}, 2),
    "TopK-10": (10, "TopK", [CUBE, ints(2)], {"axis": 2}, 2),
    "ReduceMean-11": (11, "ReduceMean", [CUBE], {"axes": [1], "keepdims": 0}, 1),
    "ReduceL2-13": (13, "ReduceL2", [CUBE], {"axes": [-1]}, 1),
    "ReduceSum-11": (11, "ReduceSum", [CUBE], {"axes": [0, 2]}, 1),
    "Upsample-7": (7, "Upsample", [IMAGE], {"scales": [1.0, 1.0, 2.0, 2.0]}, 1),
    "Upsample-9 linear": (9, "Upsample", [IMAGE, floats(1, 1, 2, 2)], {"mode": "linear"}, 1),
    "Resize-10": (10, "Resize", [IMAGE, floats(1, 1, 1.5, 2)], {}, 1),
    "Resize-11": (11, "Resize", [IMAGE, EMPTY, floats(1, 1, 2, 2)], {}, 1),
    "Scatter-9": (9, "Scatter", [CUBE, PLACES, CUBE[:1, :2, :1]], {"axis": 1}, 1),
    "GroupNormalization-18": (18, "GroupNormalization", PER_GROUP, {"num_groups": 2}, 1),
    "GridSample-16": (16, "GridSample", [IMAGE, GRID], {"mode": "bicubic"}, 1),
    "Gemm-7": (7, "Gemm", [CUBE[0], CUBE[1].T.copy(), np.ones(3, np.float32)], {}, 1),
    "Max-8": (8, "Max", [CUBE, CUBE[:1]], {}, 1),
    "DepthToSpace-1": (10, "DepthToSpace", [IMAGE], {"blocksize": 2}, 1),
    "AveragePool-7": (7, "AveragePool", [IMAGE], {"kernel_shape": [2, 2]}, 1),
    "Mean-8": (8, "Mean", [CUBE, CUBE * 2], {}, 1),
}
# fmt: on


def model_of(opset, op, arrays, attrs, outputs):
    names = [f"x{i}" for i in range(len(arrays))]
    outs = [f"y{i}" for i in range(outputs)]
    first = helper.make_tensor_value_info("x0", TensorProto.FLOAT, arrays[0].shape)
    held = [numpy_helper.from_array(a, n) for n, a in zip(names[1:], arrays[1:], strict=True)]
    infos = [helper.make_empty_tensor_value_info(o) for o in outs]
    graph = helper.make_graph(
        [helper.make_node(op, names, outs, **attrs)], "g", [first], infos, held
    )
    imports = [helper.make_opsetid("", opset)]
    return helper.make_model(graph, opset_imports=imports, ir_version=4)


@pytest.mark.parametrize("name", CASES)
def test_a_lifted_model_gives_what_the_old_one_does(name):
    opset, op, arrays, attrs, outputs = CASES[name]
    model = model_of(opset, op, arrays, attrs, outputs)
    wanted = ort.InferenceSession(model.SerializeToString()).run(None, {"x0": arrays[0]})
    module = import_onnx(model)
    held = {n: EmittedInitializer(t.array) for n, t in module.state.items()}
    made = serialize(emit(module.entry("predict"), initializers=held))
    found = ort.InferenceSession(made).run(None, {"x0": arrays[0]})
    for f, w in zip(found, wanted, strict=True):
        np.testing.assert_allclose(f, w, rtol=1e-5, atol=1e-6)


def shape_of(schema):
    """What a rule must know: attributes with defaults, operands, outputs."""
    attrs = {
        n: (a.default_value.SerializeToString(), a.required) for n, a in schema.attributes.items()
    }
    return attrs, [i.option for i in schema.inputs], [o.option for o in schema.outputs]


def test_every_definition_that_changed_has_a_rule():
    """Attributes that went or changed their default, operands that moved: never silently."""
    for op, versions in VERSIONS.items():
        if ("", op) not in TABLE and op not in REPLACED:
            continue
        for old, new in pairwise(versions):
            if new <= 7:
                continue
            before, after = (defs.get_schema(op, v, "") for v in (old, new))
            (a, ins_a, outs_a), (b, ins_b, outs_b) = shape_of(before), shape_of(after)
            gone = {n for n in a if n not in b or (a[n] != b[n] and not a[n][1])}
            lost = ins_b[: len(ins_a)] != ins_a and len(ins_b) < len(ins_a)
            if gone or lost or outs_b[: len(outs_a)] != outs_a:
                assert (op, old) in LIFTS, f"{op}-{old} to {new} changes {gone or 'operands'}"


def test_rules_name_definitions_that_exist():
    everything = {
        (s.name, s.since_version) for s in defs.get_all_schemas_with_history() if not s.domain
    }
    assert LIFTS.keys() <= everything
    assert NEWER.keys() <= everything
    assert all(version > MEANING_OPSET for _, version in NEWER)


def test_a_definition_that_says_otherwise_is_refused_by_name():
    model = model_of(7, "BatchNormalization", [IMAGE, *[VECTOR] * 4], {"spatial": 0}, 1)
    with pytest.raises(InvalidInput, match=r"BatchNormalization, opset 7.*spatial=0"):
        import_onnx(model)
    model = model_of(6, "Add", [CUBE, CUBE], {}, 1)
    with pytest.raises(InvalidInput, match=r"opsets 7 to 26 can be imported, this one has 6"):
        import_onnx(model)


def test_space_to_depth_orders_blocks_after_channels():
    node = helper.make_node("SpaceToDepth", ["x"], ["y"], blocksize=2, mode="CRD")
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in (("x", [2, 3, 4, 6]), ("y", [2, 12, 2, 3]))
    )
    graph = helper.make_graph([node], "crd", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 28)])
    image = RNG.standard_normal((2, 3, 4, 6)).astype(np.float32)
    (wanted,) = ReferenceEvaluator(model).run(None, {"x": image})
    function = import_onnx(model).entry("predict")
    (result,) = engine("reference").compile(function)(image)
    np.testing.assert_array_equal(result, wanted)


@pytest.mark.parametrize("opset", [26, 27, 28])
def test_a_range_of_vectors_of_one_is_read_as_of_numbers(opset):
    ends = [helper.make_tensor_value_info(n, TensorProto.INT64, [1]) for n in ("a", "b", "c")]
    node = helper.make_node("Range", ["a", "b", "c"], ["y"])
    y = helper.make_tensor_value_info("y", TensorProto.INT64, ["N"])
    graph = helper.make_graph([node], "range", ends, [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    function = import_onnx(model).entry("predict")
    (result,) = engine("reference").compile(function)(ints(2), ints(12), ints(4))
    assert result.tolist() == [2, 6, 10]


def test_an_operand_that_the_old_definition_lacks_is_refused():
    model = model_of(9, "TopK", [CUBE, ints(2)], {"axis": 2, "k": 2}, 2)
    with pytest.raises(InvalidInput, match="TopK-1 takes one operand and the attribute k"):
        import_onnx(model)
