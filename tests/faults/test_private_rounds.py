"""Private runs under kill -9: budgets stay exact, and no noise meets two sums."""

import asyncio
import os
import random

import pytest
from tests.faults.lab import Lab, Tally
from tests.faults.nursery import Nursery
from tests.faults.private_rounds import check_cloud_alone, check_everybody, check_masked

KILLS = int(os.environ.get("TRIPLANE_PRIVATE_KILLS", "50"))


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    with Nursery() as nursery:
        made = Lab(tmp_path_factory.mktemp("lab"), nursery)
        asyncio.run(made.furnish())
        with made.started():
            yield made


@pytest.mark.slow
@pytest.mark.long
def test_a_cloud_killed_at_any_instant_charges_every_round_once(lab):
    tally = Tally()
    check_cloud_alone(lab, 8, random.Random(11), tally)
    assert tally.killed >= 8


@pytest.mark.slow
@pytest.mark.long
def test_devices_killed_with_their_cloud_charge_every_update_that_arrives(lab):
    tally = Tally()
    check_everybody(lab, 8, random.Random(12), tally)
    assert tally.killed >= 8


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("devices_die", [False, True], ids=["the cloud", "anybody"])
def test_devices_with_noise_of_their_own_are_charged_whoever_is_killed(lab, devices_die):
    tally = Tally()
    check_masked(lab, 6, random.Random(15), tally, devices_die=devices_die)
    assert tally.killed >= 6


@pytest.mark.deep
@pytest.mark.parametrize("devices_die", [False, True], ids=["the cloud", "anybody"])
def test_accounts_of_masked_noise_are_exact_over_fifty_kills(lab, devices_die):
    tally = Tally()
    check_masked(lab, KILLS, random.Random(16), tally, devices_die=devices_die)
    assert tally.killed >= KILLS


@pytest.mark.deep
def test_budgets_are_exact_over_fifty_kills(lab):
    alone, everybody = Tally(), Tally()
    check_cloud_alone(lab, KILLS, random.Random(13), alone)
    check_everybody(lab, KILLS, random.Random(14), everybody)
    assert min(alone.killed, everybody.killed) >= KILLS
