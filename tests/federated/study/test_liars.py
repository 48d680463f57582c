"""Studies in which devices lie: what limits them, and how a study returns and resumes."""

from dataclasses import replace

import numpy as np
import pytest
from tests.federated.study import given
from tests.support.liars import LyingServer, boasting, largest, scaled

from triplane.proto.errors import Conflict, InvalidInput
from triplane.unified_ir.federated.algorithms.aggregators import UNLIMITED, Robustness
from triplane.unified_ir.federated.core.spoilt import PATIENCE
from triplane.unified_ir.federated.study import Study, simulate
from triplane.unified_ir.federated.study.export import rounds_csv

OFF = Robustness(norm_bound="off")


def run(lie, *, robustness=None, total=4):
    made = given.study(robustness=robustness or Robustness(), rounds=total)
    server = LyingServer({"device-1"}, lie)
    return simulate(given.module(), given.shards(), made, server=server)


def distance(one, other):
    return max(float(np.abs(one.state[n] - other.state[n]).max()) for n in one.state)


@pytest.mark.long
@pytest.mark.parametrize("lie", [scaled(1e6), scaled(3e38), scaled(-1e6), largest])
def test_a_scaled_change_moves_the_state_by_a_share_of_what_it_would(lie):
    honest = run(lambda x: x)
    lied = run(lie)
    assert [r.scaled for r in lied.rounds] == [1] * 4
    assert [r.scaled for r in honest.rounds] == [0] * 4
    assert distance(lied, honest) < 2
    assert ",1\r\n" in rounds_csv([lied]) or ",1\n" in rounds_csv([lied])


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold"])
def test_a_change_that_is_not_finite_is_left_out(algorithm):
    """A cloud refuses it on arrival."""

    def spoil(contribution):
        change = {n: np.full_like(x, np.nan) for n, x in contribution.change.items()}
        return replace(contribution, change=change)

    made = given.study(algorithm, rounds=3)
    lied = simulate(given.module(), given.shards(), made, server=LyingServer({"device-1"}, spoil))
    assert [r.scaled for r in lied.rounds] == [1] * 3
    assert all(np.isfinite(x).all() for x in lied.state.values())


@pytest.mark.long
def test_a_claim_of_examples_counts_three_medians_at_most():
    alone = simulate(
        given.module(), {"device-1": given.shards()["device-1"]}, given.study(rounds=1)
    )
    unlimited = run(boasting, robustness=UNLIMITED, total=1)
    assert distance(unlimited, alone) < 1e-6, "without a cap, one device decides the mean"
    assert distance(run(boasting, total=1), alone) > 1e-3


@pytest.mark.long
@pytest.mark.parametrize("devices", [1, 2, 6])
def test_an_honest_study_of_different_devices_does_not_return(devices):
    of, shards = given.least_squares(24)
    made = Study(algorithm="fedavg", rounds=60, devices=devices, steps=6, batch_size=40)
    trial = simulate(of, shards, made)
    assert not any(r.returned for r in trial.rounds)


LAST = 3 + PATIENCE


def test_a_spoilt_study_returns_and_learns_on():
    trial = simulate_spoilt(9)
    assert [bool(r.returned) for r in trial.rounds] == [False] * (LAST - 1) + [True] + [False] * 3
    assert "returned to the last good state" in trial.rounds[LAST - 1].returned
    losses = [r.loss for r in trial.rounds]
    assert max(losses[LAST:]) < 2 < min(losses[3:LAST])


@pytest.mark.parametrize("rounds", [4, 5])
def test_a_study_that_was_spoilt_shortly_before_its_end_returns(rounds):
    """The change of round 3 is bad in fewer rounds than elsewhere make a study return."""
    trial, honest = simulate_spoilt(rounds), simulate_spoilt(2)
    assert [bool(r.returned) for r in trial.rounds] == [False] * (rounds - 1) + [True]
    assert given.bits(trial)[3] == given.bits(honest)[3], "what round 3 began from"


def simulate_spoilt(rounds, folder=None, algorithm="fedavg", on_round=None):
    made = given.study(algorithm, robustness=OFF, rounds=rounds)
    server = LyingServer({"device-1"}, scaled(1e4), {3})
    return simulate(
        given.module(), given.shards(), made, server=server, folder=folder, on_round=on_round
    )


class Killed(Exception):
    pass


def killed_in(number):
    def on_round(row):
        if row.number == number:
            raise Killed

    return on_round


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["fedavg", "fedavgm", "scaffold"])
def test_a_study_that_was_killed_anywhere_returns_to_the_same_bits(tmp_path, algorithm):
    whole = simulate_spoilt(9, algorithm=algorithm)
    for number in range(1, 10):
        with pytest.raises(Killed):
            simulate_spoilt(9, tmp_path, algorithm, killed_in(number))
    parts = simulate_spoilt(9, tmp_path, algorithm)
    assert [r.returned for r in parts.rounds] == [r.returned for r in whole.rounds]
    assert given.bits(parts)[3] == given.bits(whole)[3]


@pytest.mark.long
def test_a_study_that_is_spoilt_again_and_again_stops_with_the_reason():
    made = given.study(robustness=replace(OFF, returns=1), rounds=30)
    server = LyingServer({"device-1"}, scaled(1e4), set(range(3, 30)))
    with pytest.raises(InvalidInput, match=r"in round \d+, the loss .* it had returned 1 times"):
        simulate(given.module(), given.shards(), made, server=server)


def test_a_study_that_may_not_return_does_not():
    server = LyingServer({"device-1"}, scaled(1e4), {3})
    made = given.study(robustness=replace(OFF, returns=0), rounds=9)
    trial = simulate(given.module(), given.shards(), made, server=server)
    assert not any(r.returned for r in trial.rounds)


def test_progress_with_other_limits_is_of_another_study(tmp_path):
    simulate(given.module(), given.shards(), given.study(rounds=1), folder=tmp_path)
    with pytest.raises(Conflict, match="limits differs"):
        simulate(given.module(), given.shards(), given.study(robustness=OFF), folder=tmp_path)


def test_a_study_with_too_few_devices_for_its_aggregator_does_not_begin():
    krum = Robustness(aggregator="krum")
    with pytest.raises(InvalidInput, match="krum with byzantine 1 needs at least 5 updates"):
        simulate(given.module(), given.shards(), given.study(robustness=krum))
    simulate(given.module(), given.shards(5), given.study(robustness=krum, rounds=1))


@pytest.mark.long
@pytest.mark.parametrize("name", ["median", "trimmed-mean", "multi-krum", "bucketing+median"])
def test_a_study_with_an_aggregator_resumes_to_the_same_bits(tmp_path, name):
    shards, limits = given.shards(9), Robustness(aggregator=name)
    whole = simulate(given.module(), shards, given.study(robustness=limits, rounds=3))
    for rounds in (1, 2, 3):
        made = given.study(robustness=limits, rounds=rounds)
        parts = simulate(given.module(), shards, made, folder=tmp_path)
    assert given.bits(parts)[3] == given.bits(whole)[3]
