"""What is remembered of callers never outlives a change."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triplane.cloud.identity.admission_cache import KEEP_S, AdmissionCache
from triplane.cloud.identity.authority import Authority
from triplane.cloud.identity.principals import Principal, Principals, serial_of
from triplane.cloud.identity.rights import PrincipalRole
from triplane.proto.identity import certificate_request, key_digest, new_key

ANN = Principal("ann", PrincipalRole.DEVICE, "1", 0.0, 100.0, revoked=False)
KEY = ("1", "ann", b"k")


def kept(known, now_s=0.0, expires_s=100.0):
    known.keep(KEY, ANN, expires_s=expires_s, now_s=now_s, at=known.changes)


def test_an_answer_asked_for_before_a_change_is_not_kept():
    known = AdmissionCache()
    at = known.changes
    known.forget()
    known.keep(KEY, ANN, expires_s=100.0, now_s=0.0, at=at)
    assert known.get(KEY, 0.0) is None


@given(st.floats(-10, 200))
def test_an_answer_holds_for_a_moment_and_never_past_its_certificate(now_s):
    known = AdmissionCache()
    kept(known, now_s=99.5)
    holds = 99.5 <= now_s < 100.0
    assert (known.get(KEY, now_s) is ANN) == holds
    assert known.get(("2", "ann", b"k"), 99.5) is None


def test_a_clock_that_is_set_back_forgets():
    known = AdmissionCache()
    kept(known, now_s=50.0)
    assert known.get(KEY, 50.0 - KEEP_S) is None


@pytest.fixture
def principals(database, tmp_path):
    authority = Authority.make(tmp_path, "test", 0.0)
    return Principals(database, authority, lambda: 1000.0)


def test_a_revoked_name_is_out_when_its_revocation_is_answered(principals):
    made = principals.admit_now(certificate_request(new_key()), "ann", PrincipalRole.DEVICE)
    serial = serial_of(made)

    async def story():
        first = await principals.holder(serial, "ann")
        assert await principals.holder(serial, "ann") is first
        await principals.revoke("operator", "ann", "lost")
        return await principals.holder(serial, "ann")

    assert asyncio.run(story()) is None


def test_a_known_serial_and_name_with_another_key_are_nobodys(principals):
    """Who stole the authority's key signs whatever certificate he likes."""
    made = principals.admit_now(certificate_request(new_key()), "ann", PrincipalRole.DEVICE)
    serial = serial_of(made)

    async def story():
        assert await principals.holder(serial, "ann", key_digest(made)) is not None
        return await principals.holder(serial, "ann", b"\1" * 32)

    assert asyncio.run(story()) is None


def test_a_revocation_whose_caller_left_counts_all_the_same(principals):
    made = principals.admit_now(certificate_request(new_key()), "ann", PrincipalRole.DEVICE)
    serial = serial_of(made)

    async def story():
        await principals.holder(serial, "ann")
        revoking = asyncio.create_task(principals.revoke("operator", "ann", "lost"))
        await asyncio.wait({revoking}, timeout=0)
        revoking.cancel()
        await asyncio.gather(revoking, return_exceptions=True)
        async with asyncio.timeout(5):
            while await principals.holder(serial, "ann"):
                await asyncio.wait({asyncio.create_task(principals.all())})

    asyncio.run(story())
