"""What is masked: fields of integers. It needs no cryptography, so studies can use it alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy.typing as npt

from triplane.proto.errors import InvalidInput

MAX_WIDTH: Final = 56
MAX_ENTRIES: Final = 1 << 31

Vector = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class MaskedField:
    """`entries` integers of every device, each in [0, 2^bits) without noise.

    noise_bits: further bits of the sum. With them, integers may be negative or larger, and whoever
    adds the noise bounds how rarely the sum wraps around (`privacy/distributed.py`).
    """

    entries: int
    bits: int
    noise_bits: int = 0

    def __post_init__(self) -> None:
        if not (1 <= self.entries <= MAX_ENTRIES and 1 <= self.bits <= MAX_WIDTH):
            raise InvalidInput(
                f"a masked field has 1 to {MAX_ENTRIES} entries of 1 to {MAX_WIDTH} bits, got "
                f"{self.entries} entries of {self.bits} bits"
            )
        if not 0 <= self.noise_bits <= MAX_WIDTH:
            raise InvalidInput(
                f"a masked field has 0 to {MAX_WIDTH} noise bits, got {self.noise_bits}"
            )

    def width(self, devices: int) -> int:
        """Return the bits of an entry of the sum over `devices`. InvalidInput above 56."""
        width = self.bits + (devices - 1).bit_length() + self.noise_bits
        if width > MAX_WIDTH:
            raise InvalidInput(
                f"a sum over {devices} devices of {self.bits} bits needs {width} bits, the limit "
                f"is {MAX_WIDTH}"
            )
        return width
