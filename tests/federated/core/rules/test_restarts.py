"""Leases and runs over disconnections, restarts of the cloud, and stops."""

from __future__ import annotations

from tests.federated.core.rules.runs import (
    DEVICES,
    all_arrive,
    arrived,
    begun,
    open_lease,
    reduces,
    step,
)

from triplane.unified_ir.federated.core.rules import due_s
from triplane.unified_ir.federated.core.run import (
    Failed,
    Joined,
    Left,
    Phase,
    Reduced,
    Restarted,
    Resumed,
    Stopped,
    Tell,
    Tick,
)


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


def test_restart_reduces_again_what_was_being_reduced():
    state, _ = begun()
    state, effects = all_arrive(state)
    assert state.phase is Phase.REDUCING
    again, more = step(state, Restarted(at_s=9.0))
    assert reduces(more) == reduces(effects)
    assert again.phase is Phase.REDUCING


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


def test_failed_run_stays_failed():
    state, _ = begun()
    state, _ = step(state, Failed(at_s=1.0, reason="no plan"))
    for event in (Resumed(at_s=2.0, reason=""), Joined(at_s=2.0, device="ada", examples=1)):
        assert step(state, event) == (state, ())
