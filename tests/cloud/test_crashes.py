"""kill -9 of the real cloud process while a rollout runs: what was answered is there after it.

Nodes speak the real protocol with real certificates and live through every kill. The instants are
random within the life of a rollout; a seed in the failure message repeats a story's draws.
"""

import asyncio
import json
import os
import random
import signal
import sys
import time
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from tests.cloud.nodes import TestNode, living
from tests.cloud.released import copied, make_released

from triplane.proto import fleet_pb2 as pb
from triplane.proto import identity_pb2
from triplane.proto.channels import connect_aio
from triplane.proto.fleet_pb2_grpc import FleetStub
from triplane.proto.identity import IdentityFolder, enrol
from triplane.proto.identity_pb2_grpc import IdentityStub

KILLS = int(os.environ.get("TRIPLANE_KILLS", "20"))
NODES = 4
DEADLINE_S = 240.0 + 10.0 * KILLS
START_S = 60.0
pytestmark = [pytest.mark.slow, pytest.mark.long]


class Process:
    """A cloud process on fixed ports, once it has them."""

    def __init__(self, home):
        self.home = home
        self.ports = {"port": 0, "enrol_port": 0, "dashboard_port": 0}
        self.child: Any = None

    async def start(self):
        options = {"home": str(self.home.path), "host": "127.0.0.1", **self.ports}
        self.child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "triplane.cloud", json.dumps(options),
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        line = await asyncio.wait_for(self.child.stdout.readline(), START_S)
        ready = json.loads(line)
        self.ports = {name: ready[name] for name in self.ports}

    async def end(self, number=signal.SIGKILL):
        if self.child.returncode is None:
            self.child.send_signal(number)
        await asyncio.wait_for(self.child.wait(), START_S)
        self.child._transport.close()
        return self.child.returncode


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    return make_released(tmp_path_factory.mktemp("released"))


@asynccontextmanager
async def people_of(home):
    channel = connect_aio(IdentityFolder(home.operator))
    try:
        yield FleetStub(channel), IdentityStub(channel)
    finally:
        await channel.close()


async def asked(call, request):
    """The answer, however often the cloud is killed meanwhile."""
    while True:
        try:
            return await call(request, timeout=5, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            if error.code() not in {
                grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED,
                grpc.StatusCode.CANCELLED,
            }:  # fmt: skip
                raise


async def let_in(process, identities, folder):
    """Nodes with tokens from the wire."""
    nodes = []
    for i in range(NODES):
        request = identity_pb2.CreateTokenRequest(
            role=identity_pb2.NODE, name=f"node-{i}", labels={"site": "lab"}
        )
        token = (await asked(identities.CreateToken, request)).token
        address = f"127.0.0.1:{process.ports['enrol_port']}"
        nodes.append(TestNode(await asyncio.to_thread(enrol, token, address, folder / f"{i}")))
    return nodes


async def rolled(fleet, i, told):
    """Deploy versions in turn until told to stop; every rollout ends as done."""
    while not told.is_set():
        i += 1
        request = pb.DeployRequest(
            reference=f"digits@{1 + i % 2}", selector="all", key=i.to_bytes(16, "big"),
            role="release", waves=[pb.Wave(nodes=1), pb.Wave(percent=50), pb.Wave(percent=100)],
        )  # fmt: skip
        made = await asked(fleet.Deploy, request)
        while True:
            now = await asked(fleet.GetRollout, pb.GetRolloutRequest(id=made.id))
            assert now.id == made.id, "an answered rollout is gone"
            assert now.state in {pb.Rollout.PREPARING, pb.Rollout.RUNNING, pb.Rollout.DONE}, now
            if now.state == pb.Rollout.DONE:
                break
            await asyncio.sleep(0.02)
    return i


async def killed(process, rng, kills):
    """Kill at random instants, some of them while the process is still starting."""
    for _ in range(kills):
        await asyncio.sleep(rng.uniform(0.05, 1.5))
        await process.end()
        if rng.random() < 0.25:
            starting = asyncio.ensure_future(process.start())
            await asyncio.wait([starting], timeout=rng.uniform(0.1, 1.5))
            if not starting.done() and process.child is not None:
                await process.end()
                await asyncio.gather(starting, return_exceptions=True)
        if process.child.returncode is not None or process.child is None:
            await process.start()


async def check_kept(fleet, nodes, rollouts):
    """Every acknowledged report is the one the cloud has, or an older one of its node."""
    for node in nodes:
        kept = await asked(fleet.GetNode, pb.GetNodeRequest(name=node.identity.name))
        assert kept.report.number >= max(r.number for r in node.acknowledged)
        assert dict(kept.labels) == {"site": "lab"}
        wanted = {a.model: (a.version, a.attempt) for a in kept.desired.assignments}
        assert wanted == {a.model: (a.version, a.attempt) for a in node.desired.assignments}, (
            "the node goes by another document than the cloud keeps"
        )
    listed = await asked(fleet.ListRollouts, pb.ListRolloutsRequest(page_size=500))
    assert len(listed.rollouts) == rollouts, "the same key is the same rollout"


def test_killing_the_cloud_anywhere_loses_nothing_it_answered(released, tmp_path, record_property):
    seed = int(os.environ.get("TRIPLANE_SEED", str(time.time_ns() % 100_000)))
    home = copied(released, tmp_path)

    async def story():
        process = Process(home)
        await process.start()
        try:
            async with people_of(home) as (fleet, identities):
                nodes = await let_in(process, identities, tmp_path)
                told = asyncio.Event()
                async with living(nodes):
                    rolling = asyncio.ensure_future(rolled(fleet, 0, told))
                    killing = asyncio.ensure_future(killed(process, random.Random(seed), KILLS))
                    done, _ = await asyncio.wait(
                        {rolling, killing}, return_when=asyncio.FIRST_COMPLETED
                    )
                    for task in done:
                        task.result()
                    told.set()
                    count = await rolling
                    await check_kept(fleet, nodes, count)
                return count
        finally:
            assert await process.end(signal.SIGTERM) == 0

    async def bounded():
        return await asyncio.wait_for(story(), DEADLINE_S)

    try:
        rollouts = asyncio.run(bounded())
    except BaseException as error:
        error.add_note(f"seed {seed}, kills {KILLS}")
        raise
    assert rollouts >= 1
