"""Rounding real numbers to small integers: x ~ s (q - z), scale s > 0, zero point z.

Every range includes 0, so that 0 is exact: padding and the floor of a ReLU cost no error. For x
between s (q_min - z) and s (q_max - z) rounding gives |x - s (q - z)| <= s / 2; outside, q
saturates. Formulas as in Jacob et al. 2018, arXiv:1712.05877, sections 2.1 to 2.4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from triplane.proto.errors import InvalidInput, NotFound
from triplane.unified_ir.ir.graph import Array
from triplane.unified_ir.ir.types import DType, int8, uint8

INT32_MAX: Final = 2**31 - 1
NARROW: Final = 64
"""Largest weight magnitude in 7 bits: two products U8 x S8 then fit the 16-bit sums of AVX2."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """Integer types of activations and weights.

    Activations: asymmetric, one scale per tensor. Weights: symmetric (z = 0), one scale per output
    channel, |q| <= weight_limit; -128 is unused, so a weight and its negative round alike.
    reduced: the scheme with 7-bit weights, for processors on which sums of products may saturate.
    """

    name: str
    activation: DType
    weight: DType
    weight_limit: int = 127
    reduced: str = ""

    @property
    def grid(self) -> tuple[int, int]:
        """Smallest and largest integer of an activation."""
        limits = np.iinfo(self.activation.numpy)
        return int(limits.min), int(limits.max)

    @property
    def weight_bits(self) -> int:
        """Bits of a weight: the fewest that hold 2 weight_limit values."""
        return (2 * self.weight_limit - 1).bit_length()


# fmt: off
_ROWS: Final = (
    Scheme("u8s8",  uint8, int8,  reduced="u8s7"),
    Scheme("u8s7",  uint8, int8,  NARROW),
    Scheme("s8s8",  int8,  int8),
)
# fmt: on
SCHEMES: Final[Mapping[str, Scheme]] = {row.name: row for row in _ROWS}
assert len(SCHEMES) == len(_ROWS)


def scheme(name: str) -> Scheme:
    """Return the scheme of that name; NotFound lists the existing ones."""
    if name not in SCHEMES:
        raise NotFound(f"no quantization scheme {name!r}; there are {', '.join(SCHEMES)}")
    return SCHEMES[name]


ONE_SCALE: Final = 8.0
"""Largest factor by which one scale for all gates of an LSTM may raise the mean square of rounding
errors of its weights. It costs about 2 dB, and the kernel runs up to a fifth faster
(decision 0043)."""


@dataclass(frozen=True, slots=True)
class Range:
    """Smallest and largest value seen; finite. left_out: samples with values outside of it."""

    low: float
    high: float
    left_out: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not (np.isfinite(self.low) and np.isfinite(self.high) and self.low <= self.high):
            raise InvalidInput(f"a range needs finite ends in order, got {self.low} to {self.high}")


@dataclass(frozen=True, slots=True, eq=False)
class Quantizer:
    """Scale and zero point of one tensor."""

    scale: Array
    zero: Array


def activation_quantizer(seen: Range, row: Scheme) -> Quantizer:
    """s = (high - low) / (q_max - q_min) over the range widened to 0; z = round(q_min - low / s).

    s is float32; 1 where the range is empty or too small to divide by.
    """
    q_min, q_max = row.grid
    low, high = min(seen.low, 0.0), max(seen.high, 0.0)
    scale = (high - low) / (q_max - q_min)
    # Below the smallest normal float32 the division by the scale would overflow or lose all digits.
    if scale < np.finfo(np.float32).tiny:
        scale = 1.0
    zero = np.clip(np.rint(q_min - low / scale), q_min, q_max)
    return Quantizer(np.array(scale, np.float32), np.array(zero, row.activation.numpy))


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """q: int8 like w; scale: (C,) float32 along `axis`; bias: (C,) int32 in units of s_x scale."""

    q: Array
    scale: Array
    bias: Array | None
    bias_scale: Array


def quantize_weight(
    w: Array, axis: int, row: Scheme, *, x_scale: Array, bias: Array | None = None
) -> QuantizedWeight:
    """One scale per slice of `axis`: s = max|w| / L, q = clip(round(w / s), -L, L).

    The bias joins the 32-bit sum of products, so its scale is s_x s and it has no zero point. Where
    |bias| / (s_x s) would exceed 2^31 - 1, as in a channel of nearly zero weights, s grows until it
    fits. Raises InvalidInput on NaN or infinity.
    """
    if not (np.isfinite(w).all() and (bias is None or np.isfinite(bias).all())):
        raise InvalidInput("weights and biases must be finite; one holds NaN or infinity")
    limit = row.weight_limit
    others = tuple(i for i in range(w.ndim) if i != axis)
    scale = np.abs(w).max(axis=others, initial=0.0).astype(np.float64) / limit
    if bias is not None:
        # The 256 leave room for rounding the scale and its product with s_x to float32: twice 2^-24
        # of 2^31.
        scale = np.maximum(scale, np.abs(bias) / (np.float64(x_scale) * (INT32_MAX - 256)))
    scale32 = scale.astype(np.float32)
    scale32[scale32 < np.finfo(np.float32).tiny] = 1.0
    along = scale32.reshape([-1 if i == axis else 1 for i in range(w.ndim)])
    q = np.clip(np.rint(w / along), -limit, limit).astype(row.weight.numpy)
    bias_scale = x_scale * scale32
    if bias is not None:
        sums = np.rint(bias.astype(np.float64) / bias_scale)
        bias = np.clip(sums, -INT32_MAX, INT32_MAX).astype(np.int32)
    return QuantizedWeight(q, scale32, bias, bias_scale)


def quantize_gates(w: Array, row: Scheme) -> tuple[Array, Array]:
    """Return int8 like w, and scales (D, 4 H): one per row, or per direction if as good.

    w: (D, 4 H, K), weights of an LSTM. Raises InvalidInput on NaN or infinity.
    """
    directions, rows, size = w.shape
    largest = np.abs(w).max(axis=2).astype(np.float64)
    # The error of rounding to a step s has the mean square s^2 / 12. With one scale for the
    # direction every row gets the largest step; with one per row the mean over the rows counts.
    growth = (127 / row.weight_limit) ** 2 * np.square(largest.max(axis=1))
    together = bool((growth <= ONE_SCALE * np.square(largest).mean(axis=1)).all())
    parts = w.reshape((directions, -1) if together else (-1, size))
    weight = quantize_weight(parts, 0, row, x_scale=np.ones((), np.float32))
    scale = weight.scale.reshape(directions, -1)
    return weight.q.reshape(w.shape), np.array(np.broadcast_to(scale, (directions, rows)))
