"""Arrays as bytes: every element type comes back with its bits, nothing else is accepted."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triplane.proto.errors import Corrupt, InvalidInput
from triplane.unified_ir.files.tensors import StoredTensor
from triplane.unified_ir.ir.arrays import constant_name, from_raw, from_stored, raw, stored
from triplane.unified_ir.ir.types import DTYPES, TensorSpec, type_of


def any_bits(dtype, shape, seed=0):
    """An array of the type with random bits in every element."""
    rng = np.random.default_rng(seed)
    if dtype.name == "bool":
        return rng.random(shape) < 0.5
    if dtype.name == "string":
        return np.array(["", "a", "é\0 b", "日本"], object)[rng.integers(0, 4, shape)]
    if dtype.bits < 8:
        low = -(2 ** (dtype.bits - 1)) if dtype.kind == "int" else 0
        drawn = rng.integers(low, low + 2**dtype.bits, shape)
        return (
            drawn.astype(np.uint8).view(dtype.numpy)
            if dtype.is_float
            else drawn.astype(dtype.numpy)
        )
    data = rng.integers(0, 256, (*shape, dtype.bits // 8), np.uint8)
    return data.view(dtype.numpy).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3,), (4,), (2, 3), (3, 1, 5)])
def test_every_element_type_comes_back_with_its_bits(dtype, shape):
    array = any_bits(dtype, shape)
    type_ = TensorSpec(shape, dtype)
    copies = [from_raw(raw(np.asarray(array, dtype.numpy)), type_)]
    if dtype.name != "string":
        copies.append(from_stored(stored(array), type_))
    for found in copies:
        assert found.dtype == dtype.numpy
        assert found.shape == shape
        if dtype.name == "string":
            assert found.tolist() == np.asarray(array, object).tolist()
        else:
            assert found.tobytes() == array.tobytes()
        assert not found.flags.writeable


def test_strided_arrays_are_written_in_row_major_order():
    array = np.arange(12, dtype=np.float32).reshape(3, 4).T[::2]
    assert raw(array) == np.ascontiguousarray(array).tobytes()
    assert np.array_equal(from_stored(stored(array), type_of(array)), array)


def test_big_endian_arrays_are_no_tensors():
    with pytest.raises(InvalidInput, match="no element type"):
        raw(np.arange(3, dtype=">i4"))


def test_views_of_a_file_are_not_copied():
    data = np.arange(8, dtype=np.uint16)
    view = from_stored(StoredTensor("bfloat16", data), TensorSpec((8,), ml_dtypes.bfloat16))
    assert np.shares_memory(view, data)


@given(st.integers(0, 40), st.sampled_from(["int4", "uint4", "float4e2m1", "int2", "uint2"]))
def test_narrow_elements_share_bytes(n, name):
    array = any_bits(DTYPES[name], (n,), n)
    each = 8 // DTYPES[name].bits
    assert len(raw(array)) == (n + each - 1) // each


BAD_STRINGS = {
    "too few": (b"\x01\0\0\0a", "takes more than"),
    "beyond the end": (b"\x01\0\0\0a\x09\0\0\0b", "string 1 of string.2. ends beyond"),
    "no UTF-8": (b"\x01\0\0\0a\x01\0\0\0\xff", "not UTF-8"),
    "too many": (b"\x01\0\0\0a\x01\0\0\0b\0", "takes 10 bytes, got 11"),
}


@pytest.mark.parametrize("name", BAD_STRINGS)
def test_bytes_that_are_no_strings_are_refused(name):
    data, match = BAD_STRINGS[name]
    with pytest.raises(Corrupt, match=match):
        from_raw(data, TensorSpec((2,), "string"))


def test_strings_are_no_tensor_of_a_file():
    with pytest.raises(InvalidInput, match="state cannot hold strings"):
        stored(np.array(["a"], object))


def test_an_array_of_objects_is_a_tensor_only_of_strings():
    with pytest.raises(InvalidInput, match="only if each object is a str"):
        type_of(np.array(["a", None], object))


@pytest.mark.parametrize(
    ("data", "type_", "match"),
    [
        (b"\x02", TensorSpec((1,), "bool"), "0 or 1"),
        (b"\x10", TensorSpec((1,), "int4"), "padding"),
        (b"123", TensorSpec((1,)), "takes 4 bytes, got 3"),
        (b"", TensorSpec((2**40, 2**22)), "takes"),
    ],
)
def test_bytes_that_are_no_such_array_are_refused(data, type_, match):
    with pytest.raises(Corrupt, match=match):
        from_raw(data, type_)


def test_a_symbolic_size_has_no_contents():
    with pytest.raises(InvalidInput, match="sizes of a tensor with contents are numbers"):
        from_raw(b"", TensorSpec(("N",)))


def test_a_tensor_of_another_type_is_refused():
    with pytest.raises(Corrupt, match=r"float32\[2\] is stored as"):
        from_stored(StoredTensor("float32", np.zeros(3, np.float32)), TensorSpec((2,)))


def test_the_name_of_a_constant_tells_type_and_contents_apart():
    a = np.zeros(4, np.float32)
    names = [constant_name(x) for x in (a, a.reshape(2, 2), a.view(np.int32), a + 1, a.copy())]
    assert len(set(names)) == 4
    assert names[0] == names[4]


def test_complex_numbers_are_refused_with_the_way_out():
    with pytest.raises(InvalidInput, match=r"complex64.*a last axis of 2"):
        type_of(np.zeros(2, np.complex64))
