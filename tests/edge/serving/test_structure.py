import contextlib
import sys
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triplane.edge.serving.limits import ServingLimits
from triplane.edge.serving.structure import UNCHECKED_BYTES, split_raw
from triplane.edge.serving.wire import parse, parse_infer
from triplane.proto import open_inference_pb2 as pb
from triplane.proto.errors import InvalidInput

LIMITS = ServingLimits()
MIB = 1 << 20
MOST_CALLS = 10_000
"""Of Python's functions, begun and ended: a look at each of a few hundred fields. The bombs have
millions."""


def delimited(field: int, content: bytes) -> bytes:
    length, head = len(content), bytes([field << 3 | 2])
    while length > 0x7F:
        head, length = head + bytes([length & 0x7F | 0x80]), length >> 7
    return head + bytes([length]) + content


BOMBS = {
    "empty inputs": b"\x2a\x00" * (8 * MIB),
    "empty outputs": b"\x32\x00" * (8 * MIB),
    "empty raw contents": b"\x3a\x00" * (8 * MIB),
    "names again and again": delimited(1, b"n") * (4 * MIB),
    "one input of many dimensions": delimited(5, delimited(3, b"\x01" * (16 * MIB))),
    "one input of many parameters": delimited(5, b"\x22\x03\x0a\x01a" * (3 * MIB)),
    "an unknown field": delimited(15, bytes(16 * MIB)),
    "a cut field": b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff" + bytes(MIB),
    "groups": b"\x2b\x2c" * MIB,
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS.keys())
def test_a_message_that_would_swell_is_refused_at_once(bomb):
    calls = 0

    def count(*_):
        nonlocal calls
        calls += 1

    tracemalloc.start()
    sys.setprofile(count)
    try:
        with pytest.raises(InvalidInput):
            parse_infer(bomb, LIMITS)
    finally:
        sys.setprofile(None)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert calls < MOST_CALLS
    assert peak < MIB


def test_large_raw_contents_pass():
    request = pb.ModelInferRequest(model_name="m", raw_input_contents=[bytes(40 * MIB)])
    request.inputs.add(name="x", datatype="UINT8", shape=[40 * MIB])
    parsed, raw = parse_infer(request.SerializeToString(), LIMITS)
    assert raw is not None
    parsed.raw_input_contents.extend(map(bytes, raw))
    assert parsed == request


def test_typed_contents_pass_up_to_their_bound():
    request = pb.ModelInferRequest(model_name="m")
    request.inputs.add(name="x").contents.fp32_contents.extend([0.0] * (MIB // 4 - 100))
    split_raw(request.SerializeToString(), LIMITS)
    request.inputs[0].contents.fp32_contents.extend([0.0] * 200)
    with pytest.raises(InvalidInput, match="send large tensors in raw_input_contents"):
        split_raw(request.SerializeToString(), LIMITS)


def test_a_message_beyond_its_bound_is_refused():
    with pytest.raises(InvalidInput, match="101 bytes; 100 at most"):
        parse_infer(bytes(101), ServingLimits(message_bytes=100))
    with pytest.raises(InvalidInput, match="65537 bytes"):
        parse(pb.ModelReadyRequest, bytes((64 << 10) + 1))


def test_no_protobuf_is_refused_as_such():
    with pytest.raises(InvalidInput, match="not a ModelInferRequest"):
        parse_infer(b"\xff" * 20, LIMITS)


@given(st.binary(min_size=1, max_size=300))
def test_any_large_message_passes_or_is_refused(tail):
    data = delimited(7, bytes(UNCHECKED_BYTES)) + tail
    with contextlib.suppress(InvalidInput):
        parse_infer(data, LIMITS)


def test_large_raw_contents_are_views_of_the_message_in_its_order():
    contents = [bytes([n]) * (UNCHECKED_BYTES + n) for n in range(3)]
    request = pb.ModelInferRequest(model_name="m", id="7", raw_input_contents=contents)
    tracemalloc.start()
    try:
        data = request.SerializeToString()
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        parsed, raw = parse_infer(data, LIMITS)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert raw == contents
    assert (parsed.model_name, parsed.id) == ("m", "7")
    assert not parsed.raw_input_contents
    assert peak - before < UNCHECKED_BYTES, "no content was copied"


def test_raw_contents_that_are_cut_off_are_refused():
    request = pb.ModelInferRequest(raw_input_contents=[bytes(2 * UNCHECKED_BYTES)])
    with pytest.raises(InvalidInput, match="truncated"):
        parse_infer(request.SerializeToString()[:-1], LIMITS)
