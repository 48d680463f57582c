"""What a change of a device's presence costs the device: one of its changes, whatever it takes."""

from __future__ import annotations

import asyncio

import pytest
from tests.cloud.federation.given import devices_of, living, make_home, registered, start_request
from tests.cloud.federation.given import until_members as until

from triplane.cloud.server import running
from triplane.proto.errors import Unavailable

pytestmark = pytest.mark.slow

DEADLINE_S = 90.0
TRIES = 20
RUNS = 3


async def silent(_device, _task):
    """Takes its work and is silent."""


async def begun(cloud):
    return await cloud.federation.begin(
        start_request(rounds=1, cohort={"deadline_s": 600.0}), by="operator"
    )


async def meeting(folder, n_runs, meet):
    """What comes of so many runs in which ann is a member and silent, and mallory may be."""
    async with asyncio.timeout(DEADLINE_S), running(make_home(folder)) as cloud:
        await registered(cloud, folder)
        ann, mallory = await devices_of(cloud, folder, ("ann", "mallory"))
        ann.act = mallory.act = silent
        async with living([ann]):
            runs = [await begun(cloud) for _ in range(n_runs)]
            for run in runs:
                await until(cloud, run, lambda members: "ann" in members)
            return await meet(cloud, runs, mallory)


def spent(cloud, name):
    return cloud.federation.devices._presence._paces[name].spent


def test_change_that_is_tried_again_is_spent_once(tmp_path, monkeypatch):
    monkeypatch.setattr("triplane.cloud.federation.live.RETRY_S", 0.01)

    async def outage(cloud, runs, mallory):
        tries, enough = 0, asyncio.Event()

        async def away(_work):
            nonlocal tries
            tries += 1
            if tries >= TRIES:
                enough.set()
            raise Unavailable("the database is away")

        async with living([mallory]):
            await until(cloud, runs[0], lambda members: "mallory" in members)
            offer = mallory.offer()
            offer.examples += 1
            with monkeypatch.context() as patched:
                patched.setattr(cloud.federation._db, "write", away)
                await mallory.client.send(offer)
                await enough.wait()
            await until(
                cloud, runs[0], lambda members: members["mallory"].examples == offer.examples
            )
            return spent(cloud, "mallory")

    assert asyncio.run(meeting(tmp_path, 1, outage)) <= 2.0


def test_change_that_many_runs_write_down_is_spent_once(tmp_path):
    async def join(cloud, runs, mallory):
        async with living([mallory]):
            for run in runs:
                await until(cloud, run, lambda members: "mallory" in members)
            return spent(cloud, "mallory")

    assert asyncio.run(meeting(tmp_path, RUNS, join)) <= 1.0


@pytest.mark.long
def test_beginning_of_a_run_spends_nothing_of_a_device(tmp_path):
    async def begin_more(cloud, runs, mallory):
        async with living([mallory]):
            await until(cloud, runs[0], lambda members: "mallory" in members)
            for _ in range(RUNS):
                more = await begun(cloud)
                await until(cloud, more, lambda members: "mallory" in members)
            return spent(cloud, "mallory")

    assert asyncio.run(meeting(tmp_path, 1, begin_more)) <= 1.0
