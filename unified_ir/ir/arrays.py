"""Arrays as bytes: little-endian, row-major, 4-bit elements two to a byte (the first one low).

Views of a file are handed out as they lie there, read-only; only 4-bit elements are unpacked, since
the host holds one per byte. A file's tensors know storage types alone: 4-bit elements are a flat
`uint8` there, bfloat16 a `uint16`, and the type in the graph says what they are.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final

import numpy as np

from triplane.proto.errors import Corrupt, InvalidInput
from triplane.unified_ir.files.dtypes import BY_NAME, StoredDtype
from triplane.unified_ir.files.tensors import Tensor
from triplane.unified_ir.ir.graph import Array
from triplane.unified_ir.ir.types import DType, TensorType, type_of

_STORED_NAME: Final = {
    "float8e4m3fn": "float8_e4m3fn",
    "float8e5m2": "float8_e5m2",
    "int4": "uint8",
    "uint4": "uint8",
}
CONSTANT_PREFIX: Final = "constant."
_NAME_DIGITS: Final = 16


def stored_dtype(dtype: DType) -> StoredDtype:
    """How a file holds elements of this type."""
    return BY_NAME[_STORED_NAME.get(dtype.name, dtype.name)]


def stored(array: Array) -> Tensor:
    """The array as a file holds it, without a copy where the bytes are the same."""
    dtype = type_of(array).dtype
    row = stored_dtype(dtype)
    if dtype.bits == 4:
        return Tensor(row.name, _packed(array))
    return Tensor(row.name, np.asarray(array, order="C").view(row.storage))


def raw(array: Array) -> bytes:
    """The bytes of `stored`."""
    tensor = stored(array)
    return np.asarray(tensor.data, stored_dtype(type_of(array).dtype).storage).tobytes()


def from_stored(tensor: Tensor, type_: TensorType) -> Array:
    """The array of type `type_` that a file holds; Corrupt where it is of another type."""
    shape, row = static_shape(type_), stored_dtype(type_.dtype)
    held = (_packed_size(shape),) if type_.dtype.bits == 4 else shape
    if tensor.dtype != row.name or tensor.shape != held:
        raise Corrupt(
            f"{type_} is stored as {row.name}{list(held)}, "
            f"the file has {tensor.dtype}{list(tensor.shape)}"
        )
    return _viewed(tensor.data, type_, shape)


def from_raw(data: bytes, type_: TensorType) -> Array:
    """The array of type `type_` with these bytes; Corrupt where their number is another."""
    shape, row = static_shape(type_), stored_dtype(type_.dtype)
    n = _packed_size(shape) if type_.dtype.bits == 4 else _count(shape)
    if len(data) != n * row.storage.itemsize:
        raise Corrupt(f"{type_} takes {n * row.storage.itemsize} bytes, got {len(data)}")
    return _viewed(np.frombuffer(data, row.storage), type_, shape)


def constant_name(array: Array) -> str:
    """The name of a big constant in the weights: a digest of its type and bytes."""
    digest = hashlib.sha256(str(type_of(array)).encode() + b"\0" + raw(array)).hexdigest()
    return CONSTANT_PREFIX + digest[:_NAME_DIGITS]


def static_shape(type_: TensorType) -> tuple[int, ...]:
    """The shape of a tensor with contents, whose sizes are numbers."""
    shape = tuple(d for d in type_.shape if isinstance(d, int))
    if len(shape) != type_.rank:
        raise InvalidInput(f"a tensor with contents has sizes that are numbers, not {type_}")
    return shape


def _count(shape: tuple[int, ...]) -> int:
    n = 1
    for size in shape:
        n *= size
    return n


def _packed_size(shape: tuple[int, ...]) -> int:
    return (_count(shape) + 1) // 2


def _packed(array: Array) -> Array:
    nibbles = array.reshape(-1).astype(np.int8).view(np.uint8) & 0xF
    nibbles = np.append(nibbles, np.zeros(len(nibbles) % 2, np.uint8))
    return nibbles[0::2] | nibbles[1::2] << 4


def _viewed(data: np.ndarray[Any, Any], type_: TensorType, shape: tuple[int, ...]) -> Array:
    if type_.dtype.bits == 4:
        array = _unpacked(data, type_, shape)
    elif type_.dtype.name == "bool":
        bits = data.view(np.uint8)
        if bits.size and int(bits.max()) > 1:
            raise Corrupt("a bool is the byte 0 or 1")
        array = bits.view(np.bool_).reshape(shape)
    else:
        array = data.view(type_.dtype.numpy).reshape(shape)
    array.flags.writeable = False
    return array


def _unpacked(data: Array, type_: TensorType, shape: tuple[int, ...]) -> Array:
    nibbles = np.stack([data & 0xF, data >> 4], axis=-1).reshape(-1)
    n = _count(shape)
    if nibbles[n:].any():
        raise Corrupt("the padding after 4-bit elements is not zero")
    signed = nibbles[:n].view(np.int8)
    if type_.dtype.kind == "int":
        signed = (signed ^ 8) - 8
    return signed.astype(type_.dtype.numpy).reshape(shape)
