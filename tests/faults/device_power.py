"""A device's work on a disk that forgets."""

import copy
import hashlib
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from tests.federated.core import plans

from triplane.device import task_runner as working
from triplane.device.home import DeviceHome, DeviceSettings
from triplane.device.memory import Memory
from triplane.device.stopping import StopToken
from triplane.device.task_runner import TaskRunner
from triplane.device.tasks import Blob, Task, WorkSet
from triplane.proto import federation_pb2 as pb
from triplane.proto.plan_statement import Least, PlanStatement
from triplane.proto.targets import plan_target
from triplane.unified_ir.federated.core.files import write_state
from triplane.unified_ir.federated.core.learn import Work, shared
from triplane.unified_ir.runtime import write_plan

RUN = "0123456789abcdef"
ROUNDS, REFUSED = 4, 3
SHARD = plans.shard(held_out=6)
POINTS = 44  # of some 90 operations
NOTHING_PERSONAL = {**plans.ROLES, "head": "buffer"}
WIRE: Any = None  # played


def lease(number):
    return hashlib.sha256(str(number).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Blobs:
    """What a device downloads: by SHA-256 the bytes, of the plan and of each round's state.

    compression: of its updates; without it and without a personal tensor they imply nothing.
    """

    plan: Blob
    states: tuple
    data: dict
    compression: str
    tensors: tuple

    @classmethod
    def make(cls, folder, roles=plans.ROLES, compression="int8"):
        data = {}

        def put(path):
            content = path.read_bytes()
            blob = Blob(hashlib.sha256(content).digest(), len(content))
            data[blob.sha256] = content
            return blob

        digest = write_plan(folder / "plan", plans.spec(roles=roles))
        plan, states = put(folder / "plan"), []
        of_run = {n: x for n, x in plans.state().items() if n in shared(roles)}
        for number in range(1, ROUNDS + 1):
            write_state(folder / "state", of_run | {"w": of_run["w"] + number}, roles, plan=digest)
            states.append(put(folder / "state"))
        return cls(plan, tuple(states), data, compression, shared(roles))

    def verify(self, digest):
        """Return the signature of the plan; the power cuts are about what a device stores."""
        statement = PlanStatement(
            model="tiny", version=1, model_digest="0" * 64, digest=digest, algorithm="fedavg",
            hyperparameters={}, tensors=self.tensors, least=Least(),
        )  # fmt: skip
        return plan_target("plans", statement, length=self.plan.size, sha256=self.plan.sha256)

    def task(self, number):
        work = Work(
            run=RUN, round=number, device="ann", seed=7, steps=3, batch_size=4, support=4, query=3
        )
        return Task(
            kind="learn", lease=lease(number), plan=self.plan, state=self.states[number - 1],
            work=work, until_s=float("inf"), compression=self.compression,
        )  # fmt: skip


@dataclass
class Story:
    """A device, and what the cloud knows of it.

    sent: updates by lease. number: the round at hand. settled: settlements that the device took;
    remembered: its personal state after so many of them.
    """

    blobs: Blobs
    sent: dict = field(default_factory=dict)
    number: int = 1
    settled: int = 0
    uploaded: dict = field(default_factory=dict)
    remembered: list = field(default_factory=list)

    def copy(self):
        return copy.deepcopy(self, {id(self.blobs): self.blobs})

    def upload(self, _channel, path):
        content = path.read_bytes()
        self.uploaded[sha256(content)] = content
        return sha256(content)

    def download(self, _channel, name, size, blobs, progress):
        if blobs.has(name):
            return blobs.find(name)
        content = self.blobs.data[name]
        with blobs.receive(name, size) as receiving:
            for cut in (size // 2, size):
                if receiving.stored < cut:
                    receiving.write(content[receiving.stored : cut])
                    receiving.sync()
                    progress(receiving.stored, size)
            return receiving.finish()

    def live(self, root):
        """Be the device from where the cloud is to the end of the run."""
        home = DeviceHome(root)
        home.make()
        played = mock.patch.multiple(working, upload=self.upload, download=self.download)
        with played, home.held():
            desk = TaskRunner(home, SHARD, DeviceSettings(), lambda: WIRE, self.blobs.verify)
            self.settle(desk)
            while self.number <= ROUNDS:
                told = desk.do(self.blobs.task(self.number), StopToken(float("inf")))
                assert told.WhichOneof("outcome") == "update", told.declined
                self.take(told)
                self.settle(desk)
        assert sorted(p.name for p in home.pending.iterdir()) == []
        kept = {f"{RUN}.state", f"{RUN}.before"} if self.blobs.compression else set()
        left = {p.name for p in home.personal.iterdir()} - {"model.newest"}
        assert left == kept | {"model"}

    def take(self, told):
        content = self.uploaded[told.update.blob.sha256]
        assert self.sent.setdefault(told.lease.hex(), content) == content
        self.number += 1

    def settle(self, desk):
        """Give the device its document: the task at hand, what became of what it sent."""
        tasks = (self.blobs.task(self.number),) if self.number <= ROUNDS else ()
        newest = self.number - 1
        settled = pb.Settlement(
            run=RUN, lease=bytes.fromhex(lease(newest)), counted=newest != REFUSED
        )
        desk.settle(WorkSet(tasks, (settled,) if newest else ()))
        self.settled = newest
        del self.remembered[newest:]
        self.remembered.append(plain(desk.memory.personal(RUN)))


class Disturbed(Story):
    """Must come to what an undisturbed device came to."""

    calm: Story

    def check(self, root):
        """What a crash left: the state of a number of updates, and the bytes that were sent."""
        home = DeviceHome(root)
        memory = Memory(home.personal, home.pending)
        taken = self.number - 1
        found = plain(memory.personal(RUN))
        assert found in (self.calm.remembered[self.settled], self.calm.remembered[taken])
        kept = {p.facts.lease: memory.bytes_of(p).read_bytes() for p in memory.pending()}
        if self.settled < taken and found != self.calm.remembered[taken]:
            assert kept.get(lease(taken)) == self.sent[lease(taken)], "what was sent is gone"
        for name, content in kept.items():
            assert self.sent.get(name, content) == content

    def live(self, root):
        super().live(root)
        assert self.sent == self.calm.sent
        assert self.remembered[-1] == self.calm.remembered[-1]


def sha256(content):
    return hashlib.sha256(content).digest()


def plain(personal):
    return {
        name: (x.dtype.str, x.tobytes())
        for part in (personal.tensors, personal.remainder)
        for name, x in part.items()
    }


def stories(folder, **options):
    """What begins a story on a home; it must go as an undisturbed one went."""
    (folder / "blobs").mkdir()
    blobs = Blobs.make(folder / "blobs", **options)
    calm = Story(blobs)
    calm.live(folder / "calm")
    changes = ROUNDS if blobs.compression else 1  # each that counts, where it implies something
    assert len(set(map(str, calm.remembered))) == changes

    def begin(_home):
        made = Disturbed(blobs)
        made.calm = calm
        return made

    return begin
