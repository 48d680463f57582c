"""What one device can write into a run's journal, however much it says: bounded by constants."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from typing import Any

import grpc
import grpc.aio
import pytest
from tests.cloud.federation.given import (
    POPULATION,
    devices_of,
    living,
    make_home,
    registered,
    start_request,
)
from tests.cloud.federation.given import (
    until_members as until,
)

from triplane.cloud.federation import journal
from triplane.cloud.federation.presence import BURST
from triplane.cloud.identity.auth_interceptor import OPEN_BURST
from triplane.cloud.server import running
from triplane.proto import session_pb2
from triplane.proto.channels import connect_aio
from triplane.proto.session_pb2_grpc import SessionStub

pytestmark = pytest.mark.slow

DEADLINE_S = 90.0
TOGETHER = 100
"""Messages on their way at once."""


async def silent(_device, _task):
    """Takes its work and is silent."""


async def sent(device, messages):
    for at in range(0, len(messages), TOGETHER):
        await asyncio.gather(*(device.client.send(m) for m in messages[at : at + TOGETHER]))


async def journaled(cloud, run_id):
    """Events by kind, once all that was said is committed."""
    live = cloud.federation.live.get(run_id)
    await live.put(lambda _, __: None)
    found = await cloud.federation._db.read(lambda c: journal.events(c, run_id))
    assert live.projection.revision == len(found)
    return Counter(type(event).__name__ for event in found)


async def flooded(folder, flood, **fields):
    """The journal after a flood of mallory's, in whose run ann is silent."""
    async with asyncio.timeout(DEADLINE_S), running(make_home(folder)) as cloud:
        await registered(cloud, folder)
        ann, mallory = await devices_of(cloud, folder, ("ann", "mallory"))
        ann.act = silent
        async with living([ann, mallory]):
            request = start_request(rounds=1, cohort={"deadline_s": 600.0}, **fields)
            run = await cloud.federation.begin(request, by="operator")
            await flood(mallory)
            counts = await journaled(cloud, run.id)
            newest = await cloud.federation.run(run.id)
            return counts, {m.device: m for m in newest.members}, newest


async def counted(device):
    """Its first contribution, once it was counted."""
    await device.until(lambda work: any(s.counted for s in work.settled))
    return device.kept[0]


def test_contribution_said_again_is_answered_and_not_journaled(tmp_path):
    async def again(device):
        kept = await counted(device)
        heard = len(device.heard)
        await sent(device, [kept.told] * 3 * TOGETHER)
        await device.until(lambda _: len(device.heard) > heard)

    counts, members, _ = asyncio.run(flooded(tmp_path, again))
    assert counts["Arrived"] == 1
    assert members["mallory"].counted == 1


def test_offers_that_say_the_same_are_not_journaled(tmp_path):
    async def again(device):
        await counted(device)
        await sent(device, [device.offer()] * 3 * TOGETHER)

    counts, _, _ = asyncio.run(flooded(tmp_path, again))
    assert counts["Joined"] == 2
    assert counts["Left"] == 0


def test_offers_that_change_all_the_time_are_journaled_at_a_pace(tmp_path):
    def offers(device):
        for k in range(5 * TOGETHER):
            offer = device.offer()
            offer.population = POPULATION if k % 2 else "others"
            yield offer
        for k in range(5 * TOGETHER):
            offer = device.offer()
            offer.examples += k % 7
            yield offer

    async def change(device):
        await counted(device)
        await sent(device, list(offers(device)))

    counts, _, _ = asyncio.run(flooded(tmp_path, change))
    assert 2 <= counts["Joined"] + counts["Left"] <= BURST + 30


async def meeting(folder, meet):
    """What comes of a run in which ann is a member and silent, and mallory may be."""
    async with asyncio.timeout(DEADLINE_S), running(make_home(folder)) as cloud:
        await registered(cloud, folder)
        ann, mallory = await devices_of(cloud, folder, ("ann", "mallory"))
        ann.act = mallory.act = silent
        async with living([ann]):
            request = start_request(rounds=1, cohort={"deadline_s": 600.0})
            run = await cloud.federation.begin(request, by="operator")
            await until(cloud, run, lambda members: "ann" in members)
            return await meet(cloud, run, mallory)


def examples_in(members):
    """Of mallory; None before it is a member."""
    return members["mallory"].examples if "mallory" in members else None


def test_newest_offer_holds_after_a_flood_of_them(tmp_path, monkeypatch):
    monkeypatch.setattr("triplane.cloud.federation.presence.BURST", 4)
    monkeypatch.setattr("triplane.cloud.federation.presence.EVERY_S", 0.2)

    async def change(cloud, run, mallory):
        async with living([mallory]):
            offers = [mallory.offer() for _ in range(2 * TOGETHER)]
            for k, offer in enumerate(offers, 1):
                offer.examples += k
            await sent(mallory, offers)
            last = offers[-1].examples
            await until(cloud, run, lambda members: examples_in(members) == last)

    asyncio.run(meeting(tmp_path, change))


def test_device_that_comes_and_goes_all_the_time_ends_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr("triplane.cloud.federation.presence.BURST", 4)
    monkeypatch.setattr("triplane.cloud.federation.presence.EVERY_S", 0.2)

    async def come_and_go(cloud, run, mallory):
        async def once():
            async with living([mallory]):
                await mallory.client.send(mallory.offer())

        await once()
        await until(cloud, run, lambda members: "mallory" in members)
        for _ in range(8):
            await once()
        await until(cloud, run, lambda members: not members["mallory"].connected)
        async with living([mallory]):
            await until(cloud, run, lambda members: members["mallory"].connected)
        return await journaled(cloud, run.id)

    assert asyncio.run(meeting(tmp_path, come_and_go))["Left"] >= 1


SESSIONS = 200


async def answers_of(device):
    """What each of so many streams on one certificate is told; nothing where it is welcomed."""
    channel = connect_aio(device.identity)
    try:
        hello = session_pb2.Hello(epoch=bytes(16), software="flood")

        async def opened():
            call = SessionStub(channel).Open()
            try:
                await call.write(session_pb2.Frame(hello=hello))
                frame: Any = await call.read()
            except grpc.aio.AioRpcError as error:
                return error.details()
            finally:
                call.cancel()
            return "" if frame.WhichOneof("body") == "welcome" else "goodbye"

        return [await opened() for _ in range(SESSIONS)]
    finally:
        await channel.close()


def test_sessions_of_one_certificate_open_at_a_pace(tmp_path):
    async def story():
        async with asyncio.timeout(DEADLINE_S), running(make_home(tmp_path)) as cloud:
            ann, mallory = await devices_of(cloud, tmp_path, ("ann", "mallory"))
            answers = await answers_of(mallory)
            async with living([ann]):
                await ann.client.send(ann.offer())
            return answers

    answers = asyncio.run(story())
    refused = [text for text in answers if "opened" in text]
    assert len(refused) >= SESSIONS - OPEN_BURST - 10
    assert re.search(r"'mallory' opened \d+ sessions .*try again", refused[0])
