import json

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.files import tensors
from triplane.unified_ir.files.dtypes import BY_NAME, ROWS
from triplane.unified_ir.files.tensors import StoredTensor

NUMPY_ROWS = [row for row in ROWS if not row.name.startswith(("bfloat", "float8"))]


def packed(values, roles=None) -> bytes:
    return b"".join(bytes(chunk) for chunk in tensors.pack("p.safetensors", values, roles))


names = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=20).filter(
    lambda name: name != "__metadata__"
)


@st.composite
def stored(draw) -> StoredTensor:
    row = draw(st.sampled_from(ROWS))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
    raw = draw(st.binary(min_size=64, max_size=64))
    count = int(np.prod(shape))
    data = np.resize(np.frombuffer(raw, np.uint8), count * row.storage.itemsize)
    if row.name == "bool":
        data &= 1
    return StoredTensor(row.name, data.view(row.storage).reshape(shape))


@pytest.mark.slow
@given(st.dictionaries(names, stored(), max_size=6))
def test_any_tensors_survive_the_round_trip_bit_for_bit(values):
    found = tensors.unpack(packed(values), "part")
    assert found.keys() == values.keys()
    for name, tensor in values.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert found[name].data.tobytes() == tensor.data.tobytes()
        assert not found[name].data.flags.writeable


@given(st.dictionaries(names, stored(), max_size=6))
def test_the_official_reader_reads_ours(values):
    found = dict(safetensors.deserialize(packed(values)))
    assert found.keys() == values.keys()
    for name, tensor in values.items():
        row = BY_NAME[tensor.dtype]
        assert found[name]["dtype"] == row.safetensors
        assert tuple(found[name]["shape"]) == tensor.shape
        assert bytes(found[name]["data"]) == tensor.data.tobytes()


@pytest.mark.slow
@given(st.dictionaries(names, stored(), max_size=6))
def test_ours_reads_what_the_official_writer_wrote(values):
    plain = {
        name: tensor.data for name, tensor in values.items() if BY_NAME[tensor.dtype] in NUMPY_ROWS
    }
    found = tensors.unpack(safetensors.numpy.save(plain, {"made": "elsewhere"}), "part")
    assert found.keys() == plain.keys()
    for name, x in plain.items():
        assert found[name].dtype == x.dtype.name
        assert found[name].data.tobytes() == x.tobytes()


@pytest.mark.slow
@given(st.dictionaries(names, stored(), max_size=6))
def test_order_of_arguments_does_not_change_a_byte(values):
    backwards = dict(reversed(values.items()))
    assert packed(values) == packed(backwards)


@given(st.dictionaries(names, stored(), max_size=6))
def test_offsets_point_at_the_bytes(values):
    whole, packing = packed(values), tensors.pack("p.safetensors", values)
    assert packing.size == len(whole)
    found = tensors.offsets(values)
    assert found.keys() == values.keys()
    for entry in packing.entries:
        assert found[entry.name] == (entry.offset, entry.size)
        data = whole[entry.offset : entry.offset + entry.size]
        assert data == values[entry.name].data.tobytes()
        assert entry.offset % BY_NAME[entry.dtype].storage.itemsize == 0


def test_data_starts_at_a_multiple_of_64():
    for count in range(1, 30):
        whole = packed({f"tensor{i}": np.zeros(1, np.int8) for i in range(count)})
        assert (8 + int.from_bytes(whole[:8], "little")) % 64 == 0


def test_views_are_views():
    whole = bytearray(packed({"a": np.zeros(4, np.float32)}))
    found = tensors.unpack(whole, "part")["a"].data
    whole[-4:] = np.float32(7).tobytes()
    assert list(found) == [0, 0, 0, 7]


def test_strided_and_big_endian_arrays_are_stored_little_endian_and_dense():
    x = np.arange(12, dtype=">f4").reshape(3, 4)[:, ::2]
    found = tensors.unpack(packed({"x": x}), "part")["x"]
    assert found.data.dtype.str == "<f4"
    assert np.array_equal(found.data, x)


@pytest.mark.parametrize(
    "value",
    [
        np.zeros(2, np.complex64),
        np.array(["text"]),
        np.array([None]),
        StoredTensor("bfloat16", np.zeros(2, np.float32)),
        StoredTensor("int4", np.zeros(2, np.uint8)),
    ],
)
def test_dtypes_a_file_cannot_hold_are_refused_by_name(value):
    with pytest.raises(InvalidInput, match=r"x: a file can hold bool, int8"):
        packed({"x": value})


def test_header_is_compact_json_in_data_order():
    whole = packed({"b": np.zeros(1, np.int8), "a": np.zeros(1, np.int8), "c": np.zeros(1)})
    text = whole[8 : 8 + int.from_bytes(whole[:8], "little")]
    assert list(json.loads(text)) == ["c", "a", "b"]
    assert b": " not in text
    assert text.rstrip(b" ").endswith(b"}}")
