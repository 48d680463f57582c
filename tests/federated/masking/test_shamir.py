"""Sharing of secrets against Lagrange's formula in fractions, written independently."""

import contextlib
import itertools
import math
import os
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triplane.proto.errors import Corrupt, InvalidInput
from triplane.unified_ir.federated.masking.shamir import (
    PRIME,
    SECRET_BYTES,
    SHARE_BYTES,
    join_shares,
    split_secret,
    wrong_shares,
)


def lagrange_at_zero(points):
    """f(0) of the polynomial through the points, over the rationals, reduced to the field."""
    total = Fraction(0)
    for x, y in points:
        others = [z for z, _ in points if z != x]
        total += y * math.prod((Fraction(-z, x - z) for z in others), start=Fraction(1))
    return total.numerator * pow(total.denominator, -1, PRIME) % PRIME


def test_the_modulus_is_the_smallest_prime_above_2_to_the_256():
    def is_probable_prime(n):
        odd, twos = n - 1, 0
        while odd % 2 == 0:
            odd, twos = odd // 2, twos + 1
        for base in range(2, 42):
            x = pow(base, odd, n)
            if x not in {1, n - 1} and all(pow(x, 2**i, n) != n - 1 for i in range(1, twos)):
                return False
        return True

    assert [i for i in range(1, 298) if is_probable_prime(2**256 + i)] == [297]
    assert PRIME == 2**256 + 297


@given(st.binary(min_size=32, max_size=32), st.integers(1, 9), st.data())
def test_as_many_shares_as_the_threshold_give_the_secret(secret, threshold, data):
    holders = data.draw(st.lists(st.integers(0, 9999), min_size=9, max_size=9, unique=True))
    shares = split_secret(secret, threshold, holders)
    chosen = data.draw(st.permutations(holders))[:threshold]
    assert join_shares({i: shares[i] for i in chosen}) == secret
    points = [(i + 1, int.from_bytes(shares[i], "big")) for i in chosen]
    assert lagrange_at_zero(points) == int.from_bytes(secret, "big")


@pytest.mark.parametrize("holders", list(itertools.combinations(range(6), 3)))
def test_the_published_example_of_1234(holders):
    """1234 + 166 x + 94 x^2 at 1 to 6, from the article on Shamir's secret sharing in Wikipedia.

    Its values are below the modulus, so the shares are those of our field, too.
    """
    published = (1494, 1942, 2578, 3402, 4414, 5614)
    shares = {i: published[i].to_bytes(SHARE_BYTES, "big") for i in holders}
    assert join_shares(shares) == (1234).to_bytes(SECRET_BYTES, "big")


def test_shares_are_those_of_the_published_example_for_its_coefficients(monkeypatch):
    drawn = iter((94, 166))
    monkeypatch.setattr("secrets.randbelow", lambda _: next(drawn))
    shares = split_secret((1234).to_bytes(SECRET_BYTES, "big"), 3, range(6))
    values = [int.from_bytes(share, "big") for share in shares.values()]
    assert values == [1494, 1942, 2578, 3402, 4414, 5614]


def test_fewer_shares_fit_every_secret():
    shares = split_secret(bytes(32), 3, range(5))
    points = [(i + 1, int.from_bytes(shares[i], "big")) for i in range(2)]
    # Whatever the third share is, some secret belongs to it, so two shares exclude none.
    secrets = {lagrange_at_zero([*points, (3, y)]) for y in range(50)}
    assert len(secrets) == 50


def test_coefficients_are_drawn_from_the_whole_field():
    # At x = 1, a share of zero by two holders is the coefficient itself.
    drawn = [int.from_bytes(split_secret(bytes(32), 2, range(2))[0], "big") for _ in range(60)]
    assert max(drawn) > PRIME // 2 > min(drawn)
    assert all(y.bit_length() > 200 for y in drawn)


def test_equal_secrets_have_different_shares():
    first, second = (split_secret(bytes(32), 2, range(3)) for _ in range(2))
    assert not set(first.values()) & set(second.values())


@pytest.mark.parametrize(
    ("secret", "threshold", "holders"),
    [
        (bytes(31), 1, range(3)),
        (bytes(33), 1, range(3)),
        (bytes(32), 4, range(3)),
        (bytes(32), 0, range(3)),
        (bytes(32), 1, [1, 1]),
    ],
)
def test_sharing_refuses_what_cannot_be_shared(secret, threshold, holders):
    with pytest.raises(InvalidInput, match="1 <= threshold <= holders"):
        split_secret(secret, threshold, holders)


@pytest.mark.parametrize(
    "share", [b"", bytes(32), bytes(34), b"\xff" * 33, PRIME.to_bytes(SHARE_BYTES, "big")]
)
def test_shares_outside_of_the_field_are_refused(share):
    with pytest.raises(InvalidInput, match="below 2\\^256 \\+ 297"):
        join_shares({0: share})


def test_a_result_of_more_than_32_bytes_is_corrupt():
    with pytest.raises(Corrupt, match="one secret of 32 bytes"):
        join_shares({0: (2**256).to_bytes(SHARE_BYTES, "big")})


def test_a_wrong_share_gives_another_secret():
    secret = os.urandom(32)
    shares = split_secret(secret, 2, range(2))
    shares[0] = shares[0][:-1] + bytes([shares[0][-1] ^ 1])
    with contextlib.suppress(Corrupt):
        assert join_shares(shares) != secret


@given(st.integers(1, 12), st.integers(1, 12), st.data())
def test_wrong_shares_are_found_up_to_half_the_surplus(threshold, surplus, data):
    holders = range(threshold + surplus)
    shares = split_secret(os.urandom(32), threshold, holders)
    liars = data.draw(st.sets(st.sampled_from(holders), max_size=surplus // 2))
    wrong = {i: data.draw(st.sampled_from([0, 1, PRIME - 1])).to_bytes(33, "big") for i in liars}
    assert wrong_shares({**shares, **wrong}, threshold) == liars


def test_more_wrong_shares_are_not_guessed():
    shares = split_secret(os.urandom(32), 4, range(8))
    wrong = {i: os.urandom(32).rjust(33, b"\0") for i in range(3)}
    assert wrong_shares({**shares, **wrong}, 4) is None
    assert wrong_shares(dict.fromkeys(range(8), bytes(33)), 4) == set()
