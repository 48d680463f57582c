"""A device of a masked round counts only with an identity key of the roster."""

import hashlib

import pytest
from tests.federated.masking.rounds import identity_key, public_der

from triplane.proto.errors import InvalidInput
from triplane.proto.roster import Roster
from triplane.unified_ir.federated.masking import EcdsaSigner, roster_verifier

KEYS = [public_der(identity_key(i)) for i in range(3)]
ROSTER = Roster(4, 2_000_000_000, frozenset(hashlib.sha256(key).digest() for key in KEYS[:2]))


def test_devices_of_the_roster_sign_for_themselves_only():
    verifier = roster_verifier(ROSTER, {"a": KEYS[0], "b": KEYS[1]})
    signature = EcdsaSigner(identity_key(0)).sign(b"keys")
    assert verifier.verifies("a", b"keys", signature)
    assert not verifier.verifies("b", b"keys", signature)
    assert not verifier.verifies("a", b"other keys", signature)


def test_a_device_that_the_cloud_invented_is_refused_by_name():
    with pytest.raises(InvalidInput, match="'mallory' is no device of the roster 4 of 2 devices"):
        roster_verifier(ROSTER, {"a": KEYS[0], "mallory": KEYS[2]})


def test_one_device_under_two_names_is_refused():
    with pytest.raises(InvalidInput, match="'a' and 'b' have the same identity key"):
        roster_verifier(ROSTER, {"a": KEYS[0], "b": KEYS[0]})
