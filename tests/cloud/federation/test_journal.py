"""Events as JSON, and a run that is read back as what it was."""

import contextlib
import dataclasses
import hashlib
import json
import math
import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.cloud.federation.given import spec
from tests.cloud.federation.journals import PREPARED, entry

from triplane.cloud.federation import journal
from triplane.cloud.federation.coding import from_json, to_json
from triplane.cloud.federation.journal import KINDS, Prepared
from triplane.cloud.federation.messages import settlements
from triplane.cloud.federation.run_projection import RunProjection, follow, spread_of
from triplane.cloud.federation.tables import EVENTS, SMALL_STATES
from triplane.cloud.store import Database
from triplane.proto.errors import Conflict, Corrupt
from triplane.unified_ir.federated.core import lease_changes
from triplane.unified_ir.federated.core import run as core
from triplane.unified_ir.federated.core.lease_base import LeaseBase
from triplane.unified_ir.federated.core.masked_step import MaskedProgress, MaskedStep, StepAnswer
from triplane.unified_ir.federated.core.run import Event

UPDATE = core.Update(blob="cc" * 32, size=10, examples=4, loss=0.25, seconds=1.5)


def story(projection):
    """Events of two rounds of two devices, with a refusal; each made of the state it meets."""

    def lease(state, device):
        return next(x.id for x in state.round.leases if x.device == device)

    yield core.Joined(at_s=2.0, device="ann", examples=4, held_out=2)
    yield core.Joined(at_s=3.0, device="bob", examples=6)
    state = projection().state
    yield core.Arrived(at_s=4.0, device="ann", lease=lease(state, "ann"), update=UPDATE)
    yield core.Refused(
        at_s=5.0, device="bob", lease=lease(state, "bob"), kind="shape", reason="odd"
    )
    yield core.Joined(at_s=6.0, device="bob", examples=6)
    state = projection().state
    for device in ("ann", "bob"):
        yield core.Arrived(at_s=7.0, device=device, lease=lease(state, device), update=UPDATE)
    yield core.Reduced(at_s=8.0, number=1, shared="dd" * 32)
    yield core.Left(at_s=9.0, device="bob")
    yield core.Restarted(at_s=10.0)


def told():
    """(events, the projection after each)."""
    events: list[Event] = []
    projections = [journal.first_projection(entry())]
    for event in story(lambda: projections[-1]):
        projection, _ = follow(projections[-1], event)
        events.append(event)
        projections.append(projection)
    return events, projections


def test_an_event_and_a_book_are_read_as_they_were_written():
    events, projections = told()
    assert {type(event) for event in events} <= set(KINDS.values())
    for event in events:
        assert from_json(type(event), to_json(event)) == event
    for projection in projections:
        assert from_json(RunProjection, to_json(projection)) == projection


def test_every_event_of_the_machine_has_a_kind():
    assert set(KINDS.values()) == set(typing.get_args(core.Event))


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_keeps_its_bits(value):
    update = dataclasses.replace(UPDATE, loss=value)
    assert from_json(core.Update, to_json(update)) == update


def without(value, *names):
    """JSON as a release wrote it that did not have these fields yet."""
    if isinstance(value, dict):
        return {k: without(v, *names) for k, v in value.items() if k not in names}
    return [without(v, *names) for v in value] if isinstance(value, list) else value


LATER = (
    "declined", "why", "bytes_down", "not_before_s", "rules", "missed", "rests_until",
)  # fmt: skip
"""Fields that came after the first release."""


def test_a_journal_of_an_earlier_release_is_read_and_folds_by_its_rules():
    events, projections = told()
    for event in events:
        old = json.dumps(without(json.loads(to_json(event)), *LATER))
        assert from_json(type(event), old) == event
    old_prepared = json.dumps(without(json.loads(to_json(PREPARED)), *LATER))
    assert from_json(Prepared, old_prepared).rules == core.RULES_OF_OLD
    found = from_json(
        RunProjection, json.dumps(without(json.loads(to_json(projections[-1])), *LATER))
    )
    assert found.state.rules == core.RULES_OF_OLD
    assert found.state.history == projections[-1].state.history
    assert set(found.state.members) == set(projections[-1].state.members)


def test_a_number_that_is_none_stays_none():
    found = from_json(core.Update, to_json(dataclasses.replace(UPDATE, loss=math.nan)))
    assert math.isnan(found.loss)


@pytest.mark.parametrize(
    "change",
    [
        {"at_s": "soon"}, {"at_s": True}, {"device": 3}, {"examples": 1.5}, {"unknown": 1},
    ],
)  # fmt: skip
def test_a_stored_event_with_another_field_or_type_is_corrupt(change):
    event = core.Joined(at_s=2.0, device="ann", examples=4)
    damaged = json.dumps(json.loads(to_json(event)) | change)
    with pytest.raises(Corrupt, match="restore a backup"):
        from_json(core.Joined, damaged)


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", '{"at_s": 1e999}', '{"at_s": Infinity}'])
def test_what_is_no_event_is_corrupt(text):
    with pytest.raises(Corrupt):
        from_json(core.Tick, text)


def begun(database):
    return database.write_now(lambda c: journal.begin(c, entry()))


@pytest.mark.parametrize("snapshots", [(), (3,), (3, 9)])
def test_a_run_read_back_is_the_fold_of_its_events(database, snapshots):
    events, projections = told()
    run = begun(database).id

    def write(connection):
        journal.prepare(connection, run, PREPARED)
        for number, (event, projection) in enumerate(zip(events, projections[1:], strict=True), 1):
            journal.append(connection, run, [event], number)
            if number in snapshots:
                journal.snapshot(connection, run, projection)

    database.write_now(write)
    ((_, found),) = database.read_now(journal.live)
    assert found == projections[-1]
    assert database.read_now(lambda c: journal.events(c, run)) == events


@pytest.mark.parametrize("kept_at", [4, 10, 12])
def test_a_snapshot_of_an_earlier_release_gets_the_leases_that_counted(database, kept_at):
    """It has no `counted_lease`; ann's newest contribution was refused since one counted."""
    events, projections = told()
    run = begun(database).id
    counted = events[2].lease
    joined = core.Joined(at_s=10.5, device="bob", examples=6)
    projections.append(follow(projections[-1], joined)[0])
    asked = next(x.id for x in projections[-1].state.round.leases if x.device == "ann")
    events += [
        joined,
        core.Refused(at_s=11.0, device="ann", lease=asked, kind="shape", reason="odd"),
    ]
    projections.append(follow(projections[-1], events[-1])[0])

    def write(connection):
        journal.prepare(connection, run, PREPARED)
        journal.append(connection, run, events, len(events))
        old = json.dumps(
            without(json.loads(to_json(projections[kept_at])), "counted_lease", "epoch")
        )
        journal.change(connection, run, snapshot=old, snapshot_number=kept_at)

    database.write_now(write)
    ((_, found),) = database.read_now(journal.live)
    assert found == projections[-1]
    assert database.read_now(lambda c: journal.last_projection(c, run)) == found
    again = core.Arrived(at_s=12.0, device="ann", lease=counted, update=UPDATE)
    after, _ = follow(found, again)
    assert after.state.members["ann"].counted == found.state.members["ann"].counted == 2
    assert after.state.round == found.state.round
    told_now = {x.lease.hex(): x.counted for x in settlements(run, after.state.members["ann"])}
    last = found.state.members["ann"].counted_lease
    assert told_now == {counted: False, last: True}


def test_a_lost_event_is_found_out(database):
    events, _ = told()
    run = begun(database).id
    database.write_now(lambda c: journal.prepare(c, run, PREPARED))
    database.write_now(lambda c: journal.append(c, run, events, len(events)))
    database.write_now(lambda c: c.execute(EVENTS.delete().where(EVENTS.c.number == 2)))
    with pytest.raises(Corrupt, match="event 2"):
        database.read_now(journal.live)


def test_the_same_key_begins_one_run_and_another_request_under_it_is_refused(database):
    first = begun(database)
    again = entry(id="1" * 16)
    assert database.write_now(lambda c: journal.begin(c, again)).id == first.id
    other = entry(id="2" * 16, asked=b"\1" * 32)
    with pytest.raises(Conflict, match="new random key"):
        database.write_now(lambda c: journal.begin(c, other))


def test_the_collector_is_told_every_blob_that_a_run_needs(database):
    run = begun(database).id
    database.write_now(lambda c: journal.prepare(c, run, PREPARED))
    database.write_now(lambda c: journal.change(c, run, slots=b"\5" * 32))
    wanted = {bytes.fromhex(PREPARED.plan), bytes.fromhex(PREPARED.state), b"\5" * 32}
    assert database.read_now(journal.referenced) == wanted


def test_a_run_references_the_states_of_its_row_and_of_its_leases(database):
    events, projections = told()
    run = begun(database).id
    record = dataclasses.replace(entry(), slots=b"\5" * 32)
    first = frozenset({bytes.fromhex(PREPARED.plan), bytes.fromhex(PREPARED.state), record.slots})
    assert {journal.references(record, x) for x in (None, projections[0])} == {first}
    assert journal.references(record, projections[-1]) == first | {b"\xdd" * 32}
    state = projections[-3].state  # round 2 is open
    (asked, *_) = state.round.leases
    older = dataclasses.replace(asked, base=LeaseBase(version=0, state="ee" * 32))
    state = lease_changes.put_lease(state, older)
    projection = dataclasses.replace(projections[-3], state=state)
    assert journal.references(record, projection) == first | {b"\xdd" * 32, b"\xee" * 32}

    def write(connection):
        journal.prepare(connection, run, PREPARED)
        journal.append(connection, run, events[: projection.revision], projection.revision)
        journal.snapshot(connection, run, projection)

    database.write_now(write)
    wanted = journal.references(dataclasses.replace(record, slots=b""), projection)
    assert database.read_now(journal.referenced) == wanted


def test_small_states_that_are_still_needed_keep_their_rows(database):
    run = begun(database).id
    one, two = ({hashlib.sha256(x).hexdigest(): x} for x in (b"one", b"two"))
    kept = frozenset({hashlib.sha256(b"one").digest()})
    database.write_now(lambda c: journal.save_small_states(c, run, one))
    database.write_now(lambda c: journal.save_small_states(c, run, two, kept))
    assert set(database.read_now(journal.small_states).values()) == {b"one", b"two"}
    database.write_now(lambda c: journal.save_small_states(c, run, one, kept))
    assert set(database.read_now(journal.small_states).values()) == {b"one"}


@pytest.mark.parametrize(
    ("devices", "quorum", "over", "expected"),
    [
        (10, 0.8, 0.2, (8, 12)),
        (100, 0.07, 0.0, (7, 100)),
        (3, 0.7, 0.0, (3, 3)),
        (1, 0.0, 0.5, (1, 2)),
    ],
)
def test_shares_become_counts_rounded_up(devices, quorum, over, expected):
    cohort = {"devices": devices, "quorum": quorum, "over_selection": over}
    plan = journal.plan_of(spec(cohort=cohort))
    assert (plan.quorum, plan.asked) == expected


def test_the_worst_tenth_is_a_mean_of_the_lowest_and_order_does_not_matter():
    values = [n / 100 for n in range(40)]
    found = spread_of(values)
    assert found == spread_of(values[::-1])
    assert found.worst == 0.0
    assert found.worst_tenth == pytest.approx(0.015)
    assert spread_of([0.5]).worst_tenth == 0.5


def test_a_small_update_is_there_until_its_round_is_over(database):
    run, data = begun(database).id, b"the bytes of an update"
    name = hashlib.sha256(data).digest()
    for _ in "ab":  # two devices may send the same bytes, in a commit each
        database.write_now(lambda c: journal.save_small_updates(c, run, {name.hex(): data}))
    assert database.read_now(lambda c: journal.small_update(c, run, name)) == data
    assert database.read_now(lambda c: journal.small_update(c, "f" * 16, name)) is None
    database.write_now(lambda c: journal.delete_small_updates(c, run))
    assert database.read_now(lambda c: journal.small_update(c, run, name)) is None


def test_small_states_are_the_newest_of_each_run(database):
    run = begun(database).id
    for data in (b"first", b"second"):
        kept = {hashlib.sha256(data).hexdigest(): data}
        database.write_now(lambda c, kept=kept: journal.save_small_states(c, run, kept))
    expected = {hashlib.sha256(b"second").digest(): b"second"}
    assert database.read_now(journal.small_states) == expected
    database.write_now(lambda c: journal.change(c, run, live=False))
    assert database.read_now(journal.small_states) == {}
    database.write_now(lambda c: journal.change(c, run, live=True))
    assert database.read_now(journal.small_states) == expected
    database.write_now(lambda c: journal.save_small_states(c, run, {}))
    assert database.read_now(journal.small_states) == {}


def test_a_database_of_an_earlier_release_gets_the_table_of_small_states(tmp_path):
    """Its states are files that were synced, and no row has them."""
    url = f"sqlite:///{tmp_path / 'old.db'}"
    with contextlib.closing(Database.open(url)) as database:
        begun(database)
        database.write_now(SMALL_STATES.drop)
    with contextlib.closing(Database.open(url)) as database:
        assert database.read_now(journal.small_states) == {}
        assert database.read_now(journal.live)


def test_a_member_of_an_earlier_release_is_told_of_its_newest_contribution():
    """Its snapshot does not say which lease counted last."""
    known = core.Settled(lease="ab" * 16, counted=True)
    member = core.RunMember(device="ann", connected=True, examples=4, settled=known)
    said = json.loads(to_json(member))
    del said["counted_lease"]
    found = from_json(core.RunMember, json.dumps(said))
    assert [(x.lease.hex(), x.counted) for x in settlements("r", found)] == [("ab" * 16, True)]


def test_events_and_states_of_masked_rounds_are_stored_by_these_bytes():
    """Stored names are for ever: a run that is under way is read by every later release."""
    answer = StepAnswer(step=MaskedStep.INPUTS, blob="b1", size=70, file="f1")
    masked = core.Masked(at_s=1.5, device="ann", lease="l1", answer=answer, bytes_down=9)
    exchanged = core.Exchanged(
        at_s=2.0, number=1, attempt=0, step=MaskedStep.KEYS, refused={"bob": "r"}, failure="f"
    )
    progress = MaskedProgress(step=MaskedStep.REVEALS, opened_s=3.0, cap=24, exchanging=True)
    lease = core.Lease(id="l1", device="ann", due=MaskedStep.INPUTS, taken=MaskedStep.SHARES)
    stored: list[tuple[typing.Any, str]] = [
        (
            masked,
            (
                '{"at_s":1.5,"device":"ann","lease":"l1","answer":{"step":"inputs","blob":"b1",'
                '"size":70,"file":"f1"},"bytes_down":9}'
            ),
        ),
        (
            exchanged,
            '{"at_s":2.0,"number":1,"attempt":0,"step":"keys","refused":{"bob":"r"},"failure":"f"}',
        ),
        (progress, '{"step":"reveals","opened_s":3.0,"cap":24,"exchanging":true}'),
        (
            lease,
            (
                '{"id":"l1","device":"ann","outcome":"open","update":null,"away_s":null,"reason":"",'
                '"bytes_down":0,"due":"inputs","taken":"shares"}'
            ),
        ),
    ]
    for value, text in stored:
        assert to_json(value) == text
        assert from_json(type(value), text) == value
