"""A roster has one text, and hostile ones are refused within limits."""

import base64
import hashlib
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triplane.proto.errors import InvalidInput
from triplane.proto.roster import MAX_ROSTER_BYTES, MAX_ROSTER_KEYS, Roster

ROSTER = Roster(3, 2_000_000_000, frozenset(hashlib.sha256(key).digest() for key in (b"a", b"b")))
EMPTY = replace(ROSTER, digests=frozenset())


def with_fields(**fields):
    return json.dumps(json.loads(ROSTER.text()) | fields, sort_keys=True) + "\n"


def test_it_holds_the_keys_whose_sha256_it_lists():
    assert ROSTER.holds(b"a")
    assert not ROSTER.holds(b"c")
    assert not EMPTY.holds(b"a")


@given(st.frozensets(st.binary(min_size=32, max_size=32), max_size=20), st.integers(1, 1 << 30))
def test_the_text_gives_the_same_roster_again(digests, version):
    roster = Roster(version, 5, digests)
    assert Roster.parse(roster.text()) == roster


def test_it_expires():
    assert not ROSTER.is_expired(1_999_999_999.9)
    assert ROSTER.is_expired(2_000_000_000)


def test_the_largest_roster_fits_its_limit():
    full = Roster(1, 5, frozenset(i.to_bytes(32, "big") for i in range(MAX_ROSTER_KEYS)))
    assert len(Roster.parse(full.text()).digests) == MAX_ROSTER_KEYS


def test_one_device_more_is_refused():
    too_many = frozenset(i.to_bytes(32, "big") for i in range(MAX_ROSTER_KEYS + 1))
    with pytest.raises(InvalidInput, match="at most 20000 devices"):
        Roster(1, 5, too_many)
    packed = base64.b64encode(b"".join(sorted(too_many))).decode()
    with pytest.raises(InvalidInput, match="at most 20000 devices"):
        Roster.parse(with_fields(digests=packed))


DIGEST = bytes(32)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (" " * (MAX_ROSTER_BYTES + 1), "bytes of JSON"),
        ("[" * 5000, "is a JSON object"),
        ("[]", "has the fields"),
        ("\ud800", "is a JSON object"),
        (with_fields(more=1), "has the fields"),
        (with_fields(format=2), "format 1, got 2"),
        (with_fields(format=True), "format 1, got True"),
        (with_fields(version=0), "version is 1 to"),
        (with_fields(version=1 << 31), "version is 1 to"),
        (with_fields(version=True), "version is 1 to"),
        (with_fields(version=1.0), "version is 1 to"),
        (with_fields(expires_s=10**12), "expires at 1 to"),
        (with_fields(expires_s="soon"), "expires at 1 to"),
        (with_fields(digests=7), "one text in base64|32 bytes each"),
        (with_fields(digests="é"), "one text in base64"),
        (with_fields(digests="AAAA"), "32 bytes each, got 3"),
        (with_fields(digests=base64.b64encode(2 * DIGEST).decode()), "canonical form"),
        (
            with_fields(digests=base64.b64encode(b"\1" * 32 + DIGEST).decode()),
            "canonical form",
        ),
        (ROSTER.text().replace(": ", ":"), "canonical form"),
        (ROSTER.text().replace('"format": 1', '"format": 1, "format": 1'), "canonical form"),
        (ROSTER.text()[:-1], "canonical form"),
    ],
)
def test_a_hostile_text_is_refused(text, reason):
    with pytest.raises(InvalidInput, match=reason):
        Roster.parse(text)
