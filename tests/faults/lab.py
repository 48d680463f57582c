"""A cloud and devices as processes that are killed while runs go on, and what is journaled of them.

Instants are either random, or right after the journal of a run grew: the second kind is where a
crash between a commit and what follows from it would show.
"""

import asyncio
import contextlib
import copy
import json
import math
import sqlite3
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

import grpc
import sqlalchemy as sa
from tests.cloud.federation.given import (
    Device,
    devices_of,
    make_home,
    registered,
    shard,
    start_request,
)
from tests.device.devices import save_shard
from tests.faults.fleet import Process, free_port
from tests.faults.nursery import Forked

from triplane.cloud.federation import journal
from triplane.cloud.identity.rights import PrincipalRole
from triplane.cloud.server import running
from triplane.device import FederatedClient
from triplane.proto import federation_pb2 as pb
from triplane.proto import registry_pb2
from triplane.proto.channels import connect_aio
from triplane.proto.federation_pb2_grpc import FederationStub
from triplane.proto.identity import IdentityFolder
from triplane.proto.registry_pb2_grpc import RegistryStub
from triplane.unified_ir.federated.core.run import Joined

NAMES = ("ann", "bob", "cy")  # devices of the test's own process, in the population of `given`
REAL = ("dora", "eve", "fay")  # processes
LAB = "real"  # their population
STEP_S = 0.02
LOOK_S = 0.001
GROWTH_S = 5.0  # for the journal to grow; then the instant is a random one
LIFE_S = 0.3  # of a process at most, where the instant is random
MAX_EVENTS = 9  # of a life at most, where it is journaled
LAST = frozenset({"Finished", "Failed", "Stopped"})
OVER = frozenset({pb.Run.DONE, pb.Run.FAILED, pb.Run.STOPPED})


@dataclass
class Tally:
    """What was killed, and when."""

    kills: Counter = field(default_factory=Counter)
    instants: Counter = field(default_factory=Counter)
    after: Counter = field(default_factory=Counter)  # kinds of events
    at_once: int = 1
    started: list = field(default_factory=list)  # (name, when) of processes

    @property
    def killed(self):
        return sum(self.kills.values())


class Lab:
    """A cloud as a process on ports that stay, with enrolled devices.

    nursery: forks the processes; without one they are started by their commands.
    """

    def __init__(self, folder, nursery=None):
        self.folder, self.home = folder, make_home(folder)
        self._nursery = nursery
        self.ports = {"port": free_port(), "enrol_port": free_port()}
        self.devices: list[Device] = []

    def cold(self):
        """The same lab, whose processes are started by their commands."""
        made = copy.copy(self)
        made._nursery = None
        return made

    async def furnish(self):
        async with running(self.home, **self.ports) as cloud:
            await registered(cloud, self.folder)
            self.devices = await devices_of(cloud, self.folder, NAMES)
            for number, name in enumerate(REAL):
                invited = await cloud.principals.invite("operator", PrincipalRole.DEVICE, name=name)
                client = FederatedClient(self.folder / name, shard(number), population=LAB)
                await asyncio.to_thread(client.enrol, invited.token, cloud.enrol_address)
                save_shard(self.folder / f"{name}.npz", shard(number))

    def process(self, module, arguments, log):
        if self._nursery is not None:
            return Forked(self._nursery, module, arguments, self.folder / log)
        return Process([sys.executable, "-m", module, *arguments], self.folder / log, ready=True)

    def device(self, name):
        """A device as a process of its own."""
        data = self.folder / f"{name}.npz"
        arguments = [self.folder / name, "--data", data, "--population", LAB]
        return self.process("triplane.device", arguments, f"{name}.log")

    @contextlib.contextmanager
    def started(self):
        """The cloud's process at work; whoever kills it starts it again."""
        options = {"home": str(self.home.path), "host": "127.0.0.1", "dashboard_port": 0}
        options |= self.ports
        self.cloud = self.process("triplane.cloud", [json.dumps(options)], "cloud.log")
        try:
            yield self
        finally:
            self.cloud.stop()

    @contextlib.contextmanager
    def real_devices(self):
        """Every device of REAL as a process, by name; whoever kills one starts it again."""
        with contextlib.ExitStack() as stack:
            made = {}
            for name in REAL:
                made[name] = self.device(name)
                stack.callback(made[name].stop)
            yield made

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
        return await self.start(start_request(**fields))

    async def start(self, request):
        return (await self.call(FederationStub, "Start", request)).id

    async def run(self, run_id):
        return await self.call(FederationStub, "GetRun", pb.GetRunRequest(id=run_id))

    async def until(self, run_id, holds):
        while not holds(found := await self.run(run_id)):
            await moment(STEP_S)
        return found

    async def ended(self, run_id):
        return await self.until(run_id, lambda run: run.phase in OVER)

    async def digest(self, run):
        request = registry_pb2.GetVersionRequest(reference=run.result)
        return (await self.call(RegistryStub, "GetVersion", request)).model_digest

    def journaled(self, run_id):
        """(entry, projection, events) of a run, read beside the cloud."""
        engine = sa.create_engine(f"sqlite:///file:{self.home.path / 'cloud.db'}?mode=ro&uri=true")
        try:
            with engine.connect() as connection:
                ((entry, projection),) = journal.find(connection, run_id)
                return entry, projection, journal.events(connection, run_id)
        finally:
            engine.dispose()


async def moment(seconds):
    """Let some time pass: kills come at instants that nothing announces."""
    await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=seconds)


class Growth:
    """How far the journal of a run is, asked of its file a thousand times a second."""

    def __init__(self, home, run_id):
        self._file = sqlite3.connect(f"file:{home.path / 'cloud.db'}?mode=ro", uri=True, timeout=5)
        self._run = run_id

    def close(self):
        self._file.close()

    def newest(self):
        """(number, kind) of the newest event; (0, "") before the first."""
        query = "SELECT number, kind FROM federation_events WHERE run = ? ORDER BY number DESC"
        return self._file.execute(f"{query} LIMIT 1", (self._run,)).fetchone() or (0, "")

    def grown(self, events):
        """The newest kind once that many more events are there; "" where they do not come."""
        number, kind = self.newest()
        wanted, until = number + events, time.monotonic() + GROWTH_S
        while number < wanted and kind not in LAST:
            if time.monotonic() > until:
                return ""
            threading.Event().wait(LOOK_S)
            number, kind = self.newest()
        return kind


def instant(lab, run_id, rng, tally):
    """Return at a random moment, or as soon as the journal grew by a random number of events.

    Says whether the run goes on.
    """
    is_journaled, events, seconds = rng.random() < 0.5, rng.randint(1, MAX_EVENTS), rng.random()
    with contextlib.closing(Growth(lab.home, run_id)) as growth:
        kind = growth.grown(events) if is_journaled else ""
        if not kind:
            threading.Event().wait(seconds * LIFE_S)
        tally.instants["journaled" if kind else "random"] += 1
        tally.after.update([kind] if kind else [])
        return growth.newest()[1] not in LAST


async def strike(victims, tally, pause_s=0.0):
    """Kill these processes (by name) at one instant and start them again."""
    dead = [name for name, process in victims.items() if not lives(process)]
    assert not dead, f"{dead} ended by themselves"
    await asyncio.gather(*(asyncio.to_thread(process.kill) for process in victims.values()))
    tally.kills.update([*victims])
    tally.at_once = max(tally.at_once, len(victims))
    await moment(pause_s)
    when = time.time()
    tally.started.extend((name, when) for name in victims)
    await asyncio.gather(*(asyncio.to_thread(process.start) for process in victims.values()))


def rejoined_s(tally, events):
    """Seconds from the starts of devices during a run to their joining it again.

    Left out: where the cloud was killed, or the device again, before it could join.
    """
    found = []
    for number, (name, when) in enumerate(tally.started):
        if not events[0].at_s <= when <= events[-1].at_s:
            continue
        again = [w for n, w in tally.started[number + 1 :] if n in {name, "cloud"}]
        until = min(again, default=math.inf)
        back = [e.at_s for e in events if isinstance(e, Joined) and e.device == name]
        joined = next((at_s for at_s in back if at_s >= when), math.inf)
        together = ("cloud", when) in tally.started
        if name != "cloud" and joined < until and not together:
            found.append(joined - when)
    return found


def lives(process):
    return process.is_alive if isinstance(process, Forked) else process.child.poll() is None
