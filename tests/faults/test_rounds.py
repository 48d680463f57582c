"""Federated runs whose cloud and devices are killed at random instants, with real processes."""

import asyncio
import json
import random
import sys

import grpc
import pytest
from tests.cloud.federation.given import (
    Device,
    devices_of,
    living,
    make_home,
    registered,
    start_request,
)
from tests.faults.fleet import Process, free_port

from triplane.cloud.server import running
from triplane.proto import federation_pb2 as pb
from triplane.proto import registry_pb2
from triplane.proto.channels import connect_aio
from triplane.proto.federation_pb2_grpc import FederationStub
from triplane.proto.identity import IdentityFolder
from triplane.proto.registry_pb2_grpc import RegistryStub

NAMES = ("ann", "bob", "cy")
ROUNDS = 40
DEADLINE_S = 240.0
STEP_S = 0.02
LIFE_S = 0.5  # of a cloud at most, once devices may be back

pytestmark = pytest.mark.slow


class Lab:
    """A cloud as a process on ports that stay, with enrolled devices."""

    def __init__(self, folder):
        self.folder, self.home = folder, make_home(folder)
        self.ports = {"port": free_port(), "enrol_port": free_port()}
        self.devices: list[Device] = []

    async def furnish(self):
        async with running(self.home, **self.ports) as cloud:
            await registered(cloud, self.folder)
            self.devices = await devices_of(cloud, self.folder, NAMES)

    def start(self):
        options = {"home": str(self.home.path), "host": "127.0.0.1", **self.ports}
        command = [sys.executable, "-m", "triplane.cloud", json.dumps(options)]
        self.cloud = Process(command, self.folder / "cloud.log", ready=True)

    def kill(self):
        self.cloud.kill()
        self.cloud.start()

    async def call(self, stub, method, request):
        """The answer, however often the cloud dies meanwhile."""
        while True:
            async with connect_aio(IdentityFolder(self.home.operator)) as channel:
                try:
                    return await getattr(stub(channel), method)(request, wait_for_ready=True)
                except grpc.aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.UNAVAILABLE:
                        raise

    async def begin(self, **fields):
        return (await self.call(FederationStub, "Start", start_request(**fields))).id

    async def run(self, run_id):
        return await self.call(FederationStub, "GetRun", pb.GetRunRequest(id=run_id))

    async def until(self, run_id, holds):
        while not holds(found := await self.run(run_id)):
            await moment(STEP_S)
        return found

    async def ended(self, run_id):
        over = {pb.Run.DONE, pb.Run.FAILED, pb.Run.STOPPED}
        return await self.until(run_id, lambda run: run.phase in over)

    async def digest(self, run):
        request = registry_pb2.GetVersionRequest(reference=run.result)
        return (await self.call(RegistryStub, "GetVersion", request)).model_digest


async def moment(seconds):
    """Let some time pass: kills come at instants that nothing announces."""
    await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=seconds)


@pytest.fixture
def lab(tmp_path):
    made = Lab(tmp_path)
    asyncio.run(made.furnish())
    made.start()
    yield made
    made.cloud.stop()


async def killed_often(lab, run_id, kills, rng):
    """Kill the cloud until it was killed often enough or the run is over; how often it was."""
    for number in range(kills):
        run = await lab.until(run_id, lambda r: r.phase != pb.Run.PREPARING)
        if run.phase == pb.Run.DONE:
            return number
        await moment(rng.uniform(0.0, LIFE_S))
        await asyncio.to_thread(lab.kill)
    return kills


@pytest.mark.parametrize("kills", [15, pytest.param(100, marks=pytest.mark.deep)])
def test_a_cloud_killed_at_random_instants_ends_with_the_same_model(lab, kills):
    rng = random.Random(4)
    fields = {
        "model": "tiny@1", "rounds": ROUNDS * max(1, kills // 15), "algorithm": "fedadam",
        "evaluate_every": 20,
        "cohort": {"devices": len(NAMES), "deadline_s": 600.0, "patience_s": 120.0},
    }  # fmt: skip

    async def story():
        async with asyncio.timeout(DEADLINE_S * max(1, kills // 15)), living(lab.devices):
            calm = await lab.ended(await lab.begin(**fields))
            run_id = await lab.begin(**fields)
            killed = await killed_often(lab, run_id, kills, rng)
            return calm, killed, await lab.ended(run_id)

    calm, killed, rough = asyncio.run(story())
    assert rough.phase == calm.phase == pb.Run.DONE, (calm.reason, rough.reason)
    assert killed == kills, "the run was over before the last kill; give it more rounds"
    assert asyncio.run(lab.digest(rough)) == asyncio.run(lab.digest(calm))
    learnt = [r for r in rough.rounds if not r.evaluates]
    assert [r.counted for r in learnt] == [len(NAMES)] * len(learnt)
    assert [(r.loss, r.bytes_up) for r in rough.rounds] == [
        (r.loss, r.bytes_up) for r in calm.rounds
    ]
    assert not rough.refusals.reasons
    acknowledged = [k for d in lab.devices for k in d.kept if k.acknowledged]
    assert acknowledged
