"""Rules of masked rounds: steps, losses, restarts, and devices that contributed for a state."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.federated.core.rules.runs import DEVICES, fresh, opcodes, open_lease, plan, reduces, step

from triplane.cloud.federation.coding import from_json, to_json
from triplane.unified_ir.federated.core.masked_round import (
    GIVEN_UP,
    GROUP_LEFT_OUT,
    MAX_KEYS,
    answer_of,
)
from triplane.unified_ir.federated.core.masked_step import STEPS, LostGroup, MaskedStep, StepAnswer
from triplane.unified_ir.federated.core.rules import due_s
from triplane.unified_ir.federated.core.run import (
    NEVER,
    RULES_WITH_WATCHES,
    Declined,
    Exchange,
    Exchanged,
    Joined,
    Left,
    Masked,
    Outcome,
    Phase,
    Reduced,
    Refused,
    Restarted,
    Resumed,
    RunMember,
    RunState,
    Stopped,
    Tell,
    Tick,
)
from triplane.unified_ir.federated.privacy.budget import run_budget

KEYS, SHARES, INPUTS, SIGNATURES, REVEALS = STEPS


def masked_plan(**changes):
    values = {
        "devices": 4,
        "asked": 4,
        "quorum": 4,
        "least": 3,
        "phase_s": 30.0,
        "patience_s": 50.0,
    }
    return plan(**(values | changes))


def begun(names=DEVICES[:4], **changes):
    state: Any = fresh(masked_plan(**changes))
    for count, name in enumerate(names):
        state, _ = step(state, Joined(at_s=0.0, device=name, examples=10 + count))
    return state


def answer(state, device, what=None, at_s=1.0, blob="a"):
    what = what or state.round.masked.step
    lease = next(x for x in state.round.leases if x.device == device)
    made = StepAnswer(step=what, blob=f"{blob}-{device}-{what}", size=7)
    return Masked(at_s=at_s, device=device, lease=lease.id, answer=made)


def answered(state, names, at_s=1.0):
    effects: tuple = ()
    for name in names:
        state, more = step(state, answer(state, name, at_s=at_s))
        effects += more
    return state, effects


def exchanged(state, at_s=2.0, **fields):
    found = state.round
    values = {"refused": {}, "failure": ""} | fields
    return Exchanged(
        at_s=at_s, number=found.number, attempt=found.attempt, step=found.masked.step, **values
    )


def through(state, names, until, at_s=1.0):
    """After the exchanges of all steps before `until`, which these devices answer."""
    while state.round.masked.step is not until:
        state, _ = answered(state, names, at_s)
        state, _ = step(state, exchanged(state, at_s))
    return state


def exchanges(effects):
    return [[x.device for x in e.leases] for e in effects if isinstance(e, Exchange)]


def outcomes(round_):
    return {x.device: x.outcome for x in round_.leases}


def test_a_round_without_losses_goes_through_all_steps_and_is_reduced():
    state, names = begun(), DEVICES[:4]
    for what in STEPS:
        assert state.round.masked.step is what
        state, effects = answered(state, names)
        assert exchanges(effects) == [list(names)]
        state, effects = step(state, exchanged(state))
        assert what is REVEALS or {Tell(n) for n in names} <= {*effects}
    assert state.phase is Phase.REDUCING
    ((order),) = reduces(effects)
    assert [x.device for x in order.leases] == list(names)
    assert state.history[-1].bytes_up == 7 * len(STEPS) * len(names)
    assert all(state.members[n].counted == 1 for n in names)
    state, _ = step(state, Reduced(at_s=3.0, number=1, shared="s1"))
    assert (state.spent, state.round.number, state.round.masked.step) == ((), 2, KEYS)


def test_the_bounds_follow_what_is_reduced_and_stay_while_rounds_are_given_up():
    state = begun(clip=4.0, rounds=6)
    bounds = [(state.norm, state.buffer_clip)]
    for number, (clip, buffer_clip) in enumerate(((2.5, 6.0), (1.5, 9.0)), 1):
        state, _ = answered(through(state, DEVICES[:4], REVEALS), DEVICES[:4])
        state, _ = step(state, exchanged(state))
        state, _ = step(
            state, Reduced(at_s=3.0, number=number, shared=f"s{number}", clip=clip,
                           buffer_clip=buffer_clip),
        )  # fmt: skip
        bounds.append((state.norm, state.buffer_clip))
    assert bounds == [(4.0, 0.0), (2.5, 6.0), (1.5, 9.0)]
    assert [r.norm_bound for r in state.history if not r.evaluates] == [4.0, 2.5]
    assert from_json(RunState, to_json(state)) == state
    state, _ = answered(state, DEVICES[:4])
    state, _ = step(state, exchanged(state, failure="no"))
    assert state.history[-1].given_up
    assert (state.norm, state.buffer_clip) == (1.5, 9.0)


def test_the_cap_is_the_largest_offer_but_at_most_three_medians():
    assert begun().round.masked.cap == 13
    state: Any = fresh(masked_plan())
    for name, examples in zip(DEVICES, (5, 6, 7, 4_000_000_000), strict=False):
        state, _ = step(state, Joined(at_s=0.0, device=name, examples=examples))
    assert state.round.masked.cap == 18


def test_enough_keys_close_their_step_and_the_others_are_late():
    state = begun(DEVICES, devices=3, asked=5, quorum=3)
    state, effects = answered(state, DEVICES[:3])
    assert exchanges(effects) == [list(DEVICES[:3])]
    assert [outcomes(state.round)[n] for n in DEVICES[3:]] == [Outcome.LATE] * 2


def test_too_few_keys_at_the_deadline_give_the_round_up_and_spend_nobody():
    state, _ = answered(begun(), DEVICES[:3])
    assert due_s(state) == 60.0
    state, effects = step(state, Tick(at_s=60.0))
    assert (state.phase, state.attempt, state.spent) == (Phase.GATHERING, 1, ())
    assert state.history[-1].given_up == "3 devices of 4 needed advertised keys"
    assert not exchanges(effects)
    assert state.members[DEVICES[3]].rests_until > 1


def test_too_few_keys_name_a_device_that_declined_and_the_others_do_not_learn_it():
    state = begun()
    lease = open_lease(state, DEVICES[1]).id
    state, _ = step(state, Declined(at_s=1.0, device=DEVICES[1], lease=lease, reason="too hot"))
    state, _ = answered(state, [DEVICES[0], *DEVICES[2:4]])
    assert state.history[-1].given_up == (
        "3 devices of 4 needed advertised keys; bea did not: too hot"
    )
    reasons = {name: state.members[name].settled.reason for name in DEVICES[:4]}
    assert reasons == dict.fromkeys(DEVICES[:4], "the round was given up") | {"bea": "too hot"}


@pytest.mark.parametrize("what", [SHARES, INPUTS, SIGNATURES, REVEALS])
def test_a_device_that_is_silent_in_a_step_counts_if_its_input_came(what):
    names = DEVICES[:4]
    state = through(begun(), names, what)
    state, _ = answered(state, names[:3], at_s=3.0)
    ends_s = 60.0 if what is SHARES else 31.0
    assert due_s(state) == ends_s, "the time of a step begins with it, or it is the round's"
    state, effects = step(state, Tick(at_s=ends_s))
    assert exchanges(effects) == [list(names[:3])]
    stays = what.is_at_least(SIGNATURES)
    assert outcomes(state.round)[names[3]] is (Outcome.OPEN if stays else Outcome.LOST)
    now_s = ends_s + 1.0
    state, effects = step(state, exchanged(state, now_s))
    while state.phase is Phase.COLLECTING:
        state, effects = answered(state, names[:3], now_s)
        assert exchanges(effects) == [list(names[:3])]
        state, effects = step(state, exchanged(state, now_s))
    ((order),) = reduces(effects)
    assert [x.device for x in order.leases] == list(names[: 3 + stays])
    assert state.members[names[3]].counted == stays


def test_a_device_that_is_busy_when_its_shares_are_due_is_waited_for():
    names = DEVICES[:4]
    state = through(begun(), names, SHARES)
    state, _ = answered(state, names[:3], at_s=3.0)
    state, _ = step(state, Tick(at_s=59.0))
    state, effects = step(state, answer(state, names[3], at_s=59.5))
    assert exchanges(effects) == [list(names)]


def test_a_device_that_is_gone_when_its_shares_are_due_is_lost_after_the_patience():
    names = DEVICES[:4]
    state = through(begun(patience_s=5.0), names, SHARES)
    state, _ = answered(state, names[:3], at_s=3.0)
    state, _ = step(state, Left(at_s=4.0, device=names[3]))
    assert due_s(state) == 9.0
    state, effects = step(state, Tick(at_s=9.0))
    assert exchanges(effects) == [list(names[:3])]


def test_shares_have_the_time_of_a_step_where_the_keys_took_the_time_of_the_round():
    names = DEVICES[:4]
    state, _ = answered(begun(quorum=3), names[:3], at_s=3.0)
    state, _ = step(state, Tick(at_s=60.0))
    state, _ = step(state, exchanged(state, 61.0))
    assert (state.round.masked.step, due_s(state)) == (SHARES, 91.0)
    again, _ = step(state, Restarted(at_s=80.0, epoch="e2"))
    for name in names[:3]:
        again, _ = step(again, Joined(at_s=80.0, device=name, examples=10))
    assert due_s(again) == 110.0


def test_shares_of_a_run_of_earlier_rules_have_the_time_of_a_step():
    state = replace(through(begun(), DEVICES[:4], SHARES), rules=RULES_WITH_WATCHES)
    assert due_s(state) == 31.0


def test_a_device_that_was_away_too_long_leaves_at_the_next_step():
    names = DEVICES[:4]
    state, _ = answered(begun(phase_s=500.0), [names[0]])
    state, _ = step(state, Left(at_s=1.0, device=names[0]))
    state, _ = answered(state, names[1:], at_s=2.0)
    state, _ = step(state, Tick(at_s=55.0))
    assert open_lease(state, names[0]) is not None, "its answer came"
    state, _ = step(state, exchanged(state, 55.0))
    assert outcomes(state.round)[names[0]] is Outcome.LOST


@pytest.mark.parametrize("what", STEPS)
def test_a_restart_repeats_the_exchange_and_gives_the_step_its_time_again(what):
    names = DEVICES[:4]
    state = through(begun(), names, what)
    state, _ = step(state, Restarted(at_s=20.0, epoch="e2"))
    if what is not KEYS:
        assert state.round.masked.opened_s == 20.0
    for name in names:
        state, _ = step(state, Joined(at_s=21.0, device=name, examples=10))
    state, effects = answered(state, names, 21.0)
    (order,) = exchanges(effects)
    state, effects = step(state, Restarted(at_s=22.0, epoch="e3"))
    assert exchanges(effects) == [order]
    assert due_s(state) is None, "only the exchange moves it"


@pytest.mark.parametrize("what", STEPS)
def test_a_failure_spends_those_who_were_asked_for_their_input(what):
    names = DEVICES[:4]
    state = through(begun(), names, what)
    state, _ = answered(state, names)
    state, _ = step(state, exchanged(state, failure="3 of 4 needed"))
    assert state.history[-1].given_up == "3 of 4 needed"
    if not what.is_at_least(INPUTS):
        assert (state.phase, state.spent) == (Phase.GATHERING, ())
        return
    assert (state.phase, state.spent) == (Phase.STOPPED, names)
    assert "only once, and 4 were asked to" in state.reason
    assert "Add devices and resume the run, or start a new one" in state.reason
    state, _ = step(state, Resumed(at_s=9.0, reason="go"))
    assert state.phase is Phase.STOPPED, "nobody is new"
    for number in range(4):
        new = Joined(at_s=10.0, device=f"new{number}", examples=10)
        state, _ = step(state, new)
    state, _ = step(state, Resumed(at_s=70.0, reason="go"))
    assert [x.device for x in state.round.leases] == [f"new{n}" for n in range(4)]


def test_a_stopped_run_remembers_who_was_asked_for_an_input():
    state = through(begun(DEVICES), DEVICES[:4], INPUTS)
    asked = tuple(x.device for x in state.round.leases if x.due is INPUTS)
    state, _ = step(state, Stopped(at_s=5.0, reason="s"))
    state, _ = step(state, Resumed(at_s=6.0, reason="r"))
    assert (state.phase, state.spent) == (Phase.STOPPED, asked)


def private(**changes):
    return begun(DEVICES, budget=run_budget(4.0, 1e-5, 6, **changes), clip=1.0, rounds=6)


@pytest.mark.parametrize("what", STEPS)
def test_a_device_is_used_once_it_was_asked_for_its_input_whatever_comes_of_the_round(what):
    """It charges its account then, and the cloud may see the sum of a round that is given up."""
    state = private(most_uses=1)
    names = [x.device for x in state.round.leases]
    state = through(state, names, what)
    state, _ = answered(state, names)
    state, _ = step(state, exchanged(state, failure="3 of 4 needed"))
    uses = int(what.is_at_least(INPUTS))
    for name in names:
        member = state.members[name]
        assert (member.uses, member.used_round) == (uses, NEVER if uses else 0)
    assert state.charged == 0


def test_devices_that_are_spent_and_those_that_are_used_up_make_no_round_together():
    names = [f"d{number}" for number in range(8)]
    members = {
        n: RunMember(device=n, connected=True, examples=9, used_round=NEVER if i < 3 else 1)
        for i, n in enumerate(names)
    }
    budget = run_budget(4.0, 1e-5, 6, most_uses=2)
    before = replace(
        fresh(masked_plan(budget=budget, clip=1.0, rounds=6)),
        members=members, spent=tuple(names[3:7]), turn=(2, False),
    )  # fmt: skip
    state, _ = step(before, Tick(at_s=100.0))
    assert state.phase is Phase.STOPPED
    assert "4 were asked to in rounds without a sum; 1 others are left of 4 needed" in state.reason
    older, _ = step(replace(before, rules=RULES_WITH_WATCHES), Tick(at_s=100.0))
    assert older.phase is Phase.GATHERING, "as it was replayed before"


def test_a_device_of_a_masked_round_rests_until_the_separation_is_over():
    state = private(separation=2, most_uses=9)
    assert state.phase is Phase.GATHERING, "4 devices a round, each in every second one, are 8"
    for number in range(3):
        state, _ = step(state, Joined(at_s=0.0, device=f"new{number}", examples=10))
    names = [x.device for x in state.round.leases]
    state = through(state, names, REVEALS)
    state, _ = answered(state, names)
    state, _ = step(state, exchanged(state))
    state, _ = step(state, Reduced(at_s=3.0, number=1, shared="s1", charged=1))
    assert {state.members[n].uses for n in names} == {1}
    assert {state.members[n].used_round for n in names} == {1}
    others = {x.device for x in state.round.leases}
    assert state.round.number == 2
    assert others.isdisjoint(names)
    assert (state.charged, state.budget.rounds) == (1, 1)


@pytest.mark.parametrize("what", [KEYS, SHARES, INPUTS])
def test_a_device_that_declines_while_its_answer_is_taken_stays_with_its_answer(what):
    """The others' masks cancel with its own: the cohort that is computed again must have it."""
    names = DEVICES[:4]
    state = through(begun(), names, what)
    state, _ = answered(state, names)
    lease = open_lease(state, names[1]).id
    for event in (
        Declined(at_s=2.0, device=names[1], lease=lease, reason="too hot"),
        Refused(at_s=2.0, device=names[1], lease=lease, kind="masking", reason="r"),
    ):
        assert step(state, event)[0] is state
    state, _ = step(state, exchanged(state))
    assert {x.device for x in state.round.leases if x.taken is what} == {*names}
    state, _ = step(state, Declined(at_s=3.0, device=names[1], lease=lease, reason="too hot"))
    kept = what is INPUTS
    assert outcomes(state.round)[names[1]] is (Outcome.OPEN if kept else Outcome.DECLINED)


def test_refused_answers_leave_the_round_and_are_counted():
    names = DEVICES[:4]
    state = through(begun(), names, INPUTS)
    state, _ = answered(state, names)
    state, _ = step(state, exchanged(state, refused={names[1]: "not signed"}))
    assert outcomes(state.round)[names[1]] is Outcome.REFUSED
    assert state.refusals == {"masking": 1}
    assert [n for n in names if state.members[n].rests_until > 1] == [names[1]]
    assert state.round.masked.step is SIGNATURES
    state, effects = answered(state, [names[0], *names[2:]])
    assert exchanges(effects) == [[names[0], *names[2:]]]


@pytest.mark.parametrize("what", STEPS[1:])
def test_a_group_that_is_left_out_counts_for_nothing_and_stays_spent(what):
    names = DEVICES[:4]
    state = through(begun(), names, what)
    state, _ = answered(state, names)
    group = LostGroup(devices=(names[3], names[1]), reason="group 2 of 2: too few")
    event = exchanged(state, left_out=(group,))
    assert from_json(Exchanged, to_json(event)) == event
    state, effects = step(state, event)
    while state.phase is Phase.COLLECTING:
        assert [x.device for x in state.round.leases if x.due] == [names[0], names[2]]
        assert state.round.left_out == "group 2 of 2: too few"
        state, _ = answered(state, [names[0], names[2]])
        state, effects = step(state, exchanged(state))
    ((order),) = reduces(effects)
    assert [x.device for x in order.leases] == [names[0], names[2]]
    assert (state.history[-1].counted, state.history[-1].lost) == (2, 2)
    assert state.history[-1].left_out == "group 2 of 2: too few"
    for name in names:
        settled = state.members[name].settled
        wanted = (True, "") if name in {names[0], names[2]} else (False, GROUP_LEFT_OUT)
        assert (settled.counted, settled.reason) == wanted
    # Before inputs were asked for, the devices of the group have masked nothing.
    assert set(state.spent) == ({*names} if what.is_at_least(INPUTS) else {names[0], names[2]})
    assert state.refusals == {}


def test_devices_of_a_group_learn_that_a_round_was_given_up_with_it():
    names = DEVICES[:4]
    state, _ = answered(through(begun(), names, INPUTS), names)
    group = LostGroup(devices=names[2:], reason="g")
    state, _ = step(state, exchanged(state, left_out=(group,), failure="1 of 2 groups is left: g"))
    assert {state.members[name].settled.reason for name in names} == {GIVEN_UP}
    assert (state.history[-1].given_up, state.history[-1].lost) == ("1 of 2 groups is left: g", 4)


def test_a_silent_device_is_asked_again_where_the_others_are_fewer_than_a_masked_round_needs():
    """The least of all groups may be more than the quorum."""
    names = DEVICES[:4]
    state = through(begun(quorum=2, least=4, rounds=3), names, INPUTS)
    state, _ = answered(state, names[:3])
    state, _ = step(state, Tick(at_s=31.0))
    state, _ = step(state, exchanged(state, 32.0))
    state = through(state, names[:3], REVEALS, 33.0)
    state, _ = answered(state, names[:3], 33.0)
    state, _ = step(state, exchanged(state, 34.0))
    assert state.members[names[3]].rests_until > 2
    reduced = Reduced(at_s=35.0, number=1, shared="s1")
    older, _ = step(replace(state, rules=RULES_WITH_WATCHES), reduced)
    assert [x.device for x in older.round.leases] == [*names[:3]], "a journal replays as it was"
    state, _ = step(state, reduced)
    assert [x.device for x in state.round.leases] == [*names]


def test_a_group_with_a_device_that_was_lost_before_is_left_out_without_it():
    names = DEVICES[:4]
    state = through(begun(), names, INPUTS)
    state, _ = answered(state, names[:3])
    state, _ = step(state, Tick(at_s=31.0))
    kept = state.members[names[3]]
    group = LostGroup(devices=names[2:4], reason="r")
    state, _ = step(state, exchanged(state, left_out=(group, group)))
    assert state.members[names[3]] == kept
    assert outcomes(state.round)[names[2]] is Outcome.LOST
    assert state.round.left_out == "r; r"


def test_without_groups_nothing_of_them_is_stored():
    state = through(begun(), DEVICES[:4], INPUTS)
    text = to_json(state)
    assert "left_out" not in text + to_json(exchanged(answered(state, DEVICES[:4])[0]))


@pytest.mark.parametrize("what", [INPUTS, REVEALS])
def test_a_device_that_lied_rests_after_a_round_that_is_given_up(what):
    names = DEVICES[:4]
    state, _ = answered(through(begun(), names, what), names)
    state, _ = step(state, exchanged(state, refused={names[1]: "it lied"}, failure="f"))
    assert [n for n in names if state.members[n].rests_until > 1] == [names[1]]
    assert state.refusals == {"masking": 1}


def test_a_device_that_is_refused_again_rests_longer():
    names, rests = DEVICES[:4], []
    state = begun()
    for _ in range(2):
        state, _ = answered(state, names)
        state, _ = step(state, exchanged(state, refused={names[1]: "not signed"}, failure="f"))
        rests.append(state.members[names[1]].rests_until)
        state, _ = step(state, Tick(at_s=state.not_before_s))
    assert rests == [3, 4]


def test_a_device_that_began_again_may_replace_its_keys_until_they_are_exchanged():
    names = DEVICES[:4]
    state, _ = answered(begun(), names[:1])
    for count in range(5):
        before = state
        state, _ = step(state, answer(state, names[0], blob=f"again{count}"))
        assert (state is before) == (count >= MAX_KEYS - 1)
    state, effects = answered(state, names[1:])
    ((order),) = [x for x in effects if isinstance(x, Exchange)]
    newest = answer_of(order.leases[0], KEYS)
    assert newest is not None
    assert newest.blob == f"again{MAX_KEYS - 2}-ada-keys"
    assert step(state, answer(state, names[1], blob="late"))[0] is state


def test_an_answer_that_is_not_due_changes_nothing():
    names = DEVICES[:4]
    state = through(begun(), names, SHARES)
    for event in (
        answer(state, names[0], KEYS), answer(state, names[0], KEYS, blob="other"),
        answer(state, names[0], INPUTS), exchanged(state),
    ):  # fmt: skip
        assert step(state, event)[0] is state
    state, _ = answered(state, names[:1])
    assert step(state, answer(state, names[0]))[0] is state
    other = Masked(at_s=1.0, device=names[1], lease="f" * 32, answer=answer(state, names[1]).answer)
    state, _ = step(state, other)
    assert not state.members[names[1]].settled.counted


@st.composite
def events(draw):
    """Events of a masked run, made from its state as they are applied."""
    kinds = [
        "join",
        "leave",
        "answer",
        "answer",
        "answer",
        "answer",
        "exchange",
        "exchange",
        "tick",
    ]
    kinds += ["fail", "refuse", "group", "decline", "restart", "stop", "resume", "reduce", "wait"]
    numbers = st.integers(0, len(DEVICES) - 1)
    return draw(st.lists(st.tuples(st.sampled_from(kinds), numbers), min_size=10, max_size=120))


def made(state, kind, device, now):
    round_ = state.round
    lease = open_lease(state, device)
    masked = round_.masked if round_ is not None and state.phase is Phase.COLLECTING else None
    if kind == "answer" and lease is not None and masked is not None:
        return answer(state, device, at_s=now)
    if kind in {"exchange", "fail", "refuse", "group"} and masked is not None:
        refused = {device: "r"} if kind == "refuse" else {}
        lost = (LostGroup(devices=(device, DEVICES[0]), reason="g"),) if kind == "group" else ()
        failure = "f" if kind == "fail" else ""
        return exchanged(state, now, refused=refused, left_out=lost, failure=failure)
    if kind == "decline" and lease is not None:
        return Declined(at_s=now, device=device, lease=lease.id, reason="no")
    simple = {
        "leave": Left(at_s=now, device=device),
        "refuse": Refused(at_s=now, device=device, lease="x", kind="kind", reason="r"),
        "restart": Restarted(at_s=now, epoch=f"e{now}"),
        "stop": Stopped(at_s=now, reason="s"),
        "resume": Resumed(at_s=now, reason="r"),
        "reduce": Reduced(at_s=now, number=state.turn[0], shared=f"s{state.turn[0]}"),
        "tick": Tick(at_s=max(now, due_s(state) or now)),
        "join": Joined(at_s=now, device=device, examples=5),
    }
    return simple.get(kind, Tick(at_s=now))


@given(events())
def test_no_order_of_events_uses_a_device_twice_for_a_state_or_leaves_a_round_without_a_way_on(
    found,
):
    first: Any = fresh(masked_plan(devices=3, asked=4, quorum=3, rounds=3))
    state, now, done = first, 0.0, []
    asked: set[tuple[str, str]] = set()
    for name in DEVICES:
        event = Joined(at_s=0.0, device=name, examples=5)
        done.append(event)
        state, _ = step(state, event)
    for kind, number in found:
        now += 20.0 if kind == "wait" else 1.0
        event = made(state, kind, DEVICES[number], now)
        now = event.at_s
        before = state
        state, effects = step(state, event)
        done.append(event)
        began = state.round is not None and state.round.masked is not None and (
            state.round.masked.step is INPUTS and (
                before.round is None or before.round.masked is None
                or before.round.masked.step is SHARES
            )
        )  # fmt: skip
        if began and before.phase is Phase.COLLECTING:
            for lease in state.round.leases:
                if lease.taken is SHARES:
                    assert (state.shared, lease.device) not in asked
                    asked.add((state.shared, lease.device))
        for order in reduces(effects):
            assert len(order.leases) >= 1
            assert all(x.taken.is_at_least(INPUTS) for x in order.leases)
        if state.phase is Phase.COLLECTING and state.round.masked is not None:
            waiting = [x for x in state.round.leases if x.outcome is Outcome.OPEN and x.due]
            assert state.round.masked.exchanging or waiting
            assert state.round.masked.exchanging or due_s(state) is not None
        again = from_json(RunState, to_json(state))
        assert again == state
        assert due_s(again) == due_s(state)
    replayed = first
    for event in done:
        replayed, _ = step(replayed, event)
    assert to_json(replayed) == to_json(state)


def cost_of_an_answer(size):
    """Instructions for the answer of one device among so many, in the step of keys."""
    names = [f"d{number:05d}" for number in range(size)]
    members = {n: RunMember(device=n, connected=True, examples=9) for n in names[1:]}
    asked = masked_plan(devices=size, asked=size, quorum=size)
    state: Any = replace(fresh(asked), members=members)
    state, _ = step(state, Joined(at_s=0.0, device=names[0], examples=9))

    event = answer(state, names[size // 2])
    return opcodes(lambda: due_s(step(state, event)[0]))[1]


def test_cost_of_an_answer_does_not_grow_with_the_number_of_devices():
    assert cost_of_an_answer(1000) < 1.5 * cost_of_an_answer(100)


def test_a_run_in_the_clear_stores_no_field_of_masking():
    state: Any = fresh(plan())
    for name in DEVICES[:3]:
        state, _ = step(state, Joined(at_s=0.0, device=name, examples=10))
    stored = to_json(state)
    of_masking = ("masked", "due", "taken", "answers", "spent", "least", "phase_s")
    for field in (*of_masking, "buffer_clip", "norm_bound"):
        assert f'"{field}"' not in stored
    assert due_s(state) is not None
    assert MaskedStep("keys") is KEYS
