"""TensorBoard's event files: records of protobuf messages, encoded by hand.

A record is the length of its data (uint64), a checksum of these 8 bytes, the data, and a checksum
of the data; all little endian. A checksum is CRC-32C (Castagnoli), rotated right by 15 bits plus a
constant, so that a checksum stored inside data does not check itself.

The data is an `Event`: wall_time = 1 (double), step = 2 (int64), file_version = 3 (string),
summary = 5. A `Summary` holds values = 1: tag = 1, simple_value = 2 (float), image = 4, histo = 5.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from triplane.unified_ir.ir.graph import Array

VERSION: Final = "brain.Event:2"
_POLYNOMIAL: Final = 0x82F63B78
_MASK: Final = 0xA282EAD8
_WORD: Final = 0xFFFFFFFF


def _remainder(value: int) -> int:
    for _ in range(8):
        value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
    return value


_CRC: Final = tuple(map(_remainder, range(256)))


def crc32c(data: bytes) -> int:
    """Return the CRC-32C of `data`.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    value = _WORD
    for byte in data:
        value = _CRC[(value ^ byte) & 255] ^ value >> 8
    return value ^ _WORD


def record(data: bytes) -> bytes:
    """Return one framed record."""
    length = struct.pack("<Q", len(data))
    return b"".join((length, _checksum(length), data, _checksum(data)))


def _checksum(data: bytes) -> bytes:
    # TensorFlow's "masked" CRC (core/lib/hash/crc32c.h).
    value = crc32c(data)
    return struct.pack("<I", ((value >> 15 | value << 17) + _MASK) & _WORD)


def first_event(wall_time: float) -> bytes:
    """Return the event that every file begins with."""
    return _double(1, wall_time) + _bytes(3, VERSION.encode())


def event(wall_time: float, step: int, values: Iterable[bytes]) -> bytes:
    """Return an event with the summary of these values."""
    summary = b"".join(_bytes(1, value) for value in values)
    return _double(1, wall_time) + _number(2, step) + _bytes(5, summary)


def scalar(tag: str, x: float) -> bytes:
    """Encode a number as float32; one outside its range becomes infinite."""
    with np.errstate(over="ignore"):
        return _bytes(1, tag.encode()) + _key(2, 5) + np.float32(x).tobytes()


def histogram(
    tag: str, *, low: float, high: float, total: float, squares: float, counts: Sequence[float]
) -> bytes:
    """Encode a histogram with bins of equal width from `low` to `high`."""
    # HistogramProto: min = 1, max = 2, num = 3, sum = 4, sum_squares = 5, bucket_limit = 6 (the
    # right end of each bin), bucket = 7.
    limits = np.linspace(low, high, len(counts) + 1, dtype=np.float64)[1:]
    held = b"".join(
        (
            _double(1, low), _double(2, high), _double(3, float(sum(counts))), _double(4, total),
            _double(5, squares), _bytes(6, limits.astype("<f8").tobytes()),
            _bytes(7, np.asarray(counts, "<f8").tobytes()),
        )
    )  # fmt: skip
    return _bytes(1, tag.encode()) + _bytes(5, held)


def image(tag: str, pixels: Array) -> bytes:
    """Encode a picture; pixels: uint8 (C, H, W) with 1 or 3 channels."""
    channels, height, width = pixels.shape
    sizes = _number(1, height) + _number(2, width) + _number(3, channels)
    return _bytes(1, tag.encode()) + _bytes(4, sizes + _bytes(4, png(pixels)))


def png(pixels: Array) -> bytes:
    """Encode pixels, uint8 (C, H, W) with 1 or 3 channels, as a PNG of unfiltered rows."""
    channels, height, width = pixels.shape
    rows = np.ascontiguousarray(pixels.transpose(1, 2, 0)).reshape(height, -1)
    # Each row of a PNG begins with the number of its filter; 0 means none.
    raw = b"".join(b"\0" + row.tobytes() for row in rows)
    header = struct.pack(">IIBBBBB", width, height, 8, 2 if channels == 3 else 0, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(raw)), (b"IEND", b""))
    chunks = (
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def _varint(x: int) -> bytes:
    out = bytearray()
    while x > 127:
        out.append(x & 127 | 128)
        x >>= 7
    out.append(x)
    return bytes(out)


def _key(field: int, kind: int) -> bytes:
    # Wire types: 0 varint, 1 eight bytes, 2 length-delimited, 5 four bytes.
    return _varint(field << 3 | kind)


def _number(field: int, x: int) -> bytes:
    return _key(field, 0) + _varint(x)


def _double(field: int, x: float) -> bytes:
    return _key(field, 1) + struct.pack("<d", x)


def _bytes(field: int, x: bytes) -> bytes:
    return _key(field, 2) + _varint(len(x)) + x
