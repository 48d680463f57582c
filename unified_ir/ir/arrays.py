"""Arrays as bytes: little-endian, row-major, several narrow elements to a byte (the first one low).

Arrays read from a file are read-only views of it; only elements of 2 or 4 bits are unpacked, since
the host holds one per byte. The tensors of a file have storage types only: narrow elements are a
flat `uint8` there, bfloat16 a `uint16`, and the graph has the real type. Strings are not stored as
tensors of a file: the bytes of each are its length, in 4 bytes, and its UTF-8.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any, Final

import numpy as np

from triplane.proto.errors import Corrupt, InvalidInput
from triplane.unified_ir.files.dtypes import BY_NAME, StoredDtype
from triplane.unified_ir.files.tensors import StoredTensor
from triplane.unified_ir.ir.graph import Array
from triplane.unified_ir.ir.types import DType, TensorType, is_plain, string, type_of

# Files have names for two of the 8-bit float formats; other narrow elements are stored as bytes.
_STORED_NAME: Final = {
    "float8e4m3fn": "float8_e4m3fn",
    "float8e5m2": "float8_e5m2",
    "float8e4m3fnuz": "uint8",
    "float8e5m2fnuz": "uint8",
    "float8e8m0": "uint8",
    "float4e2m1": "uint8",
    "int4": "uint8",
    "uint4": "uint8",
    "int2": "uint8",
    "uint2": "uint8",
}
_LENGTH: Final = np.dtype("<u4")
"""The length before the bytes of each string."""
CONSTANT_PREFIX: Final = "constant."
# 64 bits of SHA-256. The encoder refuses two constants that differ and share a name.
_NAME_DIGITS: Final = 16


def stored_dtype(dtype: DType) -> StoredDtype:
    """Return how a file stores elements of this type."""
    if dtype == string:
        raise InvalidInput("state cannot hold strings; keep them in constants or attributes")
    return BY_NAME[_STORED_NAME.get(dtype.name, dtype.name)]


def stored(array: Array) -> StoredTensor:
    """Return the array as a file stores it, without a copy if the bytes are the same."""
    dtype = type_of(array).dtype
    row = stored_dtype(dtype)
    if dtype.bits < 8:
        return StoredTensor(row.name, _packed(array, dtype.bits))
    return StoredTensor(row.name, np.asarray(array, order="C").view(row.storage))


def raw(array: Array) -> bytes:
    """Return the bytes of `stored`, or of strings."""
    if array.dtype.kind == "O":
        texts = [str(text).encode() for text in array.reshape(-1)]
        return b"".join(np.array(len(t), _LENGTH).tobytes() + t for t in texts)
    tensor = stored(array)
    return np.asarray(tensor.data, stored_dtype(type_of(array).dtype).storage).tobytes()


def from_stored(tensor: StoredTensor, type_: TensorType) -> Array:
    """Return the array of type `type_` in a file; raise Corrupt if the file has another type."""
    shape, row = static_shape(type_), stored_dtype(type_.dtype)
    held = (_packed_size(shape, type_.dtype.bits),) if type_.dtype.bits < 8 else shape
    if tensor.dtype != row.name or tensor.shape != held:
        raise Corrupt(
            f"{type_} is stored as {row.name}{list(held)}, "
            f"the file has {tensor.dtype}{list(tensor.shape)}"
        )
    return _viewed(tensor.data, type_, shape)


def from_raw(data: bytes, type_: TensorType) -> Array:
    """Return the array of type `type_` with these bytes; raise Corrupt if their number is wrong."""
    shape = static_shape(type_)
    if type_.dtype == string:
        return _strings(data, type_, shape)
    row, bits = stored_dtype(type_.dtype), type_.dtype.bits
    n = _packed_size(shape, bits) if bits < 8 else math.prod(shape)
    if len(data) != n * row.storage.itemsize:
        raise Corrupt(f"{type_} takes {n * row.storage.itemsize} bytes, got {len(data)}")
    return _viewed(np.frombuffer(data, row.storage), type_, shape)


def constant_name(array: Array) -> str:
    """Return the name of a large constant in the weights: a digest of its type and bytes."""
    # The type is part of the name, since arrays with equal bytes may differ in dtype or shape.
    state = hashlib.sha256(str(type_of(array)).encode() + b"\0")
    if array.dtype.kind == "O":
        state.update(raw(array))
    else:  # without a copy of a large constant
        state.update(stored(array).data.reshape(-1).view(np.uint8).data)
    return CONSTANT_PREFIX + state.hexdigest()[:_NAME_DIGITS]


def static_shape(type_: TensorType) -> tuple[int, ...]:
    """Return the shape of a tensor with contents, whose sizes must be numbers."""
    shape = tuple(d for d in type_.shape if isinstance(d, int))
    if len(shape) != type_.rank or not is_plain(type_):
        raise InvalidInput(f"the sizes of a tensor with contents are numbers, got {type_}")
    return shape


def _packed_size(shape: tuple[int, ...], bits: int) -> int:
    return -(-math.prod(shape) * bits // 8)


def _packed(array: Array, bits: int) -> Array:
    """Pack each element's lowest bits, the first element of a byte lowest."""
    flat = np.asarray(array, order="C").reshape(-1)
    # In memory int4 -1 is the byte 0xff (sign-extended); only its lowest bits are stored.
    held = flat.view(np.uint8) if flat.dtype.kind == "V" else flat.astype(np.int8).view(np.uint8)
    each = 8 // bits
    narrow = np.zeros(-(-len(held) // each) * each, np.uint8)
    narrow[: len(held)] = held & (2**bits - 1)
    bytes_ = np.zeros(len(narrow) // each, np.uint8)
    for k in range(each):
        bytes_ |= narrow[k::each] << (bits * k)
    return bytes_


def _viewed(data: np.ndarray[Any, Any], type_: TensorType, shape: tuple[int, ...]) -> Array:
    if type_.dtype.bits < 8:
        array = _unpacked(data, type_, shape)
    elif type_.dtype.name == "bool":
        bits = data.view(np.uint8)
        # numpy assumes that a bool is 0 or 1; other bytes would give results that depend on the
        # kernel.
        if bits.size and int(bits.max()) > 1:
            raise Corrupt("a bool is the byte 0 or 1")
        array = bits.view(np.bool_).reshape(shape)
    else:
        array = data.view(type_.dtype.numpy).reshape(shape)
    array.flags.writeable = False
    return array


def _unpacked(data: Array, type_: TensorType, shape: tuple[int, ...]) -> Array:
    bits = type_.dtype.bits
    each = [data >> (bits * k) & (2**bits - 1) for k in range(8 // bits)]
    narrow = np.stack(each, axis=-1).reshape(-1)
    # Padding must be zero, so that one array has only one encoding and its digest is well defined.
    n = math.prod(shape)
    if narrow[n:].any():
        raise Corrupt(f"the padding after {bits}-bit elements is not zero")
    if type_.dtype.is_float:
        return narrow[:n].astype(np.uint8).view(type_.dtype.numpy).reshape(shape)
    signed = narrow[:n].view(np.int8)
    if type_.dtype.kind == "int":
        # Sign extension: (v ^ 2^(b-1)) - 2^(b-1) maps 0..2^b-1 to -2^(b-1)..2^(b-1)-1.
        top = 2 ** (bits - 1)
        signed = (signed ^ top) - top
    return signed.astype(type_.dtype.numpy).reshape(shape)


def _strings(data: bytes, type_: TensorType, shape: tuple[int, ...]) -> Array:
    """Read as many strings as the shape requires; refuse bytes after them."""
    n, at = math.prod(shape), 0
    # Checked before the allocation: a few bytes may declare a shape of 2^60 strings.
    if n * _LENGTH.itemsize > len(data):
        raise Corrupt(f"{type_} takes more than {len(data)} bytes")
    array = np.empty(n, np.object_)
    for i in range(n):
        end = at + _LENGTH.itemsize
        size = int.from_bytes(data[at:end], "little")
        at = end + size
        if at > len(data):
            raise Corrupt(f"string {i} of {type_} ends beyond its {len(data)} bytes")
        try:
            array[i] = data[end:at].decode()
        except UnicodeDecodeError as error:
            raise Corrupt(f"string {i} of {type_} is not UTF-8: {error}") from error
    if at != len(data):
        raise Corrupt(f"{type_} takes {at} bytes, got {len(data)}")
    array = array.reshape(shape)
    array.flags.writeable = False
    return array
