"""A lease whose base is not the present state of its run, as a stored run may have it."""

import asyncio
import contextlib
from dataclasses import replace

import pytest
from tests.cloud.federation.given import (
    POPULATION,
    ended,
    enrolled,
    living,
    make_home,
    registered,
)
from tests.cloud.federation.masked import MaskedDevice, masked_request
from tests.faults.spool_power import NAMES, RUN, Given, sha256
from tests.support.deadlines import within

from triplane.cloud.federation import journal
from triplane.cloud.federation.federation import Federation
from triplane.cloud.federation.run_projection import follow
from triplane.cloud.registry.conversions import Conversions
from triplane.cloud.registry.registry import Registry
from triplane.cloud.server import running
from triplane.cloud.store import Database
from triplane.proto import federation_pb2 as pb
from triplane.proto.blobs import BlobFolder
from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.core import run as core
from triplane.unified_ir.federated.core.lease_base import LeaseBase
from triplane.unified_ir.federated.core.lease_changes import lease_of, put_lease

OTHER, VERSION = b"another state", 7
NOW_S = 3.0
"""Before the deadline of the round that began at second 2."""


def stored(given, url):
    """A run in its first round, in which ann learns from another state than bob."""
    projection, events = journal.first_projection(given.entry()), []
    for name in NAMES:
        events.append(core.Joined(at_s=2.0, device=name, examples=10))
        projection, _ = follow(projection, events[-1])
    lease = lease_of(projection.state, "ann")
    assert lease is not None
    base = LeaseBase(version=VERSION, state=sha256(OTHER).hex())
    state = put_lease(projection.state, replace(lease, base=base))

    def write(connection):
        journal.append(connection, RUN, events, len(events))
        journal.snapshot(connection, RUN, replace(projection, state=state))

    with contextlib.closing(Database.open(url)) as database:
        database.write_now(write)


async def greeted(federation):
    await federation.start()
    for name in NAMES:
        federation.devices.greeting(name)
        offer = pb.Offer(population=POPULATION, examples=10, software="test")
        await federation.devices.take(name, offer)
    while not all(m.connected for m in (await federation.run(RUN)).members):
        await federation.moved.wait()


@pytest.mark.long
def test_a_device_gets_and_reads_the_base_of_its_own_lease(tmp_path):
    (tmp_path / "given").mkdir()
    given = Given.make(tmp_path / "given")
    story = given.begin(tmp_path, tmp_path / "story")
    (tmp_path / "blobs" / sha256(OTHER).hex()).write_bytes(OTHER)
    stored(given, story.url)

    async def life(database):
        blobs = BlobFolder(tmp_path / "blobs")
        registry = Registry(database, blobs, Conversions(tmp_path / "conversions"))
        folder = tmp_path / "federation"
        federation = Federation(database, blobs, registry, folder, clock=lambda: NOW_S)
        try:
            await greeted(federation)
            devices, run = federation.devices, await federation.run(RUN)
            tasks = [devices.work_of(name).tasks[0] for name in NAMES]
            devices.check_readable("ann", sha256(OTHER))
            devices.check_readable("bob", sha256(given.state))
            for name, content in (("ann", given.state), ("bob", OTHER)):
                with pytest.raises(InvalidInput, match="of its open tasks only"):
                    devices.check_readable(name, sha256(content))
            return tasks, {m.device: m.base for m in run.members}
        finally:
            await federation.stop()

    with contextlib.closing(Database.open(story.url)) as database:
        (ann, bob), bases = asyncio.run(life(database))
        assert sha256(OTHER) in database.read_now(journal.referenced)
    assert (ann.state.sha256, ann.inline_state, ann.base) == (sha256(OTHER), OTHER, VERSION)
    assert (bob.state.sha256, bob.inline_state, bob.base) == (sha256(given.state), given.state, 0)
    assert bases == {"ann": VERSION, "bob": 0}


@pytest.mark.long
@pytest.mark.slow
def test_an_answer_of_a_masked_round_to_another_base_is_refused(tmp_path):
    """The others go on without its device, which answered the step before rightly."""

    def twist(_device, task, step, sent):
        assert task.base == task.round - 1
        sent.base = task.base + (step == "share")
        return sent

    async def story():
        async with running(make_home(tmp_path)) as cloud:
            await registered(cloud, tmp_path)
            plain = [await enrolled(cloud, tmp_path, f"d{n}", n) for n in range(5)]
            devices = [MaskedDevice(d.identity, d.shard, d.folder) for d in plain]
            devices[0].twist = twist
            async with living(devices):
                request = masked_request(5, lost_share=0.2, rounds=1, cohort={"quorum": 0.8})
                made = await cloud.federation.begin(request, by="operator")
                return await ended(cloud, made.id)

    run = within(story())
    assert run.phase == pb.Run.DONE, run.reason
    ((refusal),) = run.refusals.reasons
    assert (refusal.kind, refusal.count) == ("base", 1)
    assert "the lease learns from state 0 of the run, the contribution from state 1" in (
        refusal.newest
    )
    assert run.rounds[0].counted == 4
