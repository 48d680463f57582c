"""Evaluating rounds, and rounds of an external strategy."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.federated.core.rules.runs import (
    DEVICES,
    all_arrive,
    all_decline,
    asked,
    begun,
    declined,
    judging,
    open_lease,
    plan,
    reduces,
    step,
    update,
)

from triplane.unified_ir.federated.core.run import (
    RULES_OF_OLD,
    Answered,
    Finish,
    Finished,
    Joined,
    Judged,
    Left,
    Phase,
    Reduced,
    Resumed,
    Score,
    Scored,
    Tell,
    Tick,
)


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
    assert (state.phase, state.reason) == (Phase.GATHERING, "2 devices are connected; away: bea")
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
