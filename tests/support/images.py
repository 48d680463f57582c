"""Images as the bytes of files."""

import struct
import zlib

import numpy as np

from triplane.unified_ir.files import png


def chunk(kind, body):
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def header(width, height, depth=8, colour=0, interlace=0):
    return chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlace))


def png_file(*chunks):
    return png.SIGNATURE + b"".join(chunks)


def encoded(image, kinds):
    """A PNG of (H, W, C), row y filtered by kinds[y % len(kinds)]: the standard's forward form."""
    h, w, c = image.shape
    padded = np.zeros((h + 1, w + 1, c), int)
    padded[1:, 1:] = image
    left, up, corner = padded[1:, :-1], padded[:-1, 1:], padded[:-1, :-1]
    distance = [abs(up - corner), abs(left - corner), abs(left + up - 2 * corner)]
    nearest = np.argmin(distance, axis=0)
    paeth = np.choose(nearest, [left, up, corner])
    predictions = [np.zeros_like(left), left, up, (left + up) // 2, paeth]
    rows = b"".join(
        bytes([kind]) + ((image[y] - predictions[kind][y]) % 256).astype(np.uint8).tobytes()
        for y, kind in enumerate((kinds * h)[:h])
    )
    packed = zlib.compress(rows)
    half = len(packed) // 2
    parts = [chunk(b"IDAT", packed[:half]), chunk(b"tEXt", b"a"), chunk(b"IDAT", packed[half:])]
    return png_file(header(w, h, colour=0 if c == 1 else 2), *parts, chunk(b"IEND", b""))


def folder_of_pets(folder):
    """Return the folder with three grey images of two classes, and with files to skip."""
    for label, values in {"dog": [1, 2], "cat": [3]}.items():
        (folder / label).mkdir()
        for value in values:
            (folder / label / f"{value}.pgm").write_bytes(b"P5 2 1 255\n" + bytes([value, 0]))
    (folder / "cat" / ".hidden").write_text("skipped")
    (folder / "README.md").write_text("skipped")
    return folder
