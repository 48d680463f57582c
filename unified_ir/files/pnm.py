"""Read PGM and PPM in binary form (P5, P6), at most 8 bits per channel. Source: netpbm(5)."""

from __future__ import annotations

import re
from typing import Final

import numpy as np
from numpy.typing import NDArray

from triplane.proto.errors import Corrupt, InvalidInput
from triplane.unified_ir.files.images import check_sizes

MAX_HEADER_BYTES: Final = 1024
CHANNELS: Final = {b"P5": 1, b"P6": 3}
GAP: Final = rb"(?:\s|#[^\n]*\n)+"
HEADER: Final = re.compile(rb"(P[1-7])" + 3 * (GAP + rb"(\d{1,9})") + rb"\s")


def decode(data: bytes, what: str) -> NDArray[np.uint8]:
    """Return the image as (C, H, W), scaled so that the file's maximum becomes 255."""
    # Bounded, because comments may be of any length.
    match = HEADER.match(data[:MAX_HEADER_BYTES])
    if match is None:
        raise Corrupt(f"{what} is not a PGM or PPM: it starts with {data[:16]!r}")
    if match[1] not in CHANNELS:
        raise InvalidInput(f"{what}: binary PGM (P5) and PPM (P6) are read, this is {match[1]!r}")
    width, height, top = map(int, match.groups()[1:])
    if not 1 <= top <= 255:
        raise InvalidInput(f"{what}: a maximum of 1..255 is read (8 bits per channel), got {top}")
    channels = CHANNELS[match[1]]
    check_sizes((1, channels, height, width), what)
    body = data[match.end() :]
    if len(body) != height * width * channels:
        raise Corrupt(f"{what}: {height} x {width} x {channels} bytes announced, got {len(body)}")
    pixels = np.frombuffer(body, np.uint8).reshape(height, width, channels)
    if int(pixels.max()) > top:
        raise Corrupt(f"{what}: a pixel of {int(pixels.max())} is above the file's maximum {top}")
    # round(255 p / top) in integers; uint16 holds 255 * 255 + 127
    scaled = (pixels.astype(np.uint16) * 255 + top // 2) // top
    return np.ascontiguousarray(scaled.astype(np.uint8).transpose(2, 0, 1))
