"""Exact samples of integer noise, drawn from the operating system's generator.

`rounded_gaussian`: a real Gaussian, rounded. It is post-processing of Gaussian noise, so that sums
of integers with it have exactly the privacy of the Gaussian mechanism.

    P[X = k] = F((k + 1/2) / std) - F((k - 1/2) / std),   F: the normal distribution

`discrete_gaussian`: of integers only, for noise whose sum over devices has to be known.

    P[X = k] = exp(-k^2 / (2 v)) / sum_j exp(-j^2 / (2 v)),   v: the variance parameter

Canonne, Kamath and Steinke 2020 (arXiv 2004.00010), algorithms 2 and 3: a discrete Laplace sample
with scale t = floor(sqrt(v)) + 1 is accepted with probability exp(-(|x| t - v)^2 / (2 v t^2)).

Both read a uniform number U as random bits, as many as decide: nearly always in float64 within a
stated margin, otherwise in decimal arithmetic of as many digits as needed. So samples have exactly
these laws, while Gaussians in floating point have gaps that reveal inputs (Mironov 2012). The time
that a call takes depends on the samples.
"""

from __future__ import annotations

import decimal
import math
import os
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Final

import numpy as np
import numpy.typing as npt

from triplane.proto.errors import InvalidInput

MAX_VARIANCE: Final = 2**52
"""Largest variance parameter. The margin of `_coins` covers the rounding errors up to here."""
MAX_STD: Final = 2.0**30
MAX_ENTRIES: Final = 2**40
MARGIN: Final = 2.0**-36
"""Relative error allowed to float64's exp(-r). Below r = 37, where it decides, it makes 2^-44."""
SLACK: Final = Decimal("1e-9")
"""Error allowed to decimal arithmetic, whose digits keep it below 1e-15."""
ROUND_OFF: Final = 2.0**-44
"""Relative error allowed to a Gaussian in float64; logarithm, root and cosine make 2^-50."""
CHUNK: Final = 1 << 18
"""Samples drawn at a time, which bounds memory to some 20 MB beside the result."""

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Exact = Callable[[int], Fraction]
"""The exact value of r at a position, for the few positions that float64 cannot decide."""


def rounded_gaussian(entries: int, std: float) -> Integers:
    """Return `entries` independent samples, int64. std: 1 to 2^30; InvalidInput otherwise."""
    if not (1 <= std <= MAX_STD and 0 <= entries <= MAX_ENTRIES):
        raise InvalidInput(
            f"a rounded Gaussian has a standard deviation of 1 to 2^30 and up to 2^40 entries, got "
            f"{std} and {entries}"
        )
    samples = np.empty(entries, np.int64)
    for at in range(0, entries, CHUNK):
        part = samples[at : at + CHUNK]
        part[:] = _rounded(len(part), std)
    return samples


def discrete_gaussian(entries: int, variance: int) -> Integers:
    """Return `entries` independent samples, int64. variance: 1 to 2^52; InvalidInput otherwise."""
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


# Box and Muller 1958: std sqrt(-2 ln U) cos(2 pi V) is Gaussian. U and V are intervals of width
# 2^-52 about (k + 1/2) 2^-52; a sample whose interval meets no half-integer is decided.


def _rounded(n: int, std: float) -> Integers:
    k, j = _bits(n, 52), _bits(n, 52)
    u, v = (k + 0.5) * 2.0**-52, (j + 0.5) * 2.0**-52
    radius = np.sqrt(-2 * np.log(u))
    x = std * radius * np.cos(2 * np.pi * v)
    error = std * (radius * ROUND_OFF + 2.0**-51 / (u * radius))
    low, high = np.rint(x - error), np.rint(x + error)
    samples = low.astype(np.int64)
    for i in np.flatnonzero((low != high) | (k == 0)):
        samples[i] = _round(int(k[i]), int(j[i]), std)
    return np.asarray(samples)


def _round(k: int, j: int, std: float) -> int:
    """Return the rounded sample of the intervals of k and j, extended as far as needed."""
    size = 52
    while True:
        k, j, size = (k << 64) | _more(), (j << 64) | _more(), size + 64
        if k:
            low, high = (end.to_integral_value() for end in _interval(k, j, size, std))
            if low == high:
                return int(low)


def _interval(k: int, j: int, size: int, std: float) -> tuple[Decimal, Decimal]:
    """Return bounds of the sample where U and V begin with the `size` bits of k > 0 and of j.

    The half-width is at most 2 pi radius + 2 / (u radius) times that of U and V.
    """
    with decimal.localcontext(prec=size // 3 + 40):
        half = Decimal(2) ** -(size + 1)
        u, v = (2 * k + 1) * half, (2 * j + 1) * half
        radius = (-2 * u.ln()).sqrt()
        x = Decimal(std) * radius * _cosine(2 * _pi() * v)
        error = Decimal(std) * (8 * radius + 4 / (u * radius)) * half
        return x - error, x + error


def _pi() -> Decimal:
    """Machin's formula, to the context's precision less two digits."""
    return 4 * (4 * _arctangent_of_inverse(5) - _arctangent_of_inverse(239))


def _arctangent_of_inverse(n: int) -> Decimal:
    term = total = 1 / Decimal(n)
    k = 1
    while term:
        term, k = -term / (n * n), k + 2
        if abs(term) < Decimal(10) ** -decimal.getcontext().prec:
            break
        total += term / k
    return total


def _cosine(x: Decimal) -> Decimal:
    """Taylor's series; x: 0 to 2 pi, where at most three digits cancel."""
    term = total = Decimal(1)
    k = 0
    while abs(term) > Decimal(10) ** -decimal.getcontext().prec:
        k += 2
        term = -term * x * x / (k * (k - 1))
        total += term
    return total


def _accepted(tries: int, variance: int) -> Integers:
    """Algorithm 3: the accepted ones of that many candidates."""
    t = math.isqrt(variance) + 1
    x = _discrete_laplace(tries, t)
    size = np.abs(x)
    r = (size - variance / t) ** 2 / (2.0 * variance)
    exact: Exact = lambda i: Fraction((int(size[i]) * t - variance) ** 2, 2 * variance * t * t)
    return np.asarray(x[_coins(r, exact)])


def _discrete_laplace(tries: int, t: int) -> Integers:
    """Algorithm 2: at most `tries` samples with P[x] proportional to exp(-|x| / t)."""
    u = _below(t, tries)
    u = u[_coins(u / t, lambda i: Fraction(int(u[i]), t))]
    x = u + t * _successes(len(u))
    negative = (np.frombuffer(os.urandom(len(x)), np.uint8) & 1).astype(bool)
    # Without this, zero would come up twice, as 0 and as -0.
    keep = ~(negative & (x == 0))
    return np.asarray(np.where(negative, -x, x)[keep])


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
        words = _bits(n - len(values), 63)
        values = np.concatenate([values, words[words < top] % limit])
    return values


def _coins(r: Floats, exact: Exact) -> Flags:
    """Coins that succeed with probability exp(-r), for r >= 0. exact: r itself, by position."""
    k = _bits(len(r), 53)
    p = np.exp(-r) * 2.0**53
    # U is in [k, k + 1] / 2^53. Zero bits are not above a p that underflowed: they stay open.
    heads = k + 1 <= p * (1 - MARGIN)
    undecided = ~heads & (k < p * (1 + MARGIN) + 1e-300)
    for i in np.flatnonzero(undecided):
        heads[i] = _decide(int(k[i]), exact(int(i)))
    return np.asarray(heads)


def _decide(k: int, r: Fraction) -> bool:
    """Return whether U < exp(-r), where the first 53 bits of U are those of k."""
    size = 53
    while True:
        k, size = (k << 64) | _more(), size + 64
        with decimal.localcontext(prec=size // 3 + 20, Emin=-(10**9)):
            p = (-(Decimal(r.numerator) / r.denominator)).exp() * (1 << size)
            if k + 1 <= p - SLACK:
                return True
            if k >= p + SLACK:
                return False


def _bits(n: int, size: int) -> Integers:
    """n integers of `size` random bits, at most 63."""
    words = np.frombuffer(os.urandom(8 * n), "<u8")
    return (words >> np.uint64(64 - size)).astype(np.int64)


def _more() -> int:
    """64 further bits of a uniform number."""
    return int.from_bytes(os.urandom(8), "big")
