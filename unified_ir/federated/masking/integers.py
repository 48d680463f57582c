"""Vectors of integers modulo 2^b: their masks, their sum, and their bytes.

A field of `bits` bits for each device is summed modulo 2^width with room for the whole cohort, so
the sum of all is exact. Masks are read from a `Keystream` in words of 16, 32 or 64 bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.masking.fields import MaskedField, Vector
from triplane.unified_ir.federated.masking.primitives import CHUNK_BYTES, Keystream

_LANES: Final = 8
_CHUNK: Final = 1 << 16


class IntegerSum:
    """One vector for each field, added modulo 2^width."""

    def __init__(self, fields: Sequence[MaskedField], devices: int) -> None:
        self._fields = tuple(fields)
        self._widths = [field.width(devices) for field in fields]
        self._totals = [
            np.zeros(field.entries, _dtype(width))
            for field, width in zip(fields, self._widths, strict=True)
        ]

    def add(self, vectors: Sequence[Vector]) -> None:
        """Add a device's integers. InvalidInput, and nothing is added, where they do not fit."""
        if len(vectors) != len(self._fields):
            raise InvalidInput(f"{len(self._fields)} vectors are masked, got {len(vectors)}")
        for field, vector in zip(self._fields, vectors, strict=True):
            _check_vector(field, vector)
        for total, vector in zip(self._totals, vectors, strict=True):
            total += vector.astype(total.dtype, copy=False)

    def add_mask(self, key: bytes, *, negative: bool) -> None:
        """Add or subtract the mask that `key` generates."""
        stream = Keystream(key)
        operation = np.subtract if negative else np.add
        for total in self._totals:
            size = CHUNK_BYTES // total.itemsize
            buffer = bytearray(min(CHUNK_BYTES, total.nbytes))
            for at in range(0, len(total), size):
                part = total[at : at + size]
                view = memoryview(buffer)[: part.nbytes]
                stream.read_into(view)
                # Addition of words agrees with that modulo 2^width in the lower bits.
                operation(part, np.frombuffer(view, _little(total.dtype)), out=part)

    def encode(self) -> bytes:
        """Return the integers, packed to their widths."""
        pairs = zip(self._totals, self._widths, strict=True)
        return b"".join(part for total, width in pairs for part in _pack(total, width))

    def add_encoded(self, data: bytes) -> None:
        """Add what `encode` returned. InvalidInput, and nothing is added, for other lengths."""
        if len(data) != self.size_bytes:
            raise InvalidInput(f"a masked vector has {self.size_bytes} bytes here, got {len(data)}")
        at, pieces = 0, []
        for total, width in zip(self._totals, self._widths, strict=True):
            size = packed_bytes(len(total), width)
            pieces.append((total, width, memoryview(data)[at : at + size]))
            at += size
        for total, width, piece in pieces:
            _check_padding(piece, len(total), width)
        for total, width, piece in pieces:
            _add_packed(total, width, piece)

    @property
    def size_bytes(self) -> int:
        """Length of what `encode` returns."""
        pairs = zip(self._totals, self._widths, strict=True)
        return sum(packed_bytes(len(total), width) for total, width in pairs)

    def values(self) -> tuple[Vector, ...]:
        """Return the sums as uint64, each in [0, 2^width)."""
        pairs = zip(self._totals, self._widths, strict=True)
        return tuple(total.astype(np.uint64) & np.uint64((1 << w) - 1) for total, w in pairs)


def packed_bytes(entries: int, width: int) -> int:
    """Return the bytes of `entries` integers of `width` bits."""
    return -(-entries * width // 8)


def _dtype(width: int) -> np.dtype[Any]:
    return np.dtype(np.uint16 if width <= 16 else np.uint32 if width <= 32 else np.uint64)


def _little(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype.newbyteorder("<")


def _check_vector(field: MaskedField, vector: Vector) -> None:
    if vector.shape != (field.entries,) or vector.dtype.kind not in "iu":
        raise InvalidInput(
            f"a masked vector has {field.entries} integers here, got {vector.dtype}{vector.shape}"
        )
    low, high = int(vector.min()), int(vector.max())
    if not field.noise_bits and (low < 0 or high >> field.bits):
        raise InvalidInput(
            f"a masked integer of {field.bits} bits is in [0, {2**field.bits}), got {low} to {high}"
        )


# Integer i of a group of eight has bits i * width to (i + 1) * width - 1 of the group's `width`
# bytes, the lowest bit first.


def _overlaps(width: int) -> Iterable[tuple[int, int, int]]:
    """Yield (lane, byte, bits by which the lane's value is shifted up to meet the byte)."""
    for lane in range(_LANES):
        for byte in range(lane * width // 8, ((lane + 1) * width - 1) // 8 + 1):
            yield lane, byte, lane * width - 8 * byte


def _pack(values: Vector, width: int) -> Iterable[bytes]:
    for at in range(0, len(values), _CHUNK):
        part = values[at : at + _CHUNK].astype(np.uint64) & np.uint64((1 << width) - 1)
        lanes = np.zeros((-(-len(part) // _LANES), _LANES), np.uint64)
        lanes.reshape(-1)[: len(part)] = part
        packed = np.zeros((len(lanes), width), np.uint8)
        for lane, byte, up in _overlaps(width):
            packed[:, byte] |= _shift(lanes[:, lane], up).astype(np.uint8)
        yield packed.tobytes()[: packed_bytes(len(part), width)]


def _shift(values: Vector, up: int) -> Vector:
    return values << np.uint64(up) if up >= 0 else values >> np.uint64(-up)


def _add_packed(total: Vector, width: int, data: memoryview) -> None:
    for at in range(0, len(total), _CHUNK):
        part = total[at : at + _CHUNK]
        begin = at // _LANES * width
        raw = data[begin : begin + packed_bytes(len(part), width)]
        packed = np.zeros((-(-len(part) // _LANES), width), np.uint8)
        packed.reshape(-1)[: len(raw)] = np.frombuffer(raw, np.uint8)
        lanes = np.zeros((len(packed), _LANES), np.uint64)
        for lane, byte, up in _overlaps(width):
            lanes[:, lane] |= _shift(packed[:, byte].astype(np.uint64), -up)
        lanes &= np.uint64((1 << width) - 1)
        part += lanes.reshape(-1)[: len(part)].astype(total.dtype)


def _check_padding(data: memoryview, entries: int, width: int) -> None:
    used = entries * width % 8
    if used and data[-1] >> used:
        raise InvalidInput("the unused bits at the end of a masked vector are zero")
