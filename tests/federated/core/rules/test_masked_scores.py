"""Rules of evaluating rounds that are masked, and of runs without scores."""

from typing import Any

import pytest
from tests.federated.core.rules.runs import DEVICES, all_arrive, begun, fresh, plan, step

from triplane.cloud.federation.coding import from_json, to_json
from triplane.unified_ir.federated.core.masked_round import is_masking
from triplane.unified_ir.federated.core.masked_step import STEPS, MaskedStep, StepAnswer
from triplane.unified_ir.federated.core.metric import Scores
from triplane.unified_ir.federated.core.run import (
    Declined,
    Exchanged,
    Finish,
    Joined,
    Judged,
    Masked,
    Phase,
    Reduced,
    Resumed,
    RunState,
    Score,
    Stopped,
    Tick,
)

NAMES = DEVICES[:4]
KEYS, INPUTS = MaskedStep.KEYS, MaskedStep.INPUTS
MEAN = Score(samples=20, before=0.5, after=0.75, round=1)


def answered(state, names):
    for name in names:
        lease = next(x for x in state.round.leases if x.device == name)
        what = state.round.masked.step
        made = StepAnswer(step=what, blob=f"b-{name}-{what}", size=7)
        state, _ = step(state, Masked(at_s=1.0, device=name, lease=lease.id, answer=made))
    return state


def exchanged(state, at_s=2.0, **fields):
    found = state.round
    return step(
        state,
        Exchanged(
            at_s=at_s, number=found.number, attempt=found.attempt, step=found.masked.step,
            **{"refused": {}, **fields},
        ),
    )  # fmt: skip


def through(state, names, until=None):
    for what in STEPS:
        if what is until:
            break
        state = answered(state, names)
        score = MEAN if state.round.evaluates and what.next is None else None
        state, effects = exchanged(state, score=score)
    return state, effects


def scoring(scores=Scores.MASKED, held_out=(5, 6, 7, 100), **changes):
    """A masked run after its only round learned."""
    values = {"devices": 4, "asked": 4, "quorum": 4, "least": 3, "rounds": 1, "phase_s": 30.0}
    state: Any = fresh(plan(**{**values, "scores": scores, **changes}))
    for name, samples in zip(NAMES, held_out, strict=True):
        joined = Joined(at_s=0.0, device=name, examples=10, held_out=samples)
        state, _ = step(state, joined)
    state, _ = through(state, [x.device for x in state.round.leases])
    return step(state, Reduced(at_s=3.0, number=1, shared="s1"))


def test_an_evaluating_round_of_a_masked_run_goes_through_the_same_steps():
    state, _ = scoring()
    assert (state.round.evaluates, state.round.masked.step) == (True, KEYS)
    assert state.round.masked.cap == 18, "three lower medians of the held-out samples"
    assert [x.device for x in state.round.leases] == list(NAMES)
    state, _ = through(state, NAMES, until=INPUTS)
    assert is_masking(state)
    assert state.spent == (), "scores have a ledger of their own"
    while state.round:
        state = answered(state, NAMES)
        last = state.round.masked.step.next is None
        state, effects = exchanged(state, score=MEAN if last else None)
    assert (state.phase, effects[-1]) == (Phase.FINISHING, Finish())
    assert any(isinstance(effect, Judged) for effect in effects)
    assert (state.history[-1].evaluates, state.history[-1].counted) == (True, 4)
    assert all(member.score is None for member in state.members.values())
    assert from_json(RunState, to_json(state)) == state


def test_devices_beyond_the_cohort_are_not_asked_to_score():
    state, _ = scoring(devices=3, asked=3, quorum=3)
    assert len(state.round.leases) == 3


@pytest.mark.parametrize("held_out", [(5, 5, 0, 0), (0, 0, 0, 0)])
def test_too_few_devices_that_score_are_not_waited_for(held_out):
    state, effects = scoring(held_out=held_out)
    assert (state.phase, effects[-1]) == (Phase.FINISHING, Finish())
    assert not any(ended.evaluates for ended in state.history)


def test_fewer_than_the_quorum_may_score_if_they_are_the_least_cohort():
    state, _ = scoring(held_out=(5, 5, 5, 0))
    state, _ = through(state, NAMES[:3])
    assert state.history[-1].counted == 3


def test_an_evaluation_that_fails_says_why_and_is_not_repeated():
    state, _ = scoring()
    state = answered(state, NAMES[:2])
    for name in NAMES[2:]:
        lease = next(x for x in state.round.leases if x.device == name)
        declines = Declined(at_s=2.0, device=name, lease=lease.id, reason="no scores")
        state, effects = step(state, declines)
    assert (state.phase, effects[-1]) == (Phase.FINISHING, Finish()), "nothing waits"
    given_up = state.history[-1].given_up
    assert given_up == "2 devices of 3 needed advertised keys; cem did not: no scores"


def test_an_evaluation_that_fails_after_inputs_lets_the_next_round_begin():
    state, _ = scoring(rounds=2, evaluate_every=1)
    state, _ = through(state, NAMES, until=MaskedStep.SIGNATURES)
    state, _ = exchanged(answered(state, NAMES), failure="too few signed")
    assert (state.history[-1].given_up, state.attempt) == ("too few signed", 0)
    assert (state.turn, state.round.evaluates) == ((2, False), False)


def test_silent_devices_end_an_evaluation_at_its_deadline():
    state, _ = scoring()
    state, _ = step(answered(state, NAMES[:2]), Tick(at_s=70.0))
    assert state.phase is Phase.FINISHING
    assert "2 devices of 3 needed" in state.history[-1].given_up


def test_a_stopped_evaluation_is_asked_for_again_under_other_leases():
    state, _ = scoring()
    before = {x.id for x in state.round.leases}
    state, _ = step(state, Stopped(at_s=4.0, reason="lunch"))
    state, _ = step(state, Resumed(at_s=5.0, reason=""))
    assert (state.round.evaluates, state.round.masked.step) == (True, KEYS)
    assert before.isdisjoint(x.id for x in state.round.leases)


def test_scores_in_the_clear_of_a_masked_run_are_as_before():
    state, _ = scoring(Scores.CLEAR)
    assert (state.round.evaluates, state.round.masked) == (True, None)


@pytest.mark.parametrize("every", [0, 1])
def test_a_run_without_scores_never_evaluates(every):
    state, _ = begun(rounds=2, evaluate_every=every, scores=Scores.OFF)
    for number in (1, 2):
        state, _ = all_arrive(state)
        state, effects = step(state, Reduced(at_s=2.0, number=number, shared=f"s{number}"))
    assert (state.phase, effects[-1]) == (Phase.FINISHING, Finish())
    assert not any(ended.evaluates for ended in state.history)
