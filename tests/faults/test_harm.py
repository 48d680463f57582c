"""Federated runs whose processes stand still, whose files are damaged, whose cloud is restored.

Devices carry the remainder of a compressed update from round to round, so that they have files
that matter. Whatever happens, a run ends with all its rounds, and nothing is refused but what a
restored cloud cannot know.
"""

import asyncio
import random
from collections import Counter

import pytest
from tests.faults.harm import FAULTS, check_harmed, check_restored
from tests.faults.lab import Lab, Tally
from tests.faults.nursery import Nursery

RESTORES = 2

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.fixture
def lab(tmp_path):
    with Nursery() as nursery:
        made = Lab(tmp_path, nursery)
        asyncio.run(made.furnish())
        with made.started():
            yield made


def test_runs_end_though_processes_stand_still_and_files_of_devices_are_damaged(lab):
    tally = Tally()
    harm: Counter[str] = Counter()
    check_harmed(lab, FAULTS, random.Random(7), tally, harm)
    assert any("held" in name for name in harm)
    assert any(name.startswith("file of a device") for name in harm), harm


def test_a_run_goes_on_from_a_restored_backup_and_is_the_replay_of_what_counted(lab):
    check_restored(lab, RESTORES, random.Random(8), Tally())
