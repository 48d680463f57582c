"""What a session derives: its digest covers all keys, and no two purposes share a key."""

import itertools
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
from triplane.unified_ir.federated.masking.session import MaskingSession


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
                "group": 1,
                "fields": ((50, 9),),
                "lost_share": 0.1,
                "colluding_share": 0.01,
                "failure": 1e-9,
            }.items()
        ),
    }
    assert len(others | {first}) == 13


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
