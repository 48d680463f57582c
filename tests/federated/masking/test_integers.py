"""Integers modulo 2^width: packing against Python's integers, masks that cancel, hostile bytes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.masking.fields import MaskedField
from triplane.unified_ir.federated.masking.integers import IntegerSum, packed_bytes
from triplane.unified_ir.federated.masking.primitives import Keystream

KEY = bytes(range(32))


def packed(values, width):
    """Pack by one large integer, the first value lowest."""
    number = sum(int(v) << (i * width) for i, v in enumerate(values))
    return number.to_bytes(packed_bytes(len(values), width), "little")


@given(st.integers(1, 56), st.lists(st.integers(0, 2**56 - 1), min_size=1, max_size=40))
def test_values_are_packed_to_their_width(width, values):
    values = [v % 2**width for v in values]
    fields = [MaskedField(len(values), width)]
    total = IntegerSum(fields, 1)
    total.add([np.array(values, np.uint64)])
    assert total.encode() == packed(values, width)
    again = IntegerSum(fields, 1)
    again.add_encoded(total.encode())
    assert again.values()[0].tolist() == values


def test_several_fields_and_many_entries_are_packed_one_after_the_other():
    generator = np.random.default_rng(1)
    fields = [MaskedField(70_001, 8), MaskedField(3, 33), MaskedField(200_003, 1)]
    vectors = [generator.integers(0, 2**f.bits, f.entries, dtype=np.uint64) for f in fields]
    total = IntegerSum(fields, 100)
    for _ in range(100):
        total.add(vectors)
    again = IntegerSum(fields, 100)
    again.add_encoded(total.encode())
    for sums, vector in zip(again.values(), vectors, strict=True):
        np.testing.assert_array_equal(sums, 100 * vector)


@pytest.mark.parametrize("bits", [8, 20, 40])
def test_a_mask_is_the_keystream_in_words(bits):
    field = MaskedField(300_000, bits)
    total = IntegerSum([field, MaskedField(5, bits)], 3)
    total.add_mask(KEY, negative=False)
    size = 2 if bits == 8 else 4 if bits == 20 else 8
    buffer = bytearray(300_005 * size)
    stream = Keystream(KEY)
    for at in range(0, len(buffer), 1 << 16):
        stream.read_into(memoryview(buffer)[at : at + (1 << 16)])
    words = np.frombuffer(buffer, f"<u{size}").astype(np.uint64) % 2 ** field.width(3)
    np.testing.assert_array_equal(np.concatenate(total.values()), words)
    total.add_mask(KEY, negative=True)
    assert not any(values.any() for values in total.values())


@given(st.integers(1, 1000), st.integers(1, 40))
def test_the_sum_of_the_largest_integers_does_not_wrap(devices, bits):
    field = MaskedField(2, bits)
    assert devices * (2**bits - 1) < 2 ** field.width(devices)
    assert field.width(devices) == bits + int(np.ceil(np.log2(devices)))


@pytest.mark.parametrize("change", [b"", b"0", bytes(100)])
def test_vectors_of_another_length_are_refused_and_nothing_is_added(change):
    total = IntegerSum([MaskedField(9, 8)], 4)
    data = b"\xff" * 11 + b"\x03"
    total.add_encoded(data)
    before = total.values()[0]
    with pytest.raises(InvalidInput, match="has 12 bytes here, got"):
        total.add_encoded(data[:11] + change if change != b"0" else data + change)
    np.testing.assert_array_equal(total.values()[0], before)


def test_padding_is_zero():
    total = IntegerSum([MaskedField(8, 8), MaskedField(9, 8)], 4)
    with pytest.raises(InvalidInput, match="unused bits"):
        total.add_encoded(b"\xff" * 22)
    assert not any(values.any() for values in total.values())


@pytest.mark.parametrize(
    "vector",
    [
        np.zeros(3, np.uint8),
        np.zeros((4, 1), np.uint8),
        np.zeros(4, np.float32),
        np.array([0, 0, 0, 256]),
        np.array([0, 0, 0, -1]),
    ],
)
def test_integers_that_do_not_fit_are_refused(vector):
    with pytest.raises(InvalidInput, match=r"a masked (vector|integer)"):
        IntegerSum([MaskedField(4, 8)], 4).add([vector])
    with pytest.raises(InvalidInput, match="1 vectors are masked, got 2"):
        IntegerSum([MaskedField(4, 8)], 4).add([np.zeros(4, np.uint8)] * 2)


@pytest.mark.parametrize(("entries", "bits"), [(0, 8), (1, 0), (1, 57), (2**31 + 1, 8), (-1, 8)])
def test_fields_have_limits(entries, bits):
    with pytest.raises(InvalidInput, match="a masked field has 1 to"):
        MaskedField(entries, bits)
    with pytest.raises(InvalidInput, match="needs 58 bits, the limit is 56"):
        MaskedField(1, 40, 8).width(1000)
    with pytest.raises(InvalidInput, match="0 to 56 noise bits, got -1"):
        MaskedField(1, 8, -1)
