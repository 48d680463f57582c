"""Abandoned rounds, and devices that stay silent."""

from __future__ import annotations

from dataclasses import replace

from tests.federated.core.rules.runs import (
    DEVICES,
    all_arrive,
    all_decline,
    arrived,
    begun,
    declined,
    open_lease,
    step,
)

from triplane.unified_ir.federated.core.rules import FIRST_PAUSE_S, MAX_GIVEN_UP, MAX_PAUSE_S, due_s
from triplane.unified_ir.federated.core.run import (
    RULES_OF_OLD,
    RULES_WITH_PAUSES,
    Joined,
    Left,
    Outcome,
    Phase,
    Reduced,
    Refused,
    Tell,
    Tick,
)


def test_rounds_that_never_reach_their_quorum_ask_for_a_person():
    state, _ = begun()
    for i in range(1, 3 * MAX_GIVEN_UP):
        state, _ = step(state, Tick(at_s=100.0 * i))
        state, _ = step(state, Tick(at_s=100.0 * i + 50))
    assert state.phase is Phase.STOPPED
    assert state.reason.startswith(f"{MAX_GIVEN_UP} rounds in a row were given up")


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


def test_devices_whose_contributions_are_refused_do_not_end_a_run_of_enough_others():
    names = [f"d{k:02}" for k in range(12)]
    liars = set(names[:4])
    state, _ = begun(names, rounds=60, devices=4, asked=4, quorum=3)
    now = 1.0
    while state.phase in {Phase.COLLECTING, Phase.GATHERING} and not state.turn[1]:
        number = state.turn[0]
        for lease in state.round.leases if state.round else ():
            if lease.device in liars:
                step_of = Refused(
                    at_s=now, device=lease.device, lease=lease.id, kind="nonfinite", reason="NaN"
                )
            else:
                step_of = arrived(state, lease.device, now)
            state, _ = step(state, step_of)
        if state.phase is Phase.REDUCING:
            state, _ = step(state, Reduced(at_s=now, number=number, shared=f"s{number}"))
        now += 31.0
        state, _ = step(state, Tick(at_s=now))
    assert state.turn == (60, True), state.reason
    asked = sum(x.asked for x in state.history)
    assert sum(x.refused for x in state.history) < asked / 10
    assert {state.members[name].missed for name in liars} != {0}


def test_members_know_which_of_their_updates_is_in_a_shared_state():
    state, _ = begun()
    first = {x.device: x.id for x in state.round.leases}
    state, _ = all_arrive(state)
    assert {m.included_lease for m in state.members.values()} == {""}, "it may yet be abandoned"
    state, _ = step(state, Reduced(at_s=1.0, number=1, shared="s1"))
    assert {m.device: m.included_lease for m in state.members.values()} == first
    state, _ = step(state, arrived(state, "ada", 2.0))
    state, _ = step(state, Tick(at_s=62.0))
    assert state.attempt == 1
    assert state.members["ada"].counted_lease != first["ada"]
    assert state.members["ada"].included_lease == first["ada"]


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
