"""A vector holds the numbers of an update, and nothing that a file would not."""

import hashlib
import struct

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.core.draws import Array
from triplane.unified_ir.federated.core.files import BadUpdate, like_of
from triplane.unified_ir.federated.core.vector import VectorLayout, decode_vector, encode_vector

CHANGE: dict[str, Array] = {
    "b": np.array([1.5, -2.0], np.float16),
    "a": np.array([[1.0, 2.0, 3.0]], np.float32),
    "z": np.array(7.0, np.float64),
    "empty": np.zeros((0, 3), np.float32),
}
LAYOUT = VectorLayout.of(like_of(CHANGE))
LEASE = "0123456789abcdef" * 2


def test_numbers_come_by_size_of_their_type_then_by_name():
    numbers = struct.pack("<d3f2e", 7.0, 1.0, 2.0, 3.0, 1.5, -2.0)
    assert encode_vector(CHANGE, LAYOUT, LEASE) == bytes.fromhex(LEASE) + numbers


def test_a_vector_gives_the_change_back_bit_for_bit():
    rng = np.random.default_rng(3)
    change = {n: np.asarray(rng.normal(size=x.shape), x.dtype) for n, x in CHANGE.items()}
    change["a"] = np.asfortranarray(np.arange(12, dtype=np.float32).reshape(4, 3))
    layout = VectorLayout.of(like_of(change))
    found = decode_vector(encode_vector(change, layout, LEASE), layout.digest, layout, LEASE)
    assert found.keys() == change.keys()
    for name, x in change.items():
        assert (found[name].dtype, found[name].shape) == (x.dtype, x.shape)
        assert found[name].tobytes() == x.tobytes()
        assert not found[name].flags.writeable


@pytest.mark.parametrize(
    "other",
    [
        {**CHANGE, "a": np.zeros((3, 1), np.float32)},
        {**CHANGE, "a": np.zeros((1, 3), np.int32)},
        {("c" if name == "a" else name): x for name, x in CHANGE.items()},
        {name: x for name, x in CHANGE.items() if name != "empty"},
    ],
    ids=("shape", "type", "name", "missing"),
)
def test_a_vector_of_other_tensors_has_another_layout_though_it_is_as_long(other):
    like = {name: (x.dtype, x.shape) for name, x in other.items()}
    layout = VectorLayout.of(like)
    assert layout.size == LAYOUT.size
    with pytest.raises(BadUpdate, match="names, types or shapes") as refused:
        decode_vector(encode_vector(CHANGE, LAYOUT, LEASE), layout.digest, LAYOUT, LEASE)
    assert refused.value.kind == "names"
    with pytest.raises(InvalidInput, match="shared float tensors"):
        encode_vector(other, LAYOUT, LEASE)


def test_the_layout_has_the_digest_that_the_wire_promises():
    """Of the JSON text, so that a device in another language computes the same."""
    layout = VectorLayout.of({"w": (np.dtype(np.float32), (2, 1)), "v": (np.dtype(np.float64), ())})
    text = '[["v", "float64", []], ["w", "float32", [2, 1]]]'
    assert layout.digest == hashlib.sha256(text.encode()).digest()


@pytest.mark.parametrize("cut", [b"", b"12345678", None])
def test_a_vector_of_another_length_is_refused(cut):
    data = encode_vector(CHANGE, LAYOUT, LEASE)
    data = data[:-1] if cut is None else data + cut if cut else b""
    with pytest.raises(
        BadUpdate, match=f"has {LAYOUT.size} bytes here, got {len(data)}"
    ) as refused:
        decode_vector(data, LAYOUT.digest, LAYOUT, LEASE)
    assert refused.value.kind == "shape"


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["a", "b", "z"])
def test_a_number_that_is_not_finite_is_refused_by_the_name_of_its_tensor(name, odd):
    change = {n: x.copy() for n, x in CHANGE.items()}
    change[name].flat[-1:] = odd
    with pytest.raises(BadUpdate, match=f"'{name}' holds numbers that are not finite") as refused:
        decode_vector(encode_vector(change, LAYOUT, LEASE), LAYOUT.digest, LAYOUT, LEASE)
    assert refused.value.kind == "nonfinite"


def test_a_vector_of_another_lease_is_foreign():
    data = encode_vector(CHANGE, LAYOUT, "f" * 32)
    with pytest.raises(BadUpdate, match="lease") as refused:
        decode_vector(data, LAYOUT.digest, LAYOUT, LEASE)
    assert refused.value.kind == "foreign"
