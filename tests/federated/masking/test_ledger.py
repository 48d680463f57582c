"""The ledger of a device: what it says, and bytes that it does not read."""

import pytest
from tests.federated.masking.rounds import BASE, Round, terms, vectors_of

from triplane.proto.errors import Conflict, Corrupt
from triplane.unified_ir.federated.masking import LedgerEntry, MaskingLedger

ENTRY = LedgerEntry(round=3, attempt=1, session="ab" * 32, survivors="cd" * 32)
SAVED = MaskingLedger().with_(terms(), ENTRY).encode()


def test_each_message_is_on_the_disk_before_it_leaves():
    round_ = Round(4)
    entries = round_.stores[0].saved
    round_.advertise()
    round_.share(range(4))
    assert entries == []
    round_.mask(range(3), lambda i: vectors_of(round_.terms.fields, i))
    round_.sign(range(3))
    round_.unmask(range(3))
    masked, signed = [ledger.entries["run-1", BASE.hex()] for ledger in entries]
    assert (masked.session, masked.survivors) == (round_.cloud.session.digest.hex(), "")
    assert len(signed.survivors) == 64


def test_no_share_is_revealed_unless_the_ledger_has_the_signed_survivors():
    """Such as after the ledger was replaced by an older copy."""
    round_ = Round(4)
    round_.advertise()
    round_.share(range(4))
    round_.mask(range(4), lambda i: vectors_of(round_.terms.fields, i))
    requests = round_.sign(range(4))
    del round_.stores[0].saved[1]
    with pytest.raises(Conflict, match="a second, different one"):
        round_.devices[0].unmask(requests[0])


def test_a_ledger_survives_a_restart():
    ledger = (
        MaskingLedger()
        .with_(terms(), ENTRY)
        .with_(terms(run="b"), LedgerEntry(round=0, attempt=0, session=""))
    )
    assert MaskingLedger.decode(ledger.encode()) == ledger
    assert MaskingLedger.decode(MaskingLedger().encode()) == MaskingLedger()
    with pytest.raises(Conflict, match="it did so in round 3, attempt 1"):
        ledger.check_new(terms(round=4))
    ledger.check_new(terms(run="c"))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[1]",
        b"[[]]",
        b"\xff\xfe",
        b"[" * 100_000,
        b'[["run","00",{"round":1}]]',
        b'[["run","00",5]]',
        # Keys of two types, which have no order.
        SAVED[:-1] + b"," + SAVED[1:].replace(b'"run-1"', b"1"),
        b'[["run","00",{"round":1,"attempt":1,"session":"","more":1}]]',
        SAVED[:-3],
        SAVED + b" ",
    ],
)
def test_damaged_ledgers_are_not_read_as_empty_ones(data):
    with pytest.raises(Corrupt, match="ledger"):
        MaskingLedger.decode(data)
