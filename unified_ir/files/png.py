"""PNG, the part that datasets use: 8 bits per channel, grey or RGB, not interlaced.

A small reader of our own keeps an imaging library out of the base set. Every checksum is checked,
and the pixel stream is inflated to exactly the announced size and no further.
Source: W3C PNG (Third Edition), sections 5, 7.3 and 9.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from triplane.proto.errors import Corrupt, InvalidInput
from triplane.unified_ir.files.images import check_sizes

SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"
CHUNK: Final = struct.Struct(">I4s")
IHDR: Final = struct.Struct(">IIBBBBB")
CHANNELS: Final = {0: 1, 2: 3}  # by colour type
OTHER_COLOURS: Final = {3: "a palette", 4: "grey with alpha", 6: "RGB with alpha"}
CRITICAL: Final = {b"IHDR", b"PLTE", b"IDAT", b"IEND"}  # PLTE only suggests, where pixels are RGB


def decode(data: bytes, what: str) -> NDArray[np.uint8]:
    """Return the image as (C, H, W); `what` names it in errors.

    Corrupt: the bytes are damaged. InvalidInput: a kind of PNG that is not supported.
    """
    chunks = _chunks(data, what)
    first, header = next(chunks, (b"", b""))
    if first != b"IHDR" or len(header) != IHDR.size:
        raise Corrupt(f"{what}: a PNG starts with its IHDR chunk, this one with {first!r}")
    width, height, channels = _header(header, what)
    packed = b"".join(body for kind, body in chunks if kind == b"IDAT")
    row_bytes = width * channels
    rows = _inflate(packed, height * (1 + row_bytes), what)
    image = _unfilter(np.frombuffer(rows, np.uint8).reshape(height, 1 + row_bytes), channels, what)
    return np.ascontiguousarray(image.reshape(height, width, channels).transpose(2, 0, 1))


def _chunks(data: bytes, what: str) -> Iterator[tuple[bytes, bytes]]:
    """Yield (kind, body) up to IEND, each checked; bytes after IEND are not read."""
    if not data.startswith(SIGNATURE):
        raise Corrupt(f"{what} is not a PNG: it starts with {data[:8]!r}")
    at = len(SIGNATURE)
    while at + CHUNK.size <= len(data):
        size, kind = CHUNK.unpack_from(data, at)
        end = at + CHUNK.size + size
        if end + 4 > len(data):
            raise Corrupt(f"{what}: chunk {kind!r} announces {size} bytes, more than are left")
        if zlib.crc32(data[at + 4 : end]) != int.from_bytes(data[end : end + 4], "big"):
            raise Corrupt(f"{what}: the checksum of chunk {kind!r} is wrong")
        if kind == b"IEND":
            return
        # Section 5.4: an upper-case first letter (bit 5 is 0) marks a chunk that must be
        # understood.
        if not kind[0] & 0x20 and kind not in CRITICAL:
            raise InvalidInput(f"{what}: critical chunk {kind!r} is not known")
        yield kind, data[at + CHUNK.size : end]
        at = end + 4
    raise Corrupt(f"{what}: the PNG ends before its IEND chunk")


def _header(header: bytes, what: str) -> tuple[int, int, int]:
    width, height, depth, colour, compression, filtering, interlace = IHDR.unpack(header)
    if depth != 8 or colour not in CHANNELS:
        kind = OTHER_COLOURS.get(colour, f"colour type {colour}")
        seen = f"{depth} bits, {kind if colour not in CHANNELS else 'grey or RGB'}"
        raise InvalidInput(f"{what}: 8-bit grey or RGB is read, this is {seen}; convert it first")
    if interlace or compression or filtering:
        raise InvalidInput(f"{what}: interlaced PNG is not read; save it without interlacing")
    check_sizes((1, CHANNELS[colour], height, width), what)
    return width, height, CHANNELS[colour]


def _inflate(packed: bytes, n_bytes: int, what: str) -> bytes:
    stream = zlib.decompressobj()
    try:
        # Inflated at most to the announced size, whatever the stream holds: a PNG bomb stops here.
        rows = stream.decompress(packed, n_bytes)
        # One more byte: an honest stream is at its end now.
        rest = stream.decompress(stream.unconsumed_tail, 1)
    except zlib.error as error:
        raise Corrupt(f"{what}: the pixel stream is damaged: {error}") from error
    if len(rows) != n_bytes or rest or not stream.eof:
        raise Corrupt(f"{what}: the pixel stream does not hold the announced {n_bytes} bytes")
    return rows


def _unfilter(rows: NDArray[np.uint8], step: int, what: str) -> NDArray[np.uint8]:
    """Undo the prediction of each row from its left, upper and upper left neighbours.

    rows: (H, 1 + W * step), the first byte naming the row's filter; step: bytes per pixel.
    """
    image = np.zeros((len(rows), rows.shape[1] - 1), np.uint8)
    above = np.zeros(rows.shape[1] - 1, np.uint8)
    for y, row in enumerate(rows):
        kind, coded = int(row[0]), row[1:]
        if kind == 0:
            image[y] = coded
        elif kind == 1:
            pixels = coded.reshape(-1, step)
            # Filter 1 (Sub) predicts from the left neighbour: a running sum modulo 256.
            image[y] = np.add.accumulate(pixels, axis=0, dtype=np.uint8).ravel()
        elif kind == 2:
            # Filter 2 (Up)
            image[y] = coded + above
        elif kind in PREDICTORS:
            # Average and Paeth depend on the pixel just decoded, so they are a loop; over Python
            # integers, because indexing single elements of numpy arrays is slower.
            image[y] = _predicted(coded.tolist(), above.tolist(), step, kind)
        else:
            raise Corrupt(f"{what}: row {y} names filter {kind}; there are 0..4")
        above = image[y]
    return image


def _average(left: int, up: int, _: int) -> int:
    return (left + up) >> 1


def _paeth(left: int, up: int, corner: int) -> int:
    """Return the neighbour nearest to left + up - corner; on ties left before up before corner."""
    to_left, to_up, to_corner = abs(up - corner), abs(left - corner), abs(left + up - 2 * corner)
    if to_left <= to_up and to_left <= to_corner:
        return left
    return up if to_up <= to_corner else corner


PREDICTORS: Final = {3: _average, 4: _paeth}


def _predicted(coded: list[int], above: list[int], step: int, kind: int) -> list[int]:
    predict = PREDICTORS[kind]
    # Left of the first pixel everything is 0 (section 9.2).
    out = [0] * step + coded
    corner = [0] * step + above
    for i, value in enumerate(coded):
        out[i + step] = (value + predict(out[i], above[i], corner[i])) & 0xFF
    return out[step:]
