"""Budgets: when a run stops, what repeats and crashes change, and hostile stored bytes."""

import json
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triplane.proto.errors import Conflict, InvalidInput
from triplane.unified_ir.federated.privacy import secret
from triplane.unified_ir.federated.privacy.accountant import (
    CONCENTRATED,
    NoiseEvent,
    Spending,
    spending,
)
from triplane.unified_ir.federated.privacy.budget import (
    DeviceBudget,
    RunBudget,
    RunCharges,
    run_budget,
)
from triplane.unified_ir.federated.privacy.central import central_noise


def through_json(budget):
    return type(budget).from_json(json.loads(json.dumps(budget.to_json())))


def test_a_run_stops_after_the_rounds_that_it_was_sized_for():
    budget = run_budget(4.0, 1e-5, 57)
    for round_ in range(1, 58):
        assert budget.fits()
        budget = through_json(budget.charge(round_))
        assert budget.spent <= 4.0
    assert not budget.fits()
    with pytest.raises(Conflict, match=r"round 58 would spend epsilon 4\.\d+ .* above the run's 4"):
        budget.charge(58)
    assert budget.spent == pytest.approx(
        spending([NoiseEvent(budget.noise_multiplier, 57)]).epsilon(1e-5), rel=1e-9
    )


def test_separation_charges_the_most_used_device():
    budget = run_budget(2.0, 1e-6, 200, separation=10)
    assert [budget.uses(rounds) for rounds in (0, 1, 10, 11, 200)] == [0, 1, 1, 2, 20]
    spent = []
    for round_ in range(1, 201):
        budget = budget.charge(round_)
        spent.append(budget.spent)
    assert len(set(spent)) == 20
    assert spent[-1] <= 2.0
    assert not budget.fits()


def test_a_bound_on_uses_ends_the_spending():
    budget = run_budget(2.0, 1e-6, 500, most_uses=20)
    assert budget.noise_multiplier == run_budget(2.0, 1e-6, 20).noise_multiplier
    for round_ in range(1, 501):
        budget = budget.charge(round_)
    assert budget.spent <= 2.0
    assert budget.fits()


def test_a_repeated_charge_changes_nothing_and_none_is_left_out():
    budget = run_budget(2.0, 1e-6, 10).charge(1).charge(2)
    assert budget.charge(1) is budget
    assert budget.charge(2) is budget
    with pytest.raises(InvalidInput, match="charged in order: 2 are charged, got round 4"):
        budget.charge(4)


def test_a_device_declines_before_its_budget_is_passed():
    event = NoiseEvent(5.0)
    device, used = DeviceBudget(3.0, 1e-6), 0
    while device.fits(event):
        run, round_ = f"run {used % 3}", used + 1
        device, used = through_json(device.charge(run, round_, event)), used + 1
    assert used > 5
    assert device.spent <= 3.0 < spending([NoiseEvent(5.0, used + 1)]).epsilon(1e-6)
    assert device.spent == pytest.approx(spending([NoiseEvent(5.0, used)]).epsilon(1e-6), rel=1e-9)
    with pytest.raises(Conflict, match="above this device's 3"):
        device.charge("run 9", 1, event)


def test_a_repeated_charge_of_a_device_changes_nothing():
    event = NoiseEvent(5.0)
    device = DeviceBudget(3.0, 1e-6).charge("a", 4, event)
    assert device.charge("a", 4, event) is device
    assert device.charge("b", 4, event).spent > device.spent


def test_another_lease_of_a_round_is_charged_again():
    """The cloud gave the round up, or goes on from a backup: two sums may have been published."""
    event = NoiseEvent(5.0, separation=3)
    device = DeviceBudget(3.0, 1e-6).charge("a", 4, event, "one")
    assert device.charge("a", 4, event, "one") is device
    for round_ in (4, 2):
        again = through_json(device.charge("a", round_, event, "two"))
        assert again.spent == pytest.approx(spending([NoiseEvent(5.0, 2)]).epsilon(1e-6))
        assert (again.runs["a"].round, again.runs["a"].lease) == (round_, "two")
        assert again.charge("a", round_, event, "two") is again


@given(st.integers(1, 60), st.integers(1, 9), st.floats(0.3, 20))
def test_the_rounds_that_fit_are_those_that_can_be_charged(limit, separation, multiplier):
    budget = RunBudget(2.0, 1e-5, multiplier, separation=separation)
    fitting = budget.most_rounds(limit)
    for round_ in range(1, fitting + 1):
        budget = budget.charge(round_)
    assert fitting <= limit
    assert budget.spent <= 2.0
    assert fitting == limit or not budget.fits()


def test_a_device_rests_between_uses_of_correlated_noise():
    """Two uses that are nearer cost more than two events, because they meet the same noise."""
    noise = central_noise(5.0, norm=1.0, entries=3, bands=3)
    device = DeviceBudget(3.0, 1e-6).charge("a", 4, noise.event())
    for round_ in (5, 6):
        with pytest.raises(Conflict, match=rf"round {round_} .* in round 4, rests until round 7"):
            device.charge("a", round_, noise.event())
    assert device.charge("a", 4, noise.event()) is device
    assert device.charge("b", 5, noise.event()).spent > device.spent
    twice = through_json(device.charge("a", 7, noise.event()))
    assert twice.spent == pytest.approx(spending([noise.event(2)]).epsilon(1e-6), rel=1e-12)


@pytest.mark.parametrize("separation", [0, -1, 1.5, True, 10**7])
def test_impossible_separations_are_refused(separation):
    with pytest.raises(InvalidInput, match="separation"):
        NoiseEvent(1.0, separation=separation)


def test_runs_with_different_noise_compose():
    device = DeviceBudget(50.0, 1e-6)
    for round_ in range(1, 6):
        device = device.charge("a", round_, NoiseEvent(2.0))
        device = device.charge("b", round_, NoiseEvent(3.0))
    expected = spending([NoiseEvent(2.0, 5), NoiseEvent(3.0, 5)]).epsilon(1e-6)
    assert device.spent == pytest.approx(expected, rel=1e-9)


def test_discrete_noise_costs_a_little_more_and_composes_with_gaussian_noise():
    exact, bounded = run_budget(4.0, 1e-5, 57), run_budget(4.0, 1e-5, 57, law=CONCENTRATED)
    assert exact.noise_multiplier < bounded.noise_multiplier < 1.15 * exact.noise_multiplier
    device = DeviceBudget(50.0, 1e-6).charge("a", 1, NoiseEvent(2.0))
    device = device.charge("b", 1, NoiseEvent(2.0, 3, CONCENTRATED))
    assert device.spent == pytest.approx(spending([NoiseEvent(2.0, 4, CONCENTRATED)]).epsilon(1e-6))
    assert through_json(device) == device


def test_a_budget_is_a_value():
    device = DeviceBudget(3.0, 1e-6, {"a": RunCharges(Spending(0.1, 0.2), 2)})
    with pytest.raises(TypeError):
        device.runs["a"] = RunCharges(Spending(), 0)  # type: ignore[index]
    assert through_json(device) == device
    assert through_json(run_budget(2.0, 1e-6, 10)) == run_budget(2.0, 1e-6, 10)


class Crash(Exception):
    """The process ends here."""


class Ledger:
    """A run that keeps its budget and noise in a store, and ends at any of its steps."""

    def __init__(self, budget):
        self.stored = json.dumps([budget.to_json(), None])
        self.released = {}

    def work(self, rounds, crashing):
        document, noise = json.loads(self.stored)
        budget = RunBudget.from_json(document)
        while len(self.released) < rounds and (budget.fits() or noise is not None):
            if noise is None:
                crashing()
                noise = secret.rounded_gaussian(1, 2.0**25).tolist()
                budget = budget.charge(budget.rounds + 1)
                crashing()
                self.stored = json.dumps([budget.to_json(), noise])
            crashing()
            self.released.setdefault(budget.rounds, []).append(noise)
            crashing()
            noise = None
            self.stored = json.dumps([budget.to_json(), noise])
            crashing()


@pytest.mark.parametrize("seed", range(50))
def test_a_run_that_is_killed_anywhere_releases_what_it_charged_and_no_more(seed):
    dice = random.Random(seed)

    def crashing():
        if dice.random() < 0.15:
            raise Crash

    budget = run_budget(3.0, 1e-5, 40, separation=4)
    ledger = Ledger(budget)
    kills = 0
    while True:
        try:
            ledger.work(1000, crashing)
            break
        except Crash:
            kills += 1
    charged = RunBudget.from_json(json.loads(ledger.stored)[0])
    assert kills > 5
    assert sorted(ledger.released) == list(range(1, charged.rounds + 1))
    # After a kill a round may be released again, with the same noise only.
    assert all(noise == noises[0] for noises in ledger.released.values() for noise in noises)
    assert charged.rounds == 40
    assert charged.spent <= 3.0 < replace(charged, rounds=41).spent


CHARGE = {"gaussian": 0.1, "concentrated": 0.0, "round": 1}
RUN = run_budget(2.0, 1e-6, 10).to_json()
DEVICE = DeviceBudget(3.0, 1e-6, {"a": RunCharges(Spending(0.1, 0.2), 2)}).to_json()


@pytest.mark.parametrize(
    "change",
    [
        {"epsilon": 0},
        {"epsilon": math.nan},
        {"epsilon": "4"},
        {"epsilon": True},
        {"delta": 1},
        {"noise_multiplier": 0},
        {"law": "laplace"},
        {"law": []},
        {"noise_multiplier": 10**400},
        {"separation": 0},
        {"separation": 1.0},
        {"most_uses": -1},
        {"rounds": -1},
        {"rounds": True},
        {"rounds": 10**30},
        {"more": 1},
    ],
)
def test_damaged_budgets_of_runs_are_refused(change):
    with pytest.raises(InvalidInput):
        RunBudget.from_json(RUN | change)


@pytest.mark.parametrize(
    "change",
    [
        {"runs": []},
        {"runs": {"": CHARGE}},
        {"runs": {"a" * 201: CHARGE}},
        {"runs": {"a": CHARGE | {"gaussian": -0.1}}},
        {"runs": {"a": CHARGE | {"concentrated": math.inf}}},
        {"runs": {"a": CHARGE | {"gaussian": 1e308}, "b": CHARGE | {"gaussian": 1e308}}},
        {"runs": {"a": CHARGE | {"round": 0}}},
        {"runs": {"a": {"round": 1}}},
        {"runs": {"a": 3}},
        {"delta": None},
    ],
)
def test_damaged_budgets_of_devices_are_refused(change):
    with pytest.raises(InvalidInput):
        DeviceBudget.from_json(DEVICE | change)


@pytest.mark.parametrize("document", [None, [], "x", {}, {1: 2}])
def test_other_documents_are_refused(document):
    for kind in (RunBudget, DeviceBudget):
        with pytest.raises(InvalidInput, match="a stored budget is an object of"):
            kind.from_json(document)
