"""Events in any order: promises, the naive rules as oracle, the cost of an event."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.federated.core import naive_rules
from tests.federated.core.rules.runs import (
    DEVICES,
    all_arrive,
    arrived,
    begun,
    events,
    fresh,
    opcodes,
    open_lease,
    plan,
    reduces,
    step,
    update,
)

from triplane.cloud.federation.coding import from_json, to_json
from triplane.cloud.federation.messages import settlements
from triplane.unified_ir.federated.core import rules
from triplane.unified_ir.federated.core.rules import MAX_PAUSE_S, due_s
from triplane.unified_ir.federated.core.run import (
    NEWEST_RULES,
    RULES_OF_OLD,
    Answered,
    Arrived,
    Finished,
    Joined,
    Left,
    Outcome,
    Phase,
    Reduced,
    Restarted,
    Resumed,
    RunMember,
    RunState,
    Score,
    Scored,
    Tick,
)


@pytest.mark.slow
@given(events(), st.integers(3, 5), st.integers(RULES_OF_OLD, NEWEST_RULES))
@settings(max_examples=settings().max_examples * 2)
def test_no_order_of_events_breaks_a_promise(found, asked, version):
    first = fresh(plan(asked=asked), version)
    state: Any = first
    spoken: dict[int, list[str]] = {}
    for event in found:
        before = state
        state, effects = step(state, event)
        for reduce in reduces(effects):
            names = [lease.device for lease in reduce.leases]
            assert names == sorted(set(names))
            assert state.plan.quorum <= len(names) <= state.plan.devices
            assert all(lease.update.blob == f"u-{lease.device}" for lease in reduce.leases)
            assert spoken.setdefault(reduce.number, names) == names or before.turn[0] > 1
        for lease in state.round.leases if state.round else ():
            assert lease.device in state.members
        assert len(state.history) >= len(before.history)
        assert state.turn >= before.turn
    replayed = first
    for event in found:
        replayed, _ = step(replayed, event)
    assert replayed == state


@pytest.mark.slow
@given(events(), st.integers(RULES_OF_OLD, NEWEST_RULES))
def test_every_run_ends_once_devices_and_people_answer(found, version):
    state = fresh(plan(), version)
    for event in found:
        state, _ = step(state, event)
    now = found[-1].at_s + 1
    state, _ = step(state, Restarted(at_s=now))
    for name in DEVICES:
        state, _ = step(state, Joined(at_s=now, device=name, examples=5, held_out=2))
    for _ in range(60):
        now += MAX_PAUSE_S if state.phase is Phase.GATHERING else 1
        state = _answer(state, now)
        if state.phase is Phase.DONE:
            return
    pytest.fail(f"still {state.phase}: {state.reason}")


def _answer(state, now):
    match state.phase:
        case Phase.STOPPED:
            return step(state, Resumed(at_s=now, reason="go"))[0]
        case Phase.REDUCING:
            return step(state, Reduced(at_s=now, number=state.turn[0], shared="s"))[0]
        case Phase.FINISHING:
            return step(state, Finished(at_s=now))[0]
        case Phase.COLLECTING if state.round.evaluates:
            name = next(x.device for x in state.round.leases if x.outcome is Outcome.OPEN)
            score = Score(samples=2, before=0.1, after=0.2, round=1)
            lease = open_lease(state, name).id
            return step(state, Scored(at_s=now, device=name, lease=lease, score=score))[0]
        case Phase.COLLECTING:
            name = next(x.device for x in state.round.leases if x.outcome is Outcome.OPEN)
            return step(state, arrived(state, name, now))[0]
    return step(state, Tick(at_s=now))[0]


def told(state, effects):
    """What can be seen of a step, in bytes."""
    return to_json(state), effects, due_s(state), [open_lease(state, name) for name in DEVICES]


@pytest.mark.slow
@given(events(), st.integers(3, 5), st.integers(RULES_OF_OLD, NEWEST_RULES))
@settings(max_examples=settings().max_examples * 2)
def test_every_event_gives_the_bytes_that_the_naive_rules_give(found, asked, version):
    state = naive = fresh(plan(asked=asked), version)
    for event in found:
        state, effects = step(state, event)
        naive, expected = naive_rules.step(naive, event)
        assert told(state, effects) == told(naive, expected)
        assert due_s(state) == naive_rules.due_s(naive)
        again = from_json(RunState, to_json(state))
        assert due_s(again) == due_s(state)


@given(events(), st.integers(RULES_OF_OLD, NEWEST_RULES))
def test_an_event_that_changes_nothing_gives_the_same_state(found, version):
    state = fresh(plan(), version)
    for event in found:
        before = state
        state, _ = step(state, event)
        assert (state is before) == (state == before)


COUNTED = 4
"""Events whose work is counted, the last of as many as there are devices."""


def work_of(machine, size):
    """Instructions for the last joins and the last updates but one of a round of that size."""
    taken = {Joined: 0, Arrived: 0, Left: 0}

    def after(state, event):
        state, _ = machine.step(state, event)
        machine.due_s(state)
        return state

    def counted(state, event):
        state, more = opcodes(after, state, event)
        taken[type(event)] += more
        return state

    names = [f"d{k:05d}" for k in range(size)]
    members = {n: RunMember(device=n, connected=True, examples=9, held_out=2) for n in names[1:]}
    asked = plan(devices=size, asked=size, quorum=1)
    state: Any = replace(fresh(asked), members=dict(list(members.items())[:-COUNTED]))
    for name in names[-COUNTED:]:
        state = counted(state, Joined(at_s=0.0, device=name, examples=9, held_out=2))
    state = after(state, Joined(at_s=0.0, device=names[0], examples=9, held_out=2))
    assert state.phase is Phase.COLLECTING
    for name in names[:COUNTED]:
        state = counted(state, arrived(state, name))
        state = counted(state, Left(at_s=1.0, device=name))
    return taken


@pytest.mark.slow
def test_cost_of_an_event_does_not_grow_with_the_number_of_devices():
    small, large = work_of(rules, 100), work_of(rules, 1000)
    naive = work_of(naive_rules, 50), work_of(naive_rules, 250)
    for kind, few in small.items():
        assert large[kind] < 1.5 * few, kind
        assert naive[1][kind] > 3 * naive[0][kind], "the count sees what grows"


@pytest.mark.slow
@given(events(), st.integers(3, 5), st.integers(RULES_OF_OLD, NEWEST_RULES))
def test_a_device_is_always_told_of_its_newest_update_that_counted(found, asked, version):
    """Whatever became of later leases, and whatever stray contributions came since."""
    state: Any = fresh(plan(asked=asked), version)
    counted: dict[str, str] = {}
    for event in found:
        state, _ = step(state, event)
        if isinstance(event, Arrived | Answered | Scored):
            member = state.members.get(event.device)
            settled = member.settled if member else None
            if settled and settled.counted and settled.lease == event.lease:
                counted[event.device] = event.lease
        for device, lease in counted.items():
            told_ = [(x.lease.hex(), x.counted) for x in settlements("r1", state.members[device])]
            assert (lease, True) in told_


def test_an_update_that_counted_is_told_of_after_the_next_lease_was_lost():
    """A device that went away before it heard of it, and came back after patience."""
    state, _ = begun()
    first = open_lease(state, "ada").id
    state, _ = all_arrive(state)
    state, _ = step(state, Reduced(at_s=2.0, number=1, shared="s1"))
    second = open_lease(state, "ada").id
    state, _ = step(state, Left(at_s=3.0, device="ada"))
    state, _ = step(state, Tick(at_s=9.0))
    found = {x.lease.hex(): x.counted for x in settlements("r1", state.members["ada"])}
    assert found == {first: True, second: False}


def test_an_update_that_counted_is_told_of_after_it_was_sent_again_too_late():
    """A device sends again what was not acknowledged, also after its next lease was lost."""
    state, _ = begun()
    first = open_lease(state, "ada").id
    state, _ = all_arrive(state)
    state, _ = step(state, Reduced(at_s=2.0, number=1, shared="s1"))
    state, _ = step(state, Left(at_s=3.0, device="ada"))
    state, _ = step(state, Tick(at_s=9.0))
    again = Arrived(at_s=10.0, device="ada", lease=first, update=update("ada"))
    state, _ = step(state, again)
    found = {x.lease.hex(): x.counted for x in settlements("r1", state.members["ada"])}
    assert found[first]


def test_an_update_that_counted_is_told_of_after_a_stray_one():
    state, _ = begun()
    first = open_lease(state, "ada").id
    state, _ = all_arrive(state)
    stray = Arrived(at_s=2.0, device="ada", lease="ab" * 16, update=update("ada"))
    state, _ = step(state, stray)
    found = {x.lease.hex(): x.counted for x in settlements("r1", state.members["ada"])}
    assert found == {first: True, "ab" * 16: False}
