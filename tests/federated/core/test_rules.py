"""The run as a state machine: what counts, what waits, and that nothing stops it for good."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.federated.core import naive_rules

from triplane.cloud.federation.coding import from_json, to_json
from triplane.cloud.federation.messages import settlements
from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.core import rules
from triplane.unified_ir.federated.core.rules import (
    FIRST_PAUSE_S,
    MAX_GIVEN_UP,
    MAX_PAUSE_S,
    MAX_WHY,
    OTHER,
    due_s,
    lease_id,
)
from triplane.unified_ir.federated.core.run import (
    NEWEST_RULES,
    RULES_OF_OLD,
    RULES_WITH_PAUSES,
    Answered,
    Arrived,
    Asked,
    Declined,
    Failed,
    Finish,
    Finished,
    Joined,
    Judged,
    Left,
    Outcome,
    Phase,
    Reduce,
    Reduced,
    Refused,
    Restarted,
    Resumed,
    RunMember,
    RunPlan,
    RunState,
    Score,
    Scored,
    Stopped,
    Tell,
    Tick,
    Update,
)

step: Any = rules.step
open_lease: Any = rules.open_lease
DEVICES = ("ada", "bea", "cem", "dia", "eli")


def plan(**changes):
    given_ = {
        "rounds": 2, "devices": 3, "asked": 3, "quorum": 2, "deadline_s": 60.0, "patience_s": 5.0,
    }  # fmt: skip
    return RunPlan(**{**given_, **changes})


def fresh(asked, rules=NEWEST_RULES):
    return RunState(plan=asked, run="r1", shared="s0", rules=rules)


def begun(joined=DEVICES[:3], **changes):
    """A run whose devices have joined at second 0."""
    state, effects = fresh(plan(**changes)), ()
    for name in joined:
        state, more = step(state, Joined(at_s=0.0, device=name, examples=10, held_out=4))
        effects += more
    return state, effects


def update(device, *, blob="u"):
    return Update(blob=f"{blob}-{device}", size=100, examples=10, loss=0.5, seconds=0.1)


def arrived(state, device, at_s=1.0):
    lease = open_lease(state, device)
    return Arrived(at_s=at_s, device=device, lease=lease.id, update=update(device))


def all_arrive(state, at_s=1.0):
    effects = ()
    for lease in state.round.leases:
        if open_lease(state, lease.device):
            state, more = step(state, arrived(state, lease.device, at_s))
            effects += more
    return state, effects


def reduces(effects):
    return [effect for effect in effects if isinstance(effect, Reduce)]


def test_round_opens_when_enough_devices_are_there_and_tells_them():
    state, effects = begun(DEVICES[:2])
    assert (state.phase, state.reason) == (Phase.GATHERING, "2 devices of 3 are there")
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


def test_killed_device_finds_its_lease_again():
    state, _ = begun()
    lease = open_lease(state, "ada")
    state, _ = step(state, Left(at_s=1.0, device="ada"))
    state, effects = step(state, Joined(at_s=2.0, device="ada", examples=10))
    assert open_lease(state, "ada") == lease
    assert Tell("ada") in effects


def test_device_that_stays_away_is_given_up_after_patience():
    state, _ = begun()
    state, _ = step(state, Left(at_s=1.0, device="ada"))
    for name in ("bea", "cem"):
        state, _ = step(state, arrived(state, name, 2.0))
    assert due_s(state) == 6.0
    state, effects = step(state, Tick(at_s=6.0))
    (reduce,) = reduces(effects)
    assert [lease.device for lease in reduce.leases] == ["bea", "cem"]
    assert state.history[-1].lost == 1


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


def test_a_restored_cloud_gives_no_lease_again_that_it_gave_before():
    backup, _ = all_arrive(begun(rounds=3)[0])

    def second_round(epoch):
        state, _ = step(backup, Restarted(at_s=2.0, epoch=epoch))
        state, _ = step(state, Reduced(at_s=2.0, number=1, shared="s1"))
        for name in DEVICES:
            state, _ = step(state, Joined(at_s=3.0, device=name, examples=10))
        assert state.turn == (2, False)
        return {lease.id for lease in state.round.leases}

    assert len(second_round("e1")) == 3
    assert not second_round("e1") & second_round("e2")


def test_a_restart_keeps_the_leases_that_are_open():
    state, _ = begun()
    after, _ = step(state, Restarted(at_s=2.0, epoch="e1"))
    assert [x.id for x in after.round.leases] == [x.id for x in state.round.leases]


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


def test_restart_reduces_again_what_was_being_reduced():
    state, _ = begun()
    state, effects = all_arrive(state)
    assert state.phase is Phase.REDUCING
    again, more = step(state, Restarted(at_s=9.0))
    assert reduces(more) == reduces(effects)
    assert again.phase is Phase.REDUCING


@pytest.mark.parametrize(("held_out", "judges"), [((4, 0, 4), ["ada", "cem"]), ((0, 0, 0), [])])
def test_no_evaluation_waits_for_devices_that_hold_nothing_out(held_out, judges):
    state, _ = begun(())
    for name, samples in zip(DEVICES, held_out, strict=False):
        joins = Joined(at_s=0.0, device=name, examples=10, held_out=samples)
        state, _ = step(state, joins)
    state = replace(state, plan=plan(evaluate_every=1))
    state, _ = all_arrive(state)
    state, _ = step(state, Reduced(at_s=2.0, number=1, shared="s1"))
    assert state.phase is Phase.COLLECTING
    assert state.round.evaluates is bool(judges)
    if judges:
        assert [lease.device for lease in state.round.leases] == judges


def test_an_evaluation_waits_for_a_device_that_may_be_back():
    state, _ = begun()
    state, _ = all_arrive(replace(state, plan=plan(evaluate_every=1)))
    state, _ = step(state, Left(at_s=1.5, device="bea"))
    state, _ = step(state, Reduced(at_s=2.0, number=1, shared="s1"))
    assert (state.phase, state.reason) == (Phase.GATHERING, "2 devices are there; away: bea")
    state, _ = step(state, Joined(at_s=3.0, device="bea", examples=10, held_out=4))
    assert state.round.evaluates
    assert len(state.round.leases) == 3


def test_run_ends_after_an_evaluation_of_its_last_round():
    state, _ = begun(rounds=1)
    state, _ = all_arrive(state)
    state, _ = step(state, Reduced(at_s=2.0, number=1, shared="s1"))
    assert (state.phase, state.turn) == (Phase.COLLECTING, (1, True))
    for name in DEVICES[:3]:
        score = Score(samples=4, before=0.5, after=0.9, round=1)
        lease = open_lease(state, name).id
        state, effects = step(state, Scored(at_s=3.0, device=name, lease=lease, score=score))
    assert (state.phase, effects[-1]) == (Phase.FINISHING, Finish())
    assert state.members["ada"].score.after == 0.9
    state, _ = step(state, Finished(at_s=4.0))
    assert state.phase is Phase.DONE


def asked(state, *devices, at_s=1.0):
    found = state.round
    return Asked(
        at_s=at_s, number=found.number, evaluates=found.evaluates, attempt=found.attempt,
        messages=dict.fromkeys(devices, ""),
    )  # fmt: skip


def test_whom_a_strategy_does_not_ask_has_no_part_in_the_round():
    state, _ = begun(quorum=2)
    state, effects = step(state, asked(state, "bea", "ada"))
    assert effects == (Tell("ada"), Tell("bea"))
    assert open_lease(state, DEVICES[2]) is None
    state, effects = all_arrive(state)
    (reduce,) = reduces(effects)
    assert [lease.device for lease in reduce.leases] == ["ada", "bea"]


def test_what_a_strategy_asked_of_another_round_changes_nothing():
    state, _ = begun()
    late = replace(asked(state, "ada"), attempt=1)
    assert step(state, late) == (state, ())


def test_a_reply_to_a_strategy_counts_in_an_evaluating_round_too_and_is_handed_over():
    state, _ = begun(rounds=1)
    state, _ = all_arrive(state)
    state, _ = step(state, Reduced(at_s=2.0, number=1, shared="s1"))
    state, _ = step(state, asked(state, "ada", at_s=2.0))
    lease = open_lease(state, "ada")
    told = Answered(at_s=3.0, device="ada", lease=lease.id, update=update("ada"))
    state, effects = step(state, told)
    (judged,) = (effect for effect in effects if isinstance(effect, Judged))
    assert [(x.device, x.update and x.update.blob) for x in judged.leases] == [("ada", "u-ada")]
    assert step(state, told)[0] == state
    assert state.phase is Phase.FINISHING


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


def test_stopped_run_goes_on_with_what_it_had():
    state, _ = begun()
    state, _ = all_arrive(state)
    state, _ = step(state, Stopped(at_s=2.0, reason="lunch"))
    assert (state.phase, state.reason) == (Phase.STOPPED, "lunch")
    state, effects = step(state, Resumed(at_s=3.0, reason=""))
    assert len(reduces(effects)[0].leases) == 3
    state, _ = step(state, Reduced(at_s=4.0, number=1, shared="s1"))
    assert state.turn == (2, False)


def test_stopping_while_it_collects_ends_the_leases_and_new_ones_have_new_names():
    state, _ = begun()
    old = open_lease(state, "ada")
    state, effects = step(state, Stopped(at_s=2.0, reason="lunch"))
    assert open_lease(state, "ada") is None
    assert Tell("ada") in effects
    state, _ = step(state, Resumed(at_s=3.0, reason=""))
    assert open_lease(state, "ada").id != old.id


def test_rounds_that_never_reach_their_quorum_ask_for_a_person():
    state, _ = begun()
    for i in range(1, 3 * MAX_GIVEN_UP):
        state, _ = step(state, Tick(at_s=100.0 * i))
        state, _ = step(state, Tick(at_s=100.0 * i + 50))
    assert state.phase is Phase.STOPPED
    assert state.reason.startswith(f"{MAX_GIVEN_UP} rounds in a row were given up")


def declined(state, device, at_s, reason="too hot"):
    lease = open_lease(state, device).id
    return Declined(at_s=at_s, device=device, lease=lease, reason=reason, bytes_down=7)


def all_decline(state, at_s):
    for name in DEVICES[:3]:
        state, _ = step(state, declined(state, name, at_s))
    return state


def test_a_round_that_was_given_up_is_gathered_for_after_a_pause_that_doubles():
    state, _ = begun()
    now, pauses = 1.0, []
    while state.phase is not Phase.STOPPED:
        state = all_decline(state, now)
        if state.phase is Phase.GATHERING:
            assert "0 updates of 2 needed" in state.reason
            assert step(state, Joined(at_s=now, device="dia", examples=9))[0].round is None
            due = due_s(state)
            assert due is not None
            pauses.append(due - now)
            now = due
            state, effects = step(state, Tick(at_s=now))
            assert Tell("ada") in effects
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses[-1] == MAX_PAUSE_S
    assert len(pauses) == MAX_GIVEN_UP - 1


def test_a_run_of_an_earlier_release_goes_on_by_the_rules_it_began_under():
    state = replace(begun()[0], rules=RULES_OF_OLD)
    state = all_decline(state, 1.0)
    assert (state.phase, state.attempt) == (Phase.COLLECTING, 1)


def judging(rules=NEWEST_RULES):
    """A run of one round whose devices are asked to score it."""
    state, _ = begun(rounds=1)
    state, _ = all_arrive(replace(state, rules=rules))
    return step(state, Reduced(at_s=2.0, number=1, shared="s1"))[0]


def test_a_result_that_every_device_declined_to_score_waits_for_a_person():
    asked = judging()
    state = all_decline(asked, 3.0)
    assert (state.phase, state.turn) == (Phase.STOPPED, (1, True))
    assert state.reason == (
        "no device scored round 1: 3 devices declined or were refused, ada because: too hot"
    )
    state, _ = step(state, Resumed(at_s=9.0, reason=""))
    assert state.round.evaluates
    assert {x.id for x in state.round.leases}.isdisjoint(x.id for x in asked.round.leases)
    assert all_decline(judging(RULES_OF_OLD), 3.0).phase is Phase.FINISHING


def test_apps_of_others_that_cannot_evaluate_do_not_hold_a_result_back():
    asked = judging()
    apps = replace(asked, plan=replace(asked.plan, needs_scores=False))
    assert all_decline(apps, 3.0).phase is Phase.FINISHING


def test_an_evaluation_that_one_device_scores_counts_and_one_that_all_left_is_passed_over():
    state = judging()
    for name in DEVICES[:2]:
        state, _ = step(state, declined(state, name, 3.0))
    score = Score(samples=4, before=0.5, after=0.9, round=1)
    lease = open_lease(state, "cem").id
    state, _ = step(state, Scored(at_s=3.0, device="cem", lease=lease, score=score))
    assert state.phase is Phase.FINISHING
    gone, _ = step(judging(), Tick(at_s=100.0))
    assert gone.phase is Phase.FINISHING


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


def rounds_of(state, answers, count):
    """How many of `count` rounds ran into their deadline, and who was asked in each."""
    asked_in: list[list[str]] = []
    now, late = 1.0, 0
    while len(asked_in) < count:
        asked_in.append([x.device for x in state.round.leases])
        for name in asked_in[-1]:
            if name in answers and open_lease(state, name):
                state, _ = step(state, arrived(state, name, now))
        if state.phase is Phase.COLLECTING:
            late += 1
            now += 60.0
            state, _ = step(state, Tick(at_s=now))
        if state.phase is Phase.GATHERING:
            now += MAX_PAUSE_S
            state, _ = step(state, Tick(at_s=now))
        if state.phase is Phase.REDUCING:
            state, _ = step(state, Reduced(at_s=now, number=state.turn[0], shared="s"))
    return state, late, asked_in


def test_silent_device_loses_its_place_in_the_draw_for_twice_as_long_each_time():
    state, late, asked_in = rounds_of(begun(rounds=200)[0], {"ada", "bea"}, 100)
    silent = [k for k, names in enumerate(asked_in, 1) if "cem" in names]
    assert silent == [1, 3, 6, 11, 20, 37, 70]
    assert late == len(silent)
    assert state.members["cem"].missed == len(silent)


def test_run_of_an_earlier_release_asks_a_silent_device_in_every_round():
    state = replace(begun(rounds=200)[0], rules=RULES_WITH_PAUSES)
    assert rounds_of(state, {"ada", "bea"}, 20)[1] == 20


def test_contribution_in_time_gives_a_silent_device_its_place_back():
    state, _, _ = rounds_of(begun(rounds=200)[0], {"ada", "bea"}, 10)
    assert state.members["cem"].missed == 3
    state, late, asked_in = rounds_of(state, set(DEVICES), 10)
    assert late == 0
    assert asked_in.count(["ada", "bea", "cem"]) == 10
    assert (state.members["cem"].missed, state.members["cem"].rests_until) == (0, 0)


def test_device_that_declines_was_not_silent():
    state, _ = begun()
    state, _ = step(state, declined(state, "cem", 1.0))
    assert state.members["cem"].missed == 0


def test_silent_devices_are_asked_where_no_quorum_is_without_them_and_after_the_others():
    state, _, asked_in = rounds_of(begun(DEVICES, rounds=99, quorum=3)[0], {"ada", "bea"}, 5)
    assert all(len(names) == 3 for names in asked_in)
    assert all({"ada", "bea"} <= set(names) for names in asked_in[2:])
    assert {name for names in asked_in for name in names} == set(DEVICES)
    assert state.history[-1].given_up


def test_device_whose_stream_was_away_too_long_is_drawn_when_it_is_back():
    state, _ = begun(rounds=3)
    state, _ = step(state, Left(at_s=1.0, device="ada"))
    state, _ = step(state, Tick(at_s=6.0))
    assert (state.round.leases[0].outcome, state.members["ada"].missed) == (Outcome.LOST, 0)


def test_evaluation_does_not_wait_for_a_device_that_rests():
    state, _ = begun(rounds=5, evaluate_every=1)
    for name in ("ada", "bea"):
        state, _ = step(state, arrived(state, name))
    state, _ = step(state, Tick(at_s=60.0))
    state, _ = step(state, Reduced(at_s=61.0, number=1, shared="s1"))
    assert state.round.evaluates
    assert [x.device for x in state.round.leases] == ["ada", "bea"]


def test_failed_run_stays_failed():
    state, _ = begun()
    state, _ = step(state, Failed(at_s=1.0, reason="no plan"))
    for event in (Resumed(at_s=2.0, reason=""), Joined(at_s=2.0, device="ada", examples=1)):
        assert step(state, event) == (state, ())


@pytest.mark.parametrize(
    "changes",
    [{"quorum": 0}, {"quorum": 4}, {"asked": 2}, {"rounds": 0}, {"deadline_s": 0.0},
     {"patience_s": -1.0}, {"patience_s": float("inf")}, {"deadline_s": float("nan")}],
)  # fmt: skip
def test_plans_that_cannot_work_are_refused(changes):
    with pytest.raises(InvalidInput):
        plan(**changes)


NAMES = st.sampled_from(DEVICES)
LEASES = st.tuples(st.integers(1, 3), st.booleans(), st.integers(0, 2), NAMES)


@st.composite
def events(draw):
    """Any events in order of time, most of them about leases that may exist."""
    now, found = 0.0, []
    for _ in range(draw(st.integers(5, 60))):
        now += draw(st.sampled_from([0.0, 0.5, 4.0, 70.0]))
        device = draw(NAMES)
        number, evaluates, attempt, holder = draw(LEASES)
        lease = lease_id("r1", number, evaluates=evaluates, attempt=attempt, device=holder)
        score = Score(samples=4, before=0.5, after=0.6, round=number)
        found.append(
            draw(
                st.sampled_from(
                    [
                        Joined(at_s=now, device=device, examples=5, held_out=2),
                        Joined(at_s=now, device=device, examples=5, held_out=2),
                        Left(at_s=now, device=device),
                        Arrived(at_s=now, device=holder, lease=lease, update=update(holder)),
                        Arrived(at_s=now, device=holder, lease=lease, update=update(holder)),
                        Arrived(at_s=now, device=device, lease=lease, update=update(device)),
                        Answered(at_s=now, device=holder, lease=lease, update=update(holder)),
                        Asked(
                            at_s=now,
                            number=number,
                            evaluates=evaluates,
                            attempt=attempt,
                            messages={device: "", holder: ""},
                        ),
                        Scored(at_s=now, device=holder, lease=lease, score=score),
                        Refused(at_s=now, device=holder, lease=lease, kind="shape", reason="r"),
                        Declined(at_s=now, device=holder, lease=lease, reason="no"),
                        Restarted(at_s=now),
                        Restarted(at_s=now, epoch="e1"),
                        Tick(at_s=now),
                        Reduced(at_s=now, number=number, shared=f"s{number}"),
                        Stopped(at_s=now, reason="s"),
                        Resumed(at_s=now, reason="r"),
                    ]
                )
            )
        )
    return found


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


def opcodes(run, *arguments):
    """(what it gives, instructions of Python that it took)."""
    taken = 0

    def trace(frame, kind, _):
        nonlocal taken
        frame.f_trace_opcodes = True
        taken += kind == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        found = run(*arguments)
    finally:
        sys.settrace(before)
    return found, taken


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
