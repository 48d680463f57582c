"""Decode an image file to bytes (C, H, W), grey or RGB; the only module that imports Pillow.

8-bit PNG, PGM and PPM within the limits of `files.images` are decoded without it. Rules for the
rest: an orientation in the Exif data of a JPEG is applied; palettes, YCbCr and CMYK become RGB;
alpha is dropped, so hidden pixels keep their colour; of 16 bits per channel the high byte is kept.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from triplane.proto.errors import Corrupt, InvalidInput, MissingExtra, TriplaneError
from triplane.unified_ir.files import png, pnm

Pixels = NDArray[np.uint8]

MAX_DECODED_PIXELS: Final = 64 << 20
"""Limit for the pixels of one image, checked before it is decoded."""
MAX_SCANS: Final = 256
"""Limit for the passes of a progressive JPEG: each one takes time for every pixel."""
GREY_MODES: Final = frozenset({"1", "L", "LA", "La", "I;16", "I;16B", "I;16L"})
COLOUR_MODES: Final = frozenset({"P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr"})
_ORIENTATION: Final = 0x0112  # the tag of Exif
# By Exif's number: (mirrored from left to right before, quarter turns against the clock).
_TURNS: Final = {2: (1, 0), 3: (0, 2), 4: (1, 2), 5: (1, 1), 6: (0, 3), 7: (1, 3), 8: (0, 1)}
# What Pillow's parsers raise on damaged files, besides OSError: they are not written for hostile
# ones. Warning: where warnings are errors, one of its size limit is raised.
_DAMAGE: Final = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    EOFError,
    ArithmeticError,
    RuntimeError,
    struct.error,
    zlib.error,
    Warning,
)


def decoded_png(data: bytes, what: str) -> Pixels:
    """Return the image; Pillow decodes what `files.png` does not."""
    try:
        return png.decode(data, what)
    except InvalidInput as refused:
        try:
            return decoded_by_pillow(data, what)
        except MissingExtra as error:
            raise MissingExtra(f"{refused}; or read it with Pillow: {error}") from refused


def decoded_by_pillow(data: bytes, what: str) -> Pixels:
    """Return a PNG or JPEG as (C, H, W), C = 1 or 3. Corrupt, InvalidInput or MissingExtra."""
    module = _pillow(what)
    if data.count(b"\xff\xda") > MAX_SCANS and not data.startswith(png.SIGNATURE):
        raise InvalidInput(f"{what}: a JPEG of more than {MAX_SCANS} scans is not read; convert it")
    try:
        # Other formats stay closed: some of Pillow's parsers run programs or read other files.
        with module.open(io.BytesIO(data), formats=("PNG", "JPEG")) as image:
            width, height = image.size
            if width * height > MAX_DECODED_PIXELS:
                raise InvalidInput(
                    f"{what} has {height} x {width} pixels; {MAX_DECODED_PIXELS} are read"
                )
            image.load()
            turn = (0, 0)
            if image.format == "JPEG":
                turn = _TURNS.get(image.getexif().get(_ORIENTATION, 1), turn)
            pixels = _pixels(image, what)
    except TriplaneError:
        raise
    except (*_DAMAGE, module.DecompressionBombError) as error:
        raise Corrupt(f"{what} cannot be decoded: {error}; is it a complete image?") from error
    return np.ascontiguousarray(_turned(pixels, *turn).transpose(2, 0, 1))


DECODERS: Final[dict[str, Callable[[bytes, str], Pixels]]] = {
    ".png": decoded_png,
    ".jpg": decoded_by_pillow,
    ".jpeg": decoded_by_pillow,
    ".pgm": pnm.decode,
    ".ppm": pnm.decode,
}
"""By suffix of the file, in lower case."""


def with_channels(image: Pixels, channels: int) -> Pixels:
    """Return (channels, H, W), 1 or 3: grey is repeated, RGB weighted as in ITU-R BT.601."""
    if len(image) == channels:
        return image
    if channels == 3:
        return np.repeat(image, 3, axis=0)
    # The integer weights of libjpeg and Pillow, in units of 1 / 65536.
    weights = np.array([19595, 38470, 7471], np.uint32)
    grey = np.tensordot(weights, image.astype(np.uint32), 1) + 0x8000 >> 16
    return grey.astype(np.uint8)[None]


def _pixels(image: Any, what: str) -> Pixels:
    """Return (H, W, C) of an image of Pillow's."""
    if image.mode not in GREY_MODES | COLOUR_MODES:
        raise InvalidInput(f"{what} has pixels of kind {image.mode}; convert it to 8-bit RGB")
    if image.mode.startswith("I;16"):
        # Pillow's own conversion to 8 bits clips at 255.
        return (np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8)[..., None]
    if image.mode in GREY_MODES:
        return np.asarray(image.convert("L"), np.uint8)[..., None]
    return np.asarray(image.convert("RGB"), np.uint8)


def _turned(pixels: Pixels, mirrored: int, quarters: int) -> Pixels:
    return np.rot90(pixels[:, ::-1] if mirrored else pixels, quarters)


def _pillow(what: str) -> ModuleType:
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtra(
            f"{what} needs Pillow; it comes with: pip install 'triplane[images]'"
        ) from error
    return Image
