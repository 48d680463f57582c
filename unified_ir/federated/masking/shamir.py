"""Shamir's secret sharing of 32 bytes over the integers modulo 2^256 + 297.

A share is f(x) for a random polynomial f of degree t - 1 with f(0) = secret; t shares give f(0) by
Lagrange's formula, and fewer say nothing about it (Shamir 1979). The modulus is the smallest prime
above 2^256, so every secret of 32 bytes is an element and cohorts may have any size. x is the
holder's position + 1.
"""

from __future__ import annotations

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
