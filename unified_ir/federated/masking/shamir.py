"""Shamir's secret sharing of 32 bytes over the integers modulo 2^256 + 297.

A share is f(x) for a random polynomial f of degree t - 1 with f(0) = secret; t shares give f(0) by
Lagrange's formula, and fewer say nothing about it (Shamir 1979). The modulus is the smallest prime
above 2^256, so every secret of 32 bytes is an element and cohorts may have any size. x is the
holder's position + 1.
"""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Final

from triplane.proto.errors import Corrupt, InvalidInput

PRIME: Final = 2**256 + 297
SECRET_BYTES: Final = 32
SHARE_BYTES: Final = 33


def split_secret(secret: bytes, threshold: int, holders: Sequence[int]) -> dict[int, bytes]:
    """Return a share of 33 bytes for each holder; any `threshold` of them give the secret back."""
    if len(secret) != SECRET_BYTES or not 1 <= threshold <= len(set(holders)) == len(holders):
        raise InvalidInput(
            f"sharing needs {SECRET_BYTES} bytes and 1 <= threshold <= holders, got {len(secret)} "
            f"bytes, threshold {threshold}, {len(set(holders))} holders"
        )
    # The operating system's generator; `randbelow` is uniform over the field.
    polynomial = [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    polynomial.append(int.from_bytes(secret, "big"))
    return {x: _evaluate(polynomial, x + 1).to_bytes(SHARE_BYTES, "big") for x in holders}


def _evaluate(polynomial: Sequence[int], x: int) -> int:
    """Evaluate by Horner's rule, the highest coefficient first."""
    y = 0
    for coefficient in polynomial:
        y = (y * x + coefficient) % PRIME
    return y


def parse_share(share: bytes) -> int:
    """Return the share as an element of the field. InvalidInput if it is not one."""
    y = int.from_bytes(share, "big")
    if len(share) != SHARE_BYTES or y >= PRIME:
        raise InvalidInput(
            f"a share has {SHARE_BYTES} bytes and is below 2^256 + 297, got {len(share)} bytes"
        )
    return y


def join_shares(shares: Mapping[int, bytes]) -> bytes:
    """Return the secret of exactly as many shares as the threshold, by holder.

    Corrupt if the result has more than 32 bytes, so one of the shares is wrong. Other wrong shares
    give another secret, which the caller recognizes by a public key or a digest.
    """
    points = {x + 1: parse_share(share) for x, share in shares.items()}
    secret = 0
    for x, y in points.items():
        # Products of small integers, reduced once, are faster than one reduction for each factor.
        others = [z for z in points if z != x]
        above, below = math.prod(others), math.prod(z - x for z in others)
        secret = (secret + y * above * pow(below, -1, PRIME)) % PRIME
    if secret >> (8 * SECRET_BYTES):
        raise Corrupt("the shares do not belong to one secret of 32 bytes")
    return secret.to_bytes(SECRET_BYTES, "big")


def wrong_shares(shares: Mapping[int, bytes], threshold: int) -> set[int] | None:
    """Return the holders whose shares are wrong, or None if more than half of the surplus are.

    Shares are a Reed-Solomon code word; n of them, t the threshold, correct (n - t) // 2 errors
    (Gao 2003). It takes O(n^2) products, so hostile shares cost little time.
    """
    points = {x: parse_share(share) for x, share in shares.items()}
    earlier, remainder = _interpolate({x + 1: y for x, y in points.items()})
    locator_before, locator = [], [1]
    while 2 * (len(remainder) - 1) >= len(points) + threshold:
        quotient, rest = _divide(earlier, remainder)
        earlier, remainder = remainder, rest
        product = _multiply(quotient, locator)
        locator_before, locator = locator, _subtract(locator_before, product)
    polynomial, rest = _divide(remainder, locator)
    if rest or len(polynomial) > threshold:
        return None
    falling = polynomial[::-1]
    return {x for x, y in points.items() if _evaluate(falling, x + 1) != y}


# Polynomials are lists of coefficients, the lowest first and the highest not zero; [] is zero.


def _interpolate(points: Mapping[int, int]) -> tuple[list[int], list[int]]:
    """Return (the product of all X - x, the polynomial through all points), by Newton's formula."""
    product, through = [1], list[int]()
    for x, y in points.items():
        error = y - _evaluate(through[::-1], x)
        scale = error * pow(_evaluate(product[::-1], x), -1, PRIME)
        through = _subtract(through, [-scale * c for c in product])
        product = _subtract([0, *product], [x * c for c in product])
    return product, through


def _subtract(a: Sequence[int], b: Sequence[int]) -> list[int]:
    difference = [(x - y) % PRIME for x, y in itertools.zip_longest(a, b, fillvalue=0)]
    while difference and not difference[-1]:
        difference.pop()
    return difference


def _multiply(a: Sequence[int], b: Sequence[int]) -> list[int]:
    product = [0] * (len(a) + len(b))
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            product[i + j] += x * y
    return _subtract(product, [])


def _divide(a: Sequence[int], b: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return (quotient, remainder); b is not zero."""
    rest, lead = list(a), pow(b[-1], -1, PRIME)
    quotient = [0] * max(0, len(a) - len(b) + 1)
    for at in reversed(range(len(quotient))):
        factor = quotient[at] = rest[at + len(b) - 1] * lead % PRIME
        for i, c in enumerate(b):
            rest[at + i] = (rest[at + i] - factor * c) % PRIME
    return quotient, _subtract(rest[: len(b) - 1], [])
