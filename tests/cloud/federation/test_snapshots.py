"""How often a run that goes on keeps itself."""

import asyncio

import pytest
from tests.cloud.federation.given import (
    devices_of,
    ended,
    living,
    make_home,
    registered,
    start_request,
)

from triplane.cloud.federation import journal, live
from triplane.cloud.server import running
from triplane.proto import federation_pb2 as pb

DEADLINE_S = 60.0
APART = 4


@pytest.mark.slow
def test_snapshots_are_so_many_events_apart_and_the_last_is_of_the_end(tmp_path, monkeypatch):
    """One a round would cost more with each round: a snapshot holds the whole history."""
    kept = []
    snapshot = journal.snapshot

    def noted(connection, run, projection):
        kept.append(projection.revision)
        snapshot(connection, run, projection)

    monkeypatch.setattr(live, "SNAPSHOT_EVENTS", APART)
    monkeypatch.setattr(journal, "snapshot", noted)

    async def story():
        async with asyncio.timeout(DEADLINE_S), running(make_home(tmp_path)) as cloud:
            await registered(cloud, tmp_path)
            async with living(await devices_of(cloud, tmp_path, ("ann", "bob"))):
                request = start_request(rounds=5)
                made = await cloud.federation.begin(request, by="operator")
                return await ended(cloud, made.id)

    run = asyncio.run(story())
    assert run.phase == pb.Run.DONE, run.reason
    *others, last = kept
    assert last == run.revision
    assert len(others) >= 2
    assert all(b - a >= APART for a, b in zip([0, *others], others, strict=False))
