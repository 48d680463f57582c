"""What a session derives: its digest covers all keys, and no two purposes share a key."""

import contextlib
import hashlib
import hmac
import itertools
import struct
from dataclasses import replace

import pytest
from tests.federated.masking.rounds import Round, terms

from triplane.proto.errors import Corrupt
from triplane.unified_ir.federated.masking.messages import (
    MaskingCohort,
    decode_shares,
    encode_shares,
    statement,
)
from triplane.unified_ir.federated.masking.primitives import RoundKey
from triplane.unified_ir.federated.masking.session import MaskingSession, self_mask_commitment
from triplane.unified_ir.federated.masking.shamir import join_shares


@pytest.fixture
def round_():
    round_ = Round(3)
    round_.advertise()
    return round_


def test_the_digest_covers_every_key_and_every_term_but_no_signature(round_):
    listed = round_.cohort.advertisements
    first = MaskingSession(round_.terms, round_.cohort).digest

    def digest_with(terms_=round_.terms, **changes):
        changed = (replace(listed[0], **changes), *listed[1:])
        return MaskingSession(terms_, MaskingCohort(advertisements=changed)).digest

    # Whoever holds an ECDSA signature can write it in a second form, and must not choose the graph.
    assert digest_with(signature=b"another") == first
    others = {
        digest_with(device="a"),
        digest_with(encryption_key=bytes(32)),
        digest_with(mask_key=bytes(32)),
        *(
            digest_with(terms(**{name: value}))
            for name, value in {
                "run": "other",
                "base": bytes(32),
                "round": 2,
                "attempt": 1,
                "groups": 2,
                "fields": ((50, 9),),
                "lost_share": 0.1,
                "colluding_share": 0.01,
                "failure": 1e-9,
            }.items()
        ),
    }
    assert len(others | {first}) == 13
    assert digest_with(terms(fields=((50, 8, 1),))) not in others | {first}


def test_a_key_encrypts_one_message_only(round_):
    # The nonce is always zero, so two messages under one key would reveal their difference.
    session = MaskingSession(round_.terms, round_.cohort)
    secrets = [device._secrets for device in round_.devices]
    sealed = {
        (i, j): session.seal(secrets[i].encryption, i, j, bytes(74))
        for i, j in itertools.permutations(range(3), 2)
    }
    assert len(set(sealed.values())) == 6
    assert session.open(secrets[1].encryption, 0, 1, sealed[0, 1]) == bytes(74)
    with pytest.raises(Corrupt, match="another pair or round"):
        session.open(secrets[0].encryption, 1, 0, sealed[0, 1])
    later = MaskingSession(terms(round=2), round_.cohort)
    with pytest.raises(Corrupt, match="another pair or round"):
        later.open(secrets[1].encryption, 0, 1, sealed[0, 1])


def test_neighbours_derive_the_same_mask_and_nobody_else_does(round_):
    session = MaskingSession(round_.terms, round_.cohort)
    keys = [device._secrets.mask for device in round_.devices]
    masks = {
        (i, j): session.pair_mask_key(keys[i], i, j) for i, j in itertools.permutations(range(3), 2)
    }
    assert masks[0, 1] == masks[1, 0]
    assert len(set(masks.values())) == 3
    assert session.pair_mask_key(keys[0], 0, 2) != session.pair_mask_key(keys[0], 1, 2)
    # Another round with the same keys has other masks.
    later = MaskingSession(terms(round=2), round_.cohort)
    assert later.pair_mask_key(keys[0], 0, 1) != masks[0, 1]
    assert later.self_mask_key(bytes(32)) != session.self_mask_key(bytes(32))


def test_every_round_has_new_secrets():
    first, second = (Round(3).devices[0]._secrets for _ in range(2))
    values = [x for s in (first, second) for x in (s.encryption.private, s.mask.private, s.seed)]
    assert len(set(values)) == 6
    assert all(len(value) == 32 for value in values)
    assert repr(first.mask) == object.__repr__(first.mask)
    assert isinstance(first.mask, RoundKey)


def test_secrets_have_full_entropy():
    keys = [RoundKey.generate().private for _ in range(40)]
    seeds = [Round(3).devices[0]._secrets.seed for _ in range(40)]
    for secrets in (keys, seeds):
        # A byte that is the same in 40 secrets is not random.
        assert all(len(set(column)) > 1 for column in zip(*secrets, strict=True))


@pytest.mark.parametrize("kind", [0, 1])
def test_fewer_shares_than_the_threshold_give_no_secret(kind):
    round_ = Round(7)
    sealed, shares = round_.devices[0].share(round_.advertise()).sealed, {}
    session, threshold = round_.cloud.session, round_.cloud.session.parameters.threshold
    for i in range(1, 7):
        plain = session.open(round_.devices[i]._secrets.encryption, 0, i, sealed[i])
        shares[i] = decode_shares(plain, 0, i)[kind]
    own = round_.devices[0]._secrets
    secret = (own.seed, own.mask.private)[kind]
    assert join_shares({i: shares[i] for i in range(1, 1 + threshold)}) == secret
    with contextlib.suppress(Corrupt):
        assert join_shares({i: shares[i] for i in range(1, threshold)}) != secret


def by_hand(purpose, *parts):
    """The bytes of a statement, written out."""
    head = b"triplane masking 1 " + purpose
    return b"".join(struct.pack(">Q", len(part)) + part for part in (head, *parts))


def hkdf_by_hand(secret, salt, info):
    """RFC 5869 for one block."""
    extracted = hmac.digest(salt, secret, "sha256")
    return hmac.digest(extracted, info + b"\x01", "sha256")


def test_everything_is_derived_as_documented(round_):
    # Device and cloud derive these apart, perhaps in different versions.
    session, keys = round_.cloud.session, round_.devices[0]._secrets
    seed = bytes(range(32))
    assert session.self_mask_key(seed) == hkdf_by_hand(seed, session.digest, by_hand(b"self mask"))
    commitment = hashlib.sha256(by_hand(b"self mask commitment", seed)).digest()
    assert self_mask_commitment(seed) == commitment
    agreed = keys.mask.agree(round_.cohort.advertisements[2].mask_key)
    pair = by_hand(b"pair mask", struct.pack(">2I", 0, 2))
    assert session.pair_mask_key(keys.mask, 0, 2) == hkdf_by_hand(agreed, session.digest, pair)
    survivors = by_hand(b"survivors", session.digest, bytes(4) + b"\0\0\0\x01", bytes(4))
    assert session.survivor_statement((0, 1), (0,)) == survivors


def test_no_two_statements_share_their_bytes():
    parts = [(), (b"",), (b"a",), (b"", b"a"), (b"a", b""), (b"ab",), (b"a", b"b")]
    statements = [statement(purpose, *p) for purpose in ("x", "xa", "") for p in parts]
    assert len(set(statements)) == len(statements)


def test_shares_are_bound_to_their_pair():
    data = encode_shares(1, 2, b"a" * 33, b"b" * 33)
    assert decode_shares(data, 1, 2) == (b"a" * 33, b"b" * 33)
    for hostile, pair in (
        (data, (2, 1)),
        (data[:-1], (1, 2)),
        (data + b"0", (1, 2)),
        (b"", (1, 2)),
    ):
        with pytest.raises(ValueError, match="were expected"):
            decode_shares(hostile, *pair)
