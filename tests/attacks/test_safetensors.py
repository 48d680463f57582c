"""Hostile safetensors parts, each with the limit that stops it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.attacks.refusals import refused

from triplane.proto.errors import Corrupt
from triplane.unified_ir.files import tensors
from triplane.unified_ir.files.tensors import MAX_HEADER_BYTES


def part(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def row(begin: int, end: int, shape=None, dtype: str = "U8") -> dict:
    return {
        "dtype": dtype,
        "shape": [end - begin] if shape is None else shape,
        "data_offsets": [begin, end],
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "too few for a header"),
        (b"\2\0\0\0", "too few for a header"),
        (bytes(8), "header of 0 bytes"),
        ((2**64 - 1).to_bytes(8, "little") + b"{}", "header of 18446744073709551615"),
        (part(b"{}")[:-1], "header of 2 bytes"),
        (part(b" " * MAX_HEADER_BYTES + b"{}"), f"limit {MAX_HEADER_BYTES}"),
        (part(b"[]"), "not a JSON object"),
        (part(b' {"a":1}'), "not a JSON object"),
        (part(b"{]"), "not JSON"),
        (part(b"{\xff\xff}"), "not JSON"),
        (part(b"{}{}"), "not JSON"),
        (part(b'{"a":' + b"[" * 200_000), "not JSON"),
        (part(b'{"a":' + b"9" * 10_000 + b"}"), "not JSON"),
        (part(b'{"a":1,"a":1}'), "a key occurs twice"),
        (part({"__metadata__": {"a": 1}}), "__metadata__ must map"),
        (part({"__metadata__": []}), "__metadata__ must map"),
        (part({"a": 1}), "'a' must have dtype, shape"),
        (part({"a": {}}), "'a' must have dtype, shape"),
        (part({"a": {**row(0, 0), "more": 1}}), "'a' must have dtype, shape"),
        (part({"a": row(0, 4)}), "tensors take 4 bytes, the data has 0"),
        (part({"a": row(0, 4)}, bytes(5)), "tensors take 4 bytes, the data has 5"),
        (part({"a": row(0, 4), "b": row(2, 6)}, bytes(6)), "'b' starts at 2, the one before"),
        (part({"a": row(0, 4), "b": row(0, 4)}, bytes(4)), "starts at 0, the one before ends 4"),
        (part({"a": row(0, 4), "b": row(6, 8)}, bytes(8)), "'b' starts at 6"),
        (part({"a": row(1, 4)}, bytes(4)), "'a' starts at 1"),
        (part({"a": row(4, 0, [4])}, bytes(4)), "does not take -4 bytes"),
        (part({"a": row(-4, 0)}, bytes(4)), "lists of sizes"),
        (part({"a": row(0, 4, [5])}, bytes(4)), "does not take 4 bytes"),
        (part({"a": row(0, 4, [4.0])}, bytes(4)), "lists of sizes"),
        (part({"a": row(0, 1, [True])}, bytes(1)), "lists of sizes"),
        (part({"a": row(0, 4, "4")}, bytes(4)), "lists of sizes"),
        (part({"a": row(0, 4, [2**62, 2**62])}, bytes(4)), "out of range"),
        (part({"a": row(0, 4, [1] * 100_000 + [4])}, bytes(4)), "rank 100001"),
        (part({"a": row(0, 0, [0, 2**32 - 1, 2**32 - 1, 2**32 - 1])}), "out of range"),
        (part({"a": row(0, 4, dtype="F6_E3M2")}, bytes(4)), "dtype must be one of"),
        (part({"a": row(0, 4, dtype="f32")}, bytes(4)), "dtype must be one of"),
        (part({"a": {**row(0, 4), "dtype": ["U8"]}}, bytes(4)), "dtype must be one of"),
        (part({"a": {**row(0, 4), "data_offsets": [0]}}, bytes(4)), "lists of sizes"),
        (part({"": row(0, 4)}, bytes(4)), "printable"),
        (part(b'{"\\ud800":' + json.dumps(row(0, 0)).encode() + b"}"), "printable"),
        (part({"a\0b": row(0, 4)}, bytes(4)), "printable"),
        (part({"n" * 513: row(0, 4)}, bytes(4)), "printable"),
        (part({f"t{i}": row(0, 0) for i in range(32_769)}), "32769 tensors, at most 32768"),
    ],
)
def test_hostile_header_is_refused(data, match):
    with refused(match, memory_bytes=128 << 20):
        tensors.unpack(data, "part")


@pytest.mark.slow
def test_worst_header_stays_within_a_multiple_of_its_limit():
    text = b'{"a":[' + b"[]," * ((MAX_HEADER_BYTES - 16) // 3) + b"[]]}"
    with refused("must have dtype", memory_bytes=40 * MAX_HEADER_BYTES):
        tensors.unpack(part(text), "part")


@given(st.binary(max_size=300), st.binary(max_size=64))
def test_nonsense_never_does_anything_else_than_be_refused(text, data):
    try:
        tensors.unpack(part(b"{" + text, data), "part")
    except Corrupt:
        return
    assert not data, "only an empty header describes no tensors"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=8), JSON, max_size=4), st.binary(max_size=16))
def test_well_formed_json_of_the_wrong_shape_is_refused_cleanly(header, data):
    try:
        found = tensors.unpack(part(header, data), "part")
    except Corrupt:
        return
    assert sum(tensor.data.nbytes for tensor in found.values()) == len(data)
