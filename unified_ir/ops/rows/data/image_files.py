"""Decode images from the bytes of their files: PNG and PNM, by this package's own readers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.files import png, pnm
from triplane.unified_ir.ir.types import ShapeError, TensorType
from triplane.unified_ir.ops.row import Op, OpCall, OpKind

Read = Callable[[bytes, str], Any]

# fmt: off
READERS: Final[Mapping[bytes, Read]] = {
    png.SIGNATURE: png.decode, b"P5": pnm.decode, b"P6": pnm.decode,
}
OTHERS: Final[Mapping[bytes, str]] = {
    b"\xff\xd8\xff": "JPEG", b"BM": "BMP", b"RIFF": "WebP", b"II*\0": "TIFF", b"MM\0*": "TIFF",
    b"\0\0\0\x0cjP  ": "JPEG 2000", b"GIF8": "GIF", b"P": "a PNM of another kind",
}
# fmt: on


def _grey(rgb: Any) -> Any:
    """Luma by ITU-R 601 in 16-bit fixed point, which is how imaging libraries round it."""
    r, g, b = (rgb[..., k : k + 1].astype(np.uint32) for k in range(3))
    return ((r * 19595 + g * 38470 + b * 7471 + 0x8000) >> 16).astype(np.uint8)


def _rgb(pixels: Any) -> Any:
    return np.repeat(pixels, 3, axis=2) if pixels.shape[2] == 1 else pixels


FORMATS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "RGB": _rgb,
    "BGR": lambda pixels: np.ascontiguousarray(_rgb(pixels)[..., ::-1]),
    "Grayscale": lambda pixels: pixels if pixels.shape[2] == 1 else _grey(pixels),
}


def _decoded(call: OpCall) -> tuple[TensorType, ...]:
    x, wanted = call.type(0), call.attrs["pixel_format"]
    if x.rank != 1:
        raise ShapeError(f"{call.row} takes the bytes of one file, got {x}")
    if wanted not in FORMATS:
        raise InvalidInput(f"{call.row} gives {', '.join(FORMATS)}, not {wanted!r}")
    channels = 1 if wanted == "Grayscale" else 3
    return (x.with_shape((call.opened(0), call.opened(1), channels)),)


def _decode(encoded: Any, *, pixel_format: str) -> Any:
    data = encoded.tobytes()
    read = next((f for head, f in READERS.items() if data.startswith(head)), None)
    if read is None:
        kind = next((name for head, name in OTHERS.items() if data.startswith(head)), "unknown")
        raise InvalidInput(
            f"ImageDecoder reads PNG and binary PNM here, these bytes are {kind} "
            f"({data[:8]!r}); convert the image"
        )
    return FORMATS[pixel_format](read(data, "ImageDecoder's operand").transpose(1, 2, 0))


image_decoder = Op(
    name="ImageDecoder", kind=OpKind.DATA, data_dependent_dims=2, infer=_decoded, reference=_decode
)
"""encoded: uint8 (n,) -> uint8 (H, W, 3), or (H, W, 1) for "Grayscale"."""
