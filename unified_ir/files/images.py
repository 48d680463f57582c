"""Limits for the size of images, checked before anything of that size is allocated."""

from __future__ import annotations

from typing import Final

from triplane.proto.errors import InvalidInput

MAX_IMAGES: Final = 4 * 2**20
MAX_PIXELS: Final = 256 * 2**20  # of all images together: 1 GiB as float32
MAX_SIDE: Final = 1024  # pixels
MAX_CHANNELS: Final = 4
CHANNELS_LAST: Final = (
    "; images are (N, C, H, W), and x.transpose(0, 3, 1, 2) moves channels that come last"
)


def check_sizes(shape: tuple[int, ...], what: str = "the dataset") -> None:
    """Refuse (N, C, H, W) beyond the limits, before anything of that size is allocated."""
    n, c, h, w = shape
    if min(shape) < 1:
        raise InvalidInput(f"{what} must have at least one image of one pixel, got {shape}")
    for quantity, value, limit in (
        ("images", n, MAX_IMAGES),
        ("channels", c, MAX_CHANNELS),
        ("rows", h, MAX_SIDE),
        ("columns", w, MAX_SIDE),
        ("values in all", n * c * h * w, MAX_PIXELS),
    ):
        if value > limit:
            raise InvalidInput(
                f"{what} has {value} {quantity} in {shape}; at most {limit} are supported"
                f"{CHANNELS_LAST if quantity == 'channels' and w <= MAX_CHANNELS else ''}"
            )
