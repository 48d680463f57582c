"""Hostile and mistaken requests: each is refused by name before any array is made."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from triplane.edge.serving.limits import ServingLimits
from triplane.edge.serving.request import check_address, decode
from triplane.edge.serving.servable import ServableTensor, contract_of
from triplane.proto import open_inference_pb2 as pb
from triplane.proto.errors import InvalidInput
from triplane.proto.status import Unimplemented
from triplane.unified_ir.runtime.session import Session

LIMITS = ServingLimits()


@pytest.fixture(scope="module")
def contract():
    """x: (N, 4) float32, k: (N) int8, flag: (N) bool; y: (N, 4) float32."""
    made = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])],
        "graph",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 4]),
            helper.make_tensor_value_info("k", TensorProto.INT8, ["N"]),
            helper.make_tensor_value_info("flag", TensorProto.BOOL, ["N"]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 4])],
    )
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    session = Session(model.SerializeToString())

    class Plain:
        name, version = "plain", "1"
        labels: Mapping[str, Sequence[str]] = {}
        inputs: Sequence[ServableTensor] = session.inputs
        outputs: Sequence[ServableTensor] = session.outputs

        def run(self, feeds, *, stop=None):
            return session.run(feeds, stop=stop)

    return contract_of(Plain())


def good():
    """A request that fits, as raw contents."""
    request = pb.ModelInferRequest(model_name="plain")
    request.inputs.add(name="x", datatype="FP32", shape=[2, 4])
    request.inputs.add(name="k", datatype="INT8", shape=[2])
    request.inputs.add(name="flag", datatype="BOOL", shape=[2])
    request.raw_input_contents.extend([bytes(32), bytes(2), b"\x00\x01"])
    return request


def typed():
    """The same request, as typed contents."""
    request = good()
    del request.raw_input_contents[:]
    request.inputs[0].contents.fp32_contents.extend(range(8))
    request.inputs[1].contents.int_contents.extend([-128, 127])
    request.inputs[2].contents.bool_contents.extend([True, False])
    return request


def test_raw_contents_become_views_without_a_copy(contract):
    request = good()
    inference = decode(request, contract, LIMITS)
    assert inference.feeds["x"].shape == (2, 4)
    assert not inference.feeds["x"].flags.owndata
    assert inference.feeds["flag"].tolist() == [False, True]
    assert inference.rows == 2
    assert [want.spec.name for want in inference.wanted] == ["y"]


def test_typed_contents_give_the_same_arrays(contract):
    feeds = decode(typed(), contract, LIMITS).feeds
    assert feeds["x"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert feeds["k"].tolist() == [-128, 127]
    assert feeds["k"].dtype == np.int8
    assert feeds["flag"].tolist() == [True, False]


def edit(change: Any, start: Any = good) -> pb.ModelInferRequest:
    request = start()
    change(request)
    return request


def shape(*sizes: int) -> Any:
    def change(request):
        request.inputs[0].shape[:] = sizes

    return change


def parameter(owner: str, key: str, **value: Any) -> Any:
    def change(request):
        if owner == "output":
            request.outputs.add(name="y")
        target = {"request": request, "input": request.inputs[0]}.get(owner) or request.outputs[0]
        target.parameters[key].CopyFrom(pb.InferParameter(**value))

    return change


def many(owner: str) -> Any:
    def change(request):
        target = request if owner == "request" else request.inputs[0]
        for index in range(LIMITS.parameters + 1):
            target.parameters[str(index)].bool_param = True

    return change


BAD = {
    "unknown input": (lambda r: setattr(r.inputs[0], "name", "z"), "no input 'z'"),
    "input twice": (lambda r: setattr(r.inputs[1], "name", "x"), "INT8|twice"),
    "really twice": (
        lambda r: (r.inputs.append(r.inputs[0]), r.raw_input_contents.append(bytes(32))),
        "twice",
    ),
    "missing input": (
        lambda r: (r.inputs.pop(), r.raw_input_contents.pop()),
        r"\['flag'\] are missing",
    ),
    "wrong type": (
        lambda r: setattr(r.inputs[0], "datatype", "FP64"),
        "input 'x' has datatype 'FP64', the model takes FP32; convert the values",
    ),
    "bytes type": (lambda r: setattr(r.inputs[0], "datatype", "BYTES"), "the model takes FP32"),
    "wrong rank": (
        shape(2, 4, 1),
        r"input 'x' has 3 dimensions, \[2, 4, 1\]; the model takes 2, \[N, 4\]: reshape",
    ),
    "wrong size": (
        shape(2, 5),
        r"input 'x' has shape \[2, 5\]; the model takes \[N, 4\]: size 1 is 5, and must be 4",
    ),
    "negative": (shape(-1, 4), "every size is 1 to"),
    "both negative": (shape(-2, -4), "every size is 1 to"),
    "zero": (shape(0, 4), "every size is 1 to"),
    "beyond 64 bits": (shape(2**62, 4), "every size is 1 to"),
    "product beyond": (shape(LIMITS.elements, 4), "rows"),
    "too many rows": (shape(LIMITS.rows + 1, 4), "4097 rows; 4096 at most"),
    "rank beyond": (shape(*[1] * 1000), "1000 dimensions"),
    "rows disagree": (
        lambda r: (shape(3, 4)(r), r.raw_input_contents.__setitem__(0, bytes(48))),
        "size 0 is 2, and N is 3 in this request already; give both the same size",
    ),
    "short bytes": (lambda r: r.raw_input_contents.__setitem__(0, bytes(31)), "31 bytes.*C order"),
    "long bytes": (lambda r: r.raw_input_contents.__setitem__(0, bytes(33)), "33 bytes"),
    "no bool": (lambda r: r.raw_input_contents.__setitem__(2, b"\x02\x00"), "0 or 1"),
    "raw count": (lambda r: r.raw_input_contents.pop(), "2 raw_input_contents.*3 inputs"),
    "raw surplus": (lambda r: r.raw_input_contents.append(b""), "4 raw_input_contents"),
    "raw and typed": (
        lambda r: r.inputs[0].contents.fp32_contents.append(1),
        "contents beside raw_input_contents",
    ),
    "raw and empty typed": (
        lambda r: r.inputs[0].contents.SetInParent(),
        "contents beside raw_input_contents",
    ),
    "no contents": (lambda r: r.ClearField("raw_input_contents"), "no contents"),
    "many inputs": (
        lambda r: [r.inputs.add() for _ in range(LIMITS.tensors)],
        "67 inputs; 64 at most",
    ),
    "many outputs": (
        lambda r: [r.outputs.add() for _ in range(LIMITS.tensors + 1)],
        "65 requested outputs",
    ),
    "many parameters": (many("request"), "33 parameters"),
    "many input parameters": (many("input"), "33 parameters"),
    "long parameter": (parameter("request", "k" * 257, bool_param=True), "257 characters"),
    "unknown output": (lambda r: r.outputs.add(name="z"), "no output 'z'"),
    "output twice": (lambda r: [r.outputs.add(name="y") for _ in "12"], "requested twice"),
    "no classes": (parameter("output", "classification", int64_param=0), "1 or more"),
    "negative classes": (parameter("output", "classification", int64_param=-1), "1 or more"),
    "text classes": (parameter("output", "classification", string_param="3"), "int64"),
    "many classes": (parameter("output", "classification", int64_param=1001), "1000 at most"),
}
BAD_TYPED = {
    "wrong field": (lambda r: r.inputs[0].contents.fp64_contents.append(1), "fp32_contents"),
    "too few": (lambda r: r.inputs[0].contents.fp32_contents.pop(), "7 values"),
    "too many": (lambda r: r.inputs[0].contents.fp32_contents.append(1), "9 values"),
    "int8 overflow": (
        lambda r: r.inputs[1].contents.int_contents.__setitem__(0, 128),
        "INT8 cannot hold",
    ),
    "strings": (lambda r: r.inputs[0].contents.bytes_contents.append(b"a"), "bytes_contents"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD.keys())
def test_a_bad_request_is_refused_naming_the_rule(contract, change, message):
    with pytest.raises(InvalidInput, match=message):
        decode(edit(change), contract, LIMITS)


@pytest.mark.parametrize(("change", "message"), BAD_TYPED.values(), ids=BAD_TYPED.keys())
def test_bad_typed_contents_are_refused_naming_the_rule(contract, change, message):
    with pytest.raises(InvalidInput, match=message):
        decode(edit(change, typed), contract, LIMITS)


@pytest.mark.parametrize("owner", ["input", "output"])
def test_shared_memory_is_declined_by_name(contract, owner):
    request = edit(parameter(owner, "shared_memory_region", string_param="/etc"))
    with pytest.raises(Unimplemented, match="shared memory is not served"):
        decode(request, contract, LIMITS)


def test_a_shape_whose_product_overflows_is_refused_before_its_bytes_are_looked_at(contract):
    limits = replace(LIMITS, rows=2**26)
    with pytest.raises(InvalidInput, match="values; 67108864 at most"):
        decode(edit(shape(2**26, 4)), contract, limits)


@pytest.mark.parametrize("field", ["model_name", "model_version", "id"])
def test_long_names_are_refused_before_they_are_looked_up(field):
    with pytest.raises(InvalidInput, match=f"{field} has 257 characters"):
        check_address(edit(lambda request: setattr(request, field, "a" * 257)), LIMITS)


@given(st.data())
def test_a_mutated_request_decodes_to_the_declared_shapes_or_is_refused(contract, data):
    encoded = bytearray(good().SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(encoded) - 1))
        encoded[position] = data.draw(st.integers(0, 255))
    request = pb.ModelInferRequest()
    try:
        request.ParseFromString(bytes(encoded))
    except DecodeError:
        return
    try:
        inference = decode(request, contract, LIMITS)
    except InvalidInput:
        return
    assert inference.feeds.keys() == contract.inputs.keys()
    assert inference.feeds["x"].shape == (inference.rows, 4)
