"""Federated runs whose cloud and devices are killed at random instants, with real processes."""

import asyncio
import contextlib
import json
import random
import sys

import grpc
import numpy as np
import pytest
from tests.cloud.federation.given import (
    Device,
    devices_of,
    living,
    make_home,
    registered,
    shard,
    start_request,
)
from tests.device.devices import save_shard
from tests.faults.fleet import Process, free_port

from triplane.cloud.federation import journal
from triplane.cloud.federation.book import follow
from triplane.cloud.federation.spec import hyper_of
from triplane.cloud.home import open_database
from triplane.cloud.identity.rights import Role
from triplane.cloud.server import running
from triplane.device import FederatedClient
from triplane.proto import federation_pb2 as pb
from triplane.proto import registry_pb2
from triplane.proto.channels import connect_aio
from triplane.proto.federation_pb2_grpc import FederationStub
from triplane.proto.identity import IdentityFolder
from triplane.proto.registry_pb2_grpc import RegistryStub
from triplane.proto.transfer import digest_of
from triplane.unified_ir.federated.core import learn
from triplane.unified_ir.federated.core.files import read_state, write_state
from triplane.unified_ir.federated.core.reduce import reduce
from triplane.unified_ir.federated.core.run import Outcome, Phase, Reduced
from triplane.unified_ir.runtime import Plan

NAMES = ("ann", "bob", "cy")
REAL = ("dora", "eve", "fay")  # processes
LAB = "real"
KILLS = 12
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
            for number, name in enumerate(REAL):
                invited = await cloud.principals.invite("operator", Role.DEVICE, name=name)
                client = FederatedClient(self.folder / name, shard(number), population=LAB)
                await asyncio.to_thread(client.enrol, invited.token, cloud.enrol_address)
                save_shard(self.folder / f"{name}.npz", shard(number))

    def device(self, name):
        """A device as a process of its own."""
        command = [
            sys.executable, "-m", "triplane.device", self.folder / name,
            "--data", self.folder / f"{name}.npz", "--population", LAB,
        ]  # fmt: skip
        return Process(command, self.folder / f"{name}.log", ready=True)

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


def test_a_run_whose_devices_and_cloud_are_killed_is_the_replay_of_what_counted(lab):
    rng = random.Random(5)
    fields = {
        "population": LAB, "rounds": 30, "algorithm": "fedadam",
        "cohort": {"devices": len(REAL), "quorum": 0.6, "deadline_s": 60.0, "patience_s": 0.7},
    }  # fmt: skip
    devices = [lab.device(name) for name in REAL]

    async def story():
        async with asyncio.timeout(DEADLINE_S):
            run_id = await lab.begin(**fields)
            for number in range(KILLS):
                await lab.until(run_id, lambda r: r.phase != pb.Run.PREPARING)
                await moment(rng.uniform(0.0, LIFE_S))
                victim = rng.choice([*devices, lab.cloud])
                await asyncio.to_thread(victim.kill)
                if number % 3 == 0:
                    await moment(rng.uniform(0.0, 2.0))
                await asyncio.to_thread(victim.start)
            return await lab.ended(run_id)

    try:
        run = asyncio.run(story())
    finally:
        for device in devices:
            device.stop()
    assert run.phase == pb.Run.DONE, run.reason
    assert any(r.lost for r in run.rounds), "no kill was felt"
    lab.cloud.stop()
    assert replayed(lab, run.id) == run.spec.rounds
    lab.cloud.start()


def replayed(lab, run_id):
    """How many states of the journal follow from its counted updates alone, learnt again here."""
    with contextlib.closing(open_database(lab.home)) as database:
        ((entry, last),) = database.read_now(lambda c: journal.find(c, run_id))
        events = database.read_now(lambda c: journal.events(c, run_id))
    folder, prepared = lab.home.blobs, entry.prepared
    assert prepared is not None
    plan = Plan.load(folder / prepared.plan)
    state = read_state(folder / prepared.state, plan=plan.digest)
    slots: dict[str, np.ndarray] = {}
    book, reduced = journal.first_book(entry), 0
    for event in events:
        if isinstance(event, Reduced) and book.state.phase is Phase.REDUCING:
            updates = [again(plan, state, book.state.round, x, entry.spec) for x in counted(book)]
            state, slots = reduce(
                state, slots, updates, weighting=prepared.weighting,
                server=prepared.server, hyper=hyper_of(entry.spec),
            )  # fmt: skip
            write_state(lab.folder / "again", state, prepared.roles, plan=plan.digest)
            assert digest_of(lab.folder / "again").hex() == event.shared
            reduced += 1
        book, _ = follow(book, event)
    assert book == last
    return reduced


def counted(book):
    return [x for x in book.state.round.leases if x.outcome is Outcome.COUNTED]


def again(plan, state, found, lease, spec):
    """What the device of a lease learnt, learnt once more."""
    s = spec.sampling
    work = learn.Work(
        run="", round=found.number, device=lease.device, seed=spec.seed, steps=s.steps,
        batch_size=s.batch_size, support=s.support, query=s.query,
    )  # fmt: skip
    plan.assign(state)
    made = learn.learn(plan, work, shard(REAL.index(lease.device)))
    assert made.examples == lease.update.examples
    return made.examples, lambda: made.change
