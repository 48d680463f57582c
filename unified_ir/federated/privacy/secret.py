"""Exact samples of the discrete Gaussian, drawn from the operating system's generator.

    P[X = x] = exp(-x^2 / (2 v)) / sum_y exp(-y^2 / (2 v)),  x an integer, v the variance parameter

Canonne, Kamath and Steinke 2020 (arXiv 2004.00010), algorithms 2 and 3: a discrete Laplace sample
with scale t = floor(sqrt(v)) + 1 is accepted with probability exp(-(|x| t - v)^2 / (2 v t^2)).
A coin of probability exp(-r) compares r with random bits as far as they decide: nearly always in
float64, within a stated margin, and otherwise in decimal arithmetic of as many digits as needed.
So samples have exactly this law, while Gaussians in floating point have gaps that reveal inputs
(Mironov 2012).
"""

from __future__ import annotations

import decimal
import math
import os
from collections.abc import Callable
from fractions import Fraction
from typing import Final

import numpy as np
import numpy.typing as npt

from triplane.proto.errors import InvalidInput

MAX_VARIANCE: Final = 2**52
"""Largest variance parameter. The margin of `_coins` covers the rounding errors up to here."""
MAX_ENTRIES: Final = 2**40
MARGIN: Final = 2.0**-36
"""Relative error allowed to float64's exp(-r). Below r = 37, where it decides, it makes 2^-44."""
SLACK: Final = decimal.Decimal("1e-9")
"""Error allowed to exp(-r) 2^n in decimal arithmetic, whose digits keep it below 1e-15."""
CHUNK: Final = 1 << 18
"""Samples drawn at a time, which bounds memory to some 20 MB beside the result."""

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Exact = Callable[[int], Fraction]
"""The exact value of r at a position, for the few positions that float64 cannot decide."""


def discrete_gaussian(entries: int, variance: int) -> Integers:
    """Return `entries` independent samples, int64. variance: 1 to 2^52; InvalidInput otherwise.

    A million samples take about a second.
    """
    if not (1 <= variance <= MAX_VARIANCE and 0 <= entries <= MAX_ENTRIES):
        raise InvalidInput(
            f"a discrete Gaussian has a variance of 1 to 2^52 and up to 2^40 entries, got "
            f"{variance} and {entries}"
        )
    samples = np.empty(entries, np.int64)
    at = 0
    while at < entries:
        accepted = _accepted(min(CHUNK, 2 * (entries - at) + 16), variance)[: entries - at]
        samples[at : at + len(accepted)] = accepted
        at += len(accepted)
    return samples


def _accepted(tries: int, variance: int) -> Integers:
    """Algorithm 3: the accepted ones of that many candidates."""
    t = math.isqrt(variance) + 1
    x = _discrete_laplace(tries, t)
    size = np.abs(x)
    r = (size - variance / t) ** 2 / (2.0 * variance)
    exact: Exact = lambda i: Fraction((int(size[i]) * t - variance) ** 2, 2 * variance * t * t)
    return x[_coins(r, exact)]


def _discrete_laplace(tries: int, t: int) -> Integers:
    """Algorithm 2: at most `tries` samples with P[x] proportional to exp(-|x| / t)."""
    u = _below(t, tries)
    u = u[_coins(u / t, lambda i: Fraction(int(u[i]), t))]
    x = u + t * _successes(len(u))
    negative = (np.frombuffer(os.urandom(len(x)), np.uint8) & 1).astype(bool)
    # Without this, zero would come up twice, as 0 and as -0.
    keep = ~(negative & (x == 0))
    return np.where(negative, -x, x)[keep]


def _successes(n: int) -> Integers:
    """How many coins of probability exp(-1) succeed before the first that fails, n times."""
    counts = np.zeros(n, np.int64)
    going = np.arange(n)
    while len(going):
        going = going[_coins(np.ones(len(going)), lambda _i: Fraction(1))]
        counts[going] += 1
    return counts


def _below(limit: int, n: int) -> Integers:
    """n integers, uniform in [0, limit)."""
    top = (1 << 63) // limit * limit
    values = np.empty(0, np.int64)
    while len(values) < n:
        words = (_words(n - len(values)) >> np.uint64(1)).astype(np.int64)
        values = np.concatenate([values, words[words < top] % limit])
    return values


def _coins(r: Floats, exact: Exact) -> npt.NDArray[np.bool_]:
    """Coins that succeed with probability exp(-r), for r >= 0. exact: r itself, by position."""
    bits = (_words(len(r)) >> np.uint64(11)).astype(np.int64)
    p = np.exp(-r) * 2.0**53
    # U is in [bits, bits + 1] / 2^53. Zero bits are never below a p that underflowed.
    heads = bits + 1 <= p * (1 - MARGIN)
    open_ = ~heads & (bits < p * (1 + MARGIN) + 1e-300)
    for i in np.flatnonzero(open_):
        heads[i] = _decide(int(bits[i]), exact(int(i)))
    return np.asarray(heads)


def _decide(first: int, r: Fraction) -> bool:
    """Return whether U < exp(-r), where U's first 53 bits are those of `first`."""
    bits, size = first, 53
    while True:
        bits, size = (bits << 64) | int.from_bytes(os.urandom(8), "big"), size + 64
        with decimal.localcontext(prec=size // 3 + 20, Emin=-(10**9)):
            p = (-(decimal.Decimal(r.numerator) / r.denominator)).exp() * (1 << size)
            if bits + 1 <= p - SLACK:
                return True
            if bits >= p + SLACK:
                return False


def _words(n: int) -> npt.NDArray[np.uint64]:
    return np.frombuffer(os.urandom(8 * n), "<u8").astype(np.uint64, copy=False)
