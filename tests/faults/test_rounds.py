"""Federated runs whose cloud and devices are killed at random and journaled instants, for real.

Where every device reports, the model must be the undisturbed run's, bit for bit. Where devices are
killed too, rounds go on without some of them, and every state must follow from what was counted.
"""

import asyncio
import random

import pytest
from tests.faults.lab import Lab, Tally, instant, rejoined_s, strike
from tests.faults.masked_rounds import KILLS as KILLS_OF_MASKED
from tests.faults.masked_rounds import check_masked
from tests.faults.nursery import Nursery
from tests.faults.rounds import (
    DEADLINE_S,
    KILLS_OF_ALL,
    KILLS_OF_CLOUD,
    ROUGH,
    check_exact,
    check_replays,
)

from triplane.proto import federation_pb2 as pb

REJOIN_S = 5.0

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    with Nursery() as nursery:
        made = Lab(tmp_path_factory.mktemp("lab"), nursery)
        asyncio.run(made.furnish())
        with made.started():
            yield made


def test_a_cloud_killed_at_any_instant_ends_with_the_same_model(lab):
    tally = Tally()
    check_exact(lab, KILLS_OF_CLOUD, random.Random(4), tally)
    assert tally.killed >= KILLS_OF_CLOUD
    assert tally.instants["journaled"] > KILLS_OF_CLOUD // 4, tally


def test_a_run_whose_devices_and_cloud_are_killed_is_the_replay_of_what_counted(lab):
    tally = Tally()
    check_replays(lab, KILLS_OF_ALL, random.Random(5), tally)
    assert KILLS_OF_CLOUD + tally.killed >= 50
    assert tally.at_once > 1


def test_a_masked_run_goes_on_in_the_same_round_after_kills_of_the_cloud(lab):
    tally = Tally()
    check_masked(lab, KILLS_OF_MASKED, random.Random(7), tally)
    assert tally.killed >= KILLS_OF_MASKED
    assert tally.after["Masked"] + tally.after["Exchanged"] > 0, tally


def test_a_killed_device_has_its_lease_again_at_once(lab):
    """Started by its command, as after a power cut: measured to the journaled event."""
    fields = ROUGH | {"rounds": 20, "cohort": {"devices": 1, "quorum": 1.0, "patience_s": 60.0}}
    rng, tally = random.Random(6), Tally()

    async def story():
        async with asyncio.timeout(DEADLINE_S):
            run_id = await lab.begin(**fields)
            for _ in range(2):
                assert await asyncio.to_thread(instant, lab, run_id, rng, tally)
                await strike({"dora": dora}, tally)
            return await lab.ended(run_id)

    dora = lab.cold().device("dora")
    try:
        run = asyncio.run(story())
    finally:
        dora.stop()
    assert run.phase == pb.Run.DONE, run.reason
    assert all((r.counted, r.lost) == (1, 0) for r in run.rounds)
    _, _, events = lab.journaled(run.id)
    found = rejoined_s(tally, events)
    assert found, "the last start is timed, the first where the second kill left it the time"
    assert max(found) < REJOIN_S
