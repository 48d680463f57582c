"""Rounds: when they open and close, and whose updates count."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from tests.federated.core.rules.runs import (
    DEVICES,
    all_arrive,
    arrived,
    begun,
    declined,
    open_lease,
    plan,
    reduces,
    step,
)

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.core.lease_changes import MAX_WHY, OTHER
from triplane.unified_ir.federated.core.rules import due_s
from triplane.unified_ir.federated.core.run import (
    RULES_OF_OLD,
    Joined,
    Left,
    Outcome,
    Phase,
    Reduced,
    Refused,
    Restarted,
    RunState,
    Tell,
    Tick,
)


def test_round_opens_when_enough_devices_are_there_and_tells_them():
    state, effects = begun(DEVICES[:2])
    assert (state.phase, state.reason) == (Phase.GATHERING, "2 of 3 devices are connected")
    state, effects = step(state, Joined(at_s=1.0, device="cem", examples=10))
    assert state.phase is Phase.COLLECTING
    assert [Tell(name) for name in DEVICES[:3]] == sorted(set(effects), key=lambda e: e.device)


def test_updates_are_reduced_in_the_order_of_names_whoever_comes_first():
    orders = set()
    for order in itertools.permutations(DEVICES[:3]):
        state, _ = begun()
        for name in order:
            state, effects = step(state, arrived(state, name))
        (reduce,) = reduces(effects)
        orders.add(tuple(lease.update.blob for lease in reduce.leases))
    assert orders == {("u-ada", "u-bea", "u-cem")}


def test_update_counts_once_and_only_for_the_device_that_holds_the_lease():
    state, _ = begun()
    mine = arrived(state, "ada")
    state, _ = step(state, replace(mine, device="bea"))
    assert [x.outcome for x in state.round.leases] == [Outcome.OPEN] * 3
    assert not state.members["bea"].settled.counted
    state, _ = step(state, mine)
    again, effects = step(state, replace(mine, at_s=2.0))
    assert (again, effects) == (state, (Tell("ada"),))
    assert state.members["ada"].counted == 1


def test_late_update_changes_no_round():
    state = replace(begun()[0], rules=RULES_OF_OLD)
    late = arrived(state, "ada")
    state, _ = step(state, Tick(at_s=100.0))
    assert state.history[-1].given_up == "0 updates of 2 needed"
    after, _ = step(state, replace(late, at_s=101.0))
    assert after.round == state.round
    assert after.members["ada"].settled.reason == "the round's deadline passed"
    after, _ = step(state, replace(late, at_s=101.0, lease="0" * 32))
    assert after.members["ada"].settled.reason == "its round is over, or it was never asked"


def test_over_selection_closes_at_the_wanted_number_and_tells_the_slower():
    state: Any = RunState(plan=plan(asked=5), run="r1", shared="s0")
    for name in DEVICES:
        assert state.phase is Phase.GATHERING
        state, _ = step(state, Joined(at_s=0.0, device=name, examples=10))
    assert len(state.round.leases) == 5
    for name in ("eli", "bea", "dia"):
        state, effects = step(state, arrived(state, name))
    (reduce,) = reduces(effects)
    assert [lease.device for lease in reduce.leases] == ["bea", "dia", "eli"]
    assert state.members["ada"].settled.reason == "enough others were faster"
    assert (state.history[-1].asked, state.history[-1].late) == (5, 2)


def test_round_waits_for_known_members_so_that_its_cohort_does_not_depend_on_who_is_quick():
    state, _ = begun(DEVICES, devices=3, asked=3)
    first = [lease.device for lease in state.round.leases]
    state, _ = step(state, Restarted(at_s=10.0))
    assert all(lease.away_s == 10.0 for lease in state.round.leases)
    for name in reversed(DEVICES):
        state, _ = step(state, Joined(at_s=11.0, device=name, examples=10, held_out=4))
    state, _ = all_arrive(state, 12.0)
    assert state.history[-1].counted == 3
    other, _ = begun(DEVICES[::-1], devices=3, asked=3)
    other, _ = all_arrive(other)
    for at_s, each in ((12.0, state), (1.0, other)):
        after, _ = step(each, Reduced(at_s=at_s, number=1, shared="s1"))
        assert after.phase is Phase.COLLECTING
    assert len(first) == 3


def test_no_round_waits_for_a_device_that_has_been_away_for_long():
    state, _ = begun(rounds=3)
    state, _ = step(state, Left(at_s=1.0, device="ada"))
    for name in ("bea", "cem"):
        state, _ = step(state, arrived(state, name, 2.0))
    state, _ = step(state, Tick(at_s=6.0))
    state, _ = step(state, Reduced(at_s=6.5, number=1, shared="s1"))
    assert [lease.device for lease in state.round.leases] == ["bea", "cem"]
    state, _ = all_arrive(state, 7.0)
    state, _ = step(state, Joined(at_s=7.5, device="ada", examples=10))
    state, _ = step(state, Reduced(at_s=8.0, number=2, shared="s2"))
    assert [lease.device for lease in state.round.leases] == ["ada", "bea", "cem"]


def test_every_wait_ends_in_a_tick_and_no_tick_is_due_twice():
    state, _ = begun(joined=())
    state, _ = step(state, Joined(at_s=0.0, device="ada", examples=10))
    state, _ = step(state, Left(at_s=3.0, device="ada"))
    found = []
    while (due := due_s(state)) is not None:
        found.append(due)
        state, _ = step(state, Tick(at_s=due))
    assert found == [5.0, 8.0]


def test_refused_update_ends_its_lease_only_and_is_counted_by_kind():
    state, _ = begun()
    lease = open_lease(state, "ada").id
    state, _ = step(
        state, Refused(at_s=1.0, device="ada", lease=lease, kind="nan", reason="w holds NaN")
    )
    assert state.refusals == {"nan": 1}
    assert state.members["ada"].settled.reason == "w holds NaN"
    state, effects = all_arrive(state, 2.0)
    assert len(reduces(effects)[0].leases) == 2


def test_why_contributions_did_not_count_is_told_by_device_with_how_often():
    state, now = begun(quorum=1)[0], 1.0
    for reason in ("too hot", "too hot", "no power", *(f"odd {k}" for k in range(2 * MAX_WHY))):
        state, _ = step(state, declined(state, "ada", now, reason))
        state, _ = all_arrive(state, now)
        state, _ = step(state, Reduced(at_s=now, number=state.turn[0], shared="s"))
        state = replace(state, plan=replace(state.plan, rounds=100))
        now += 1
    ada, bea = state.members["ada"], state.members["bea"]
    assert (ada.declined, ada.dropped) == (2 * MAX_WHY + 3,) * 2
    assert (ada.why["too hot"], ada.why["no power"]) == (2, 1)
    assert len(ada.why) == MAX_WHY + 1
    assert sum(ada.why.values()) == ada.dropped
    assert ada.why[OTHER] > 1
    assert (bea.declined, dict(bea.why)) == (0, {})


def test_a_round_remembers_the_bytes_that_its_devices_were_given():
    state, _ = begun()
    for name, size in zip(DEVICES, (5, 6), strict=False):
        state, _ = step(state, replace(arrived(state, name), bytes_down=size))
    state, _ = step(state, declined(state, "cem", 1.0))
    assert state.history[-1].bytes_down == 5 + 6 + 7


@pytest.mark.parametrize(
    "changes",
    [{"quorum": 0}, {"quorum": 4}, {"asked": 2}, {"rounds": 0}, {"deadline_s": 0.0},
     {"patience_s": -1.0}, {"patience_s": float("inf")}, {"deadline_s": float("nan")}],
)  # fmt: skip
def test_plans_that_cannot_work_are_refused(changes):
    with pytest.raises(InvalidInput):
        plan(**changes)
