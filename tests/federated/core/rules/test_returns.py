"""A run whose state is spoilt returns to its last good one, and how often it does."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triplane.cloud.federation.coding import from_json, to_json
from triplane.unified_ir.federated.core.run import (
    RULES_WITH_RESTS,
    Arrived,
    Phase,
    Reduced,
    Restarted,
    Resumed,
    RunState,
    Tick,
)
from triplane.unified_ir.federated.core.spoilt import (
    FLOOR,
    NO_LOSSES,
    PATIENCE,
    RECENT,
    RISE,
    after_loss,
    is_spoilt,
    most_loss,
)

from .runs import (
    DEVICES,
    all_arrive,
    all_decline,
    arrived,
    begun,
    declined,
    reduces,
    step,
    update,
)

BAD = [50.0] * PATIENCE


def learned(state, losses, at_s=1.0):
    """The state after a round in which devices report these losses, and its effects."""
    effects = ()
    leases = list(state.round.leases)
    for lease, loss in zip(leases, losses, strict=True):
        made = replace(update(lease.device), loss=loss)
        event = Arrived(at_s=at_s, device=lease.device, lease=lease.id, update=made)
        state, more = step(state, event)
        effects += more
    return state, effects


def round_of(state, loss, at_s=1.0):
    """A whole round in which all devices report this loss; its result is named after it."""
    number = state.turn[0]
    state, effects = learned(state, [loss] * 3, at_s)
    if reduces(effects):
        state, _ = step(state, Reduced(at_s=at_s, number=number, shared=f"s{number}"))
    return state


def after(losses, **changes):
    state, _ = begun(**{"rounds": 40, "returns": 2, **changes})
    for loss in losses:
        state = round_of(state, loss)
    return state


def test_bad_rounds_in_a_row_return_to_the_state_before_the_last_good_round():
    state = after([2.0, 1.5, *BAD])
    # Round 2 was good, so the state that it began from, s1, is good; s2 is where losses rose.
    assert (state.shared, state.good, state.turn) == ("s1", "s1", (6, False))
    assert state.fresh_optimizer
    assert [bool(x.returned) for x in state.history] == [False] * 4 + [True]
    assert state.history[-1].returned == (
        "the loss over devices is 50, above 6, in 3 rounds in a row; returned to the last good "
        "state"
    )
    again = round_of(state, 1.4)
    assert (again.shared, again.good, again.fresh_optimizer) == ("s6", "s1", False)
    assert again.watch.bad == 0


def test_the_round_that_returns_is_not_reduced():
    state = after([2.0, *BAD[1:]])
    state, effects = learned(state, [50.0] * 3)
    assert reduces(effects) == []
    assert state.phase is Phase.COLLECTING, "the next round has begun"
    assert state.shared == "s0"


def test_a_minority_that_claims_a_large_loss_moves_nothing():
    state, _ = begun(rounds=40, returns=2)
    for number in range(1, 9):
        state, effects = learned(state, [1e308, 0.5, 0.4])
        assert reduces(effects)
        state, _ = step(state, Reduced(at_s=1.0, number=number, shared=f"s{number}"))
    assert not any(x.returned for x in state.history)
    json.loads(to_json(state))  # a sum that float64 does not hold is stored as none


def test_fewer_bad_rounds_than_the_patience_change_nothing():
    state = after([2.0, *BAD[1:], 1.0, *BAD[1:], 1.0])
    assert not any(x.returned for x in state.history)
    assert state.shared == f"s{len(state.history)}"


def test_a_run_that_returned_as_often_as_it_may_stops_and_can_be_resumed():
    state = after([2.0, *BAD, 2.0, *BAD, 2.0, *BAD])
    assert state.phase is Phase.STOPPED
    assert state.reason.endswith(
        "it had returned 2 times before, so look at the devices, then resume"
    )
    good = state.shared
    state, _ = step(state, Resumed(at_s=2.0, reason=""))
    assert (state.phase, state.shared) == (Phase.COLLECTING, good)
    assert round_of(state, 1.0).phase is Phase.COLLECTING


def test_devices_that_decline_a_state_make_the_run_return():
    """Their losses are not finite, so no update comes, and no mean of losses rises."""
    state = after([2.0, 1.5])
    for k in range(PATIENCE):
        at_s = 10.0 * (k + 1)
        state, _ = step(state, Tick(at_s=at_s))
        state = all_decline(state, at_s)
    assert state.shared == "s1"
    assert "most devices declined (0 updates of 2 needed)" in state.history[-1].returned
    state, _ = step(state, Tick(at_s=90.0))
    assert (state.phase, state.turn) == (Phase.COLLECTING, (3, False))


def test_half_of_the_devices_do_not_make_a_run_return_by_declining():
    state, _ = begun(DEVICES[:2], devices=2, asked=2, rounds=40, returns=2)
    state, _ = all_arrive(state)
    state, _ = step(state, Reduced(at_s=1.0, number=1, shared="s1"))
    for k in range(PATIENCE):
        state, _ = step(state, Tick(at_s=10.0 * (k + 1)))
        state, _ = step(state, declined(state, "ada", 10.0 * (k + 1)))
        state, _ = step(state, arrived(state, "bea", 10.0 * (k + 1)))
    assert (state.watch.bad, state.attempt, state.shared) == (0, PATIENCE, "s1")


def test_devices_that_are_lost_are_no_sign_of_a_spoilt_state():
    state = after([2.0, 1.5])
    for k in range(PATIENCE + 1):
        state, _ = step(state, Tick(at_s=100.0 * (k + 1)))
        state, _ = step(state, Tick(at_s=100.0 * (k + 1) + 61))
    assert not any(x.returned for x in state.history)
    assert state.shared == "s2"


@pytest.mark.parametrize("changes", [{"returns": 0}, {}])
def test_a_run_that_may_not_return_or_began_before_never_does(changes):
    state, _ = begun(**{"rounds": 40, "returns": 2, **changes})
    if not changes:
        state = replace(state, rules=RULES_WITH_RESTS)
    for loss in [2.0, *BAD, *BAD]:
        state = round_of(state, loss)
    assert not any(x.returned for x in state.history)
    assert (state.good, state.watch) == ("", NO_LOSSES)


def test_the_last_round_may_return_and_is_then_evaluated():
    state = after([2.0, *BAD], rounds=4)
    assert state.turn == (4, True)
    assert state.shared == "s0"


@pytest.mark.parametrize("bad", range(1, PATIENCE))
def test_a_state_that_fewer_rounds_found_bad_is_not_registered(bad):
    """No round follows that could find it bad once more."""
    state = after([2.0, 1.5, *BAD[:bad]], rounds=2 + bad)
    # s2 was found bad, and it began from s1, which round 2 found good.
    assert (state.shared, state.turn, state.phase) == ("s1", (2 + bad, True), Phase.COLLECTING)
    assert [bool(x.returned) for x in state.history] == [False] * (1 + bad) + [True]
    rounds = "the last round" if bad == 1 else f"{bad} rounds in a row"
    assert f"above 6, in {rounds}; returned" in state.history[-1].returned


def test_last_round_that_is_given_up_is_repeated_and_returns_nothing_by_itself():
    state = after([2.0, 1.5, BAD[0]], rounds=4)
    state, _ = step(state, Tick(at_s=100.0))
    assert (state.turn, state.attempt, state.shared) == ((4, False), 1, "s3")


def test_a_state_that_is_not_needed_any_more_is_not_kept():
    assert after([2.0, 1.0], rounds=2).good == ""


def test_a_restart_returns_just_the_same():
    state = after([2.0, 1.5, *BAD[1:]])
    stored = from_json(RunState, to_json(state))
    assert stored == state
    assert round_of(stored, 50.0) == round_of(state, 50.0)
    restarted, _ = step(stored, Restarted(at_s=1.0))
    assert restarted.watch == state.watch


def test_the_number_of_scaled_updates_is_in_the_record_of_the_round():
    state, _ = begun(rounds=3, returns=2)
    state, _ = learned(state, [1.0] * 3)
    state, _ = step(state, Reduced(at_s=1.0, number=1, shared="s1", scaled=2))
    assert [x.scaled for x in state.history] == [2]


def watch_of(losses):
    watch = NO_LOSSES
    for loss in losses:
        watch = after_loss(watch, loss)
    return watch


def test_the_limit_is_a_multiple_of_the_worst_recent_loss_above_a_floor():
    assert most_loss(NO_LOSSES) == math.inf
    assert most_loss(watch_of([0.5, 1.0, 0.7])) == 1.0 + RISE * 1.0
    assert most_loss(watch_of([2.0, *[0.001] * RECENT])) == 0.001 + RISE * FLOOR * 2.0
    assert most_loss(watch_of([-3.0, -1.0])) == -1.0 + RISE * 1.0
    old = [4.0, *[2.0] * RECENT]
    assert most_loss(watch_of(old)) == 2.0 + RISE * 2.0, "the worst one is not recent any more"


@pytest.mark.parametrize("lie", [0.0, 1e-300, -0.01, -1e300])
def test_one_round_of_low_losses_makes_no_later_round_bad(lie):
    """Of two devices, one that lies decides the lower median."""
    state = after([2.0, 1.0, lie, *[0.9] * 20])
    assert not any(x.returned for x in state.history)
    assert is_spoilt(watch_of([2.0, 1.0, lie, *BAD])), "it hides no spoilt state either"


@given(st.lists(st.floats(0.1, 0.29), max_size=40))
def test_losses_that_stay_within_the_limit_never_spoil(losses):
    watch = NO_LOSSES
    for loss in losses:
        watch = after_loss(watch, loss)
        assert watch.bad == 0
        assert not is_spoilt(watch)


def test_a_loss_that_is_no_number_is_bad():
    watch = watch_of([1.0, *[math.nan] * PATIENCE])
    assert is_spoilt(watch)
    assert not is_spoilt(after_loss(watch, 1.0))
