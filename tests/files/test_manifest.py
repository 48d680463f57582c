from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triplane.proto import files_pb2 as pb
from triplane.proto.errors import Corrupt, InvalidInput
from triplane.unified_ir.files import manifest as manifests
from triplane.unified_ir.files.manifest import (
    MAX_MANIFEST_BYTES,
    Manifest,
    Part,
    TensorEntry,
    count_fields,
    decode,
    encode,
)

SHA = bytes(range(32))
PART = Part("t.safetensors", 100, SHA, 0)
TENSOR = TensorEntry("t.safetensors", "a.b", "float32", (2, 3), 10, 24, SHA, "parameter")
GOOD = Manifest("model", (PART, Part("b", 0, SHA, 7)), (TENSOR,), (("k", "v"),), "ab" * 32)


def test_manifest_survives_the_round_trip():
    assert decode(encode(GOOD)) == GOOD
    assert GOOD.tensors_of("t.safetensors") == (TENSOR,)
    assert GOOD.tensors_of("b") == ()


def test_missing_part_is_named_with_those_there_are():
    with pytest.raises(Corrupt, match=r"part 'c' is missing; there are \['t.safetensors', 'b'\]"):
        GOOD.part("c")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"kind": "other"}, "kind must be one of"),
        ({"parent": "ab"}, "parent digest of 1 bytes"),
        ({"parts": (PART, PART)}, "two parts are named"),
        ({"tensors": (replace(TENSOR, size=25),)}, "does not take 25"),
        ({"properties": (("k", "v" * 70_000),)}, "empty or too long"),
    ],
)
def test_writer_refuses_what_a_reader_would(change, match):
    with pytest.raises(InvalidInput, match=match):
        encode(replace(GOOD, **change))


def test_manifest_too_large_to_be_read_is_not_written():
    properties = tuple((f"k{i:04}", "v" * 60_000) for i in range(200))
    with pytest.raises(InvalidInput, match=f"at most {MAX_MANIFEST_BYTES} bytes"):
        encode(replace(GOOD, properties=properties))


@given(st.binary(max_size=200))
def test_nonsense_is_refused_by_family(data):
    try:
        decode(data)
    except (Corrupt, InvalidInput):
        return


@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 60))
def test_fields_are_counted_as_the_parser_would_find_them(parts, tensors, properties):
    message = pb.Manifest(kind="model", parent_digest=SHA)
    for i in range(parts):
        message.parts.add(name=f"p{i}", crc32=i)
    for i in range(tensors):
        message.tensors.add(shape=[300] * i)
    for i in range(properties):
        message.properties.add(key="x" * 200, value=str(i))
    expected = 2 + parts + tensors + properties
    assert count_fields(message.SerializeToString()) == expected
    assert count_fields(message.SerializeToString(), 10) == min(expected, 11)


def test_fields_of_every_wire_type_are_counted():
    fixed64, fixed32, varint, group = (
        b"\x79" + bytes(8),
        b"\x7d" + bytes(4),
        b"\x78\x96\x01",
        b"\x7b",
    )
    assert count_fields(fixed64 + fixed32 + varint) == 3
    assert count_fields(varint + group + varint) == 2, "groups end the count: nobody writes them"
    assert count_fields(b"\x80" * 20 + varint) == 2, "a varint has at most ten bytes"


def test_digits_of_other_scripts_and_case_make_no_part_name():
    for name in ("٣", "K", "ß", "a b", "a/", "-a"):
        assert not manifests.PART_NAME.fullmatch(name)
    for name in ("a", "0", "_a", "model.onnx", "a-b_c.d"):
        assert manifests.PART_NAME.fullmatch(name)
