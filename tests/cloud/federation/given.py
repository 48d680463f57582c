"""A cloud with a small registered model, and devices that speak the real protocol."""

import asyncio
import contextlib
import hashlib
import secrets
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from triplane.cloud.home import initialize
from triplane.cloud.identity.rights import PrincipalRole
from triplane.cloud.registry import Push
from triplane.cloud.trust import MetadataRepository
from triplane.cloud.trust.signing import sign_plan_policy
from triplane.proto import federation_pb2 as pb
from triplane.proto.blobs import BlobFolder
from triplane.proto.channels import connect, connect_aio
from triplane.proto.errors import Conflict, InvalidInput, Unavailable
from triplane.proto.identity import IdentityFolder, enrol
from triplane.proto.plan_statement import PlanPolicy, PlanRule
from triplane.proto.stream import SessionClient
from triplane.proto.transfer import download, upload
from triplane.unified_ir import nn, optim, train
from triplane.unified_ir.federated.core import learn
from triplane.unified_ir.federated.core.files import read_state, write_update
from triplane.unified_ir.ir import TensorSpec
from triplane.unified_ir.runtime import Plan

FEATURES, CLASSES = 6, 3
POPULATION = "labs"
MODELS = ("tiny", "own", "wide", "sine")
"""Models of tests whose plans the cloud's key may sign."""


def model_bytes(folder, seed=0, hidden=8, *, normalized=False):
    """A small classifier of 6 features; normalized: with statistics of batches as buffers."""
    path = folder / f"tiny-{seed}-{hidden}-{normalized}.tpm"
    if not path.exists():
        norm = [nn.BatchNorm1d(hidden)] if normalized else []
        cell = nn.Sequential(
            nn.Dense(FEATURES, hidden), *norm, nn.Tanh(), nn.Dense(hidden, CLASSES)
        )
        rng = np.random.default_rng(seed)
        for p in cell.parameters().values():
            p.array = np.asarray(rng.normal(0, 0.5, p.array.shape), np.float32)
        trainer = train.Trainer(cell, loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.1))
        trainer.prepare(TensorSpec(("N", FEATURES), "float32"), TensorSpec(("N",), "int64"))
        trainer.export(("predict", "evaluate", "loss")).save(path)
    return path.read_bytes()


def shard(seed, train_samples=24, held_out=12):
    """Samples of a device: the same features everywhere, labels by a rule of its own."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(train_samples + held_out, FEATURES)).astype(np.float32)
    y = (x @ rng.normal(size=(FEATURES, CLASSES))).argmax(1).astype(np.int64)
    cut = train_samples
    return learn.Shard({"x": x[:cut], "y": y[:cut]}, {"x": x[cut:], "y": y[cut:]})


def make_home(folder):
    """A new cloud without anything in it, whose policy allows every plan of these models."""
    home = initialize(folder / "home", offline_keys=folder / "keys").home
    rule = PlanRule(("*",), ("*",))
    sign_plan_policy(
        MetadataRepository(home.metadata, home.keys),
        PlanPolicy(dict.fromkeys(MODELS, rule)),
        folder / "keys",
    )
    return home


async def registered(cloud, folder, seed=0):
    """tiny@1 in the registry."""
    blob = cloud.blobs.put(model_bytes(folder, seed))
    push = Push(model="tiny", blob=blob, key=secrets.token_bytes(16))
    return await cloud.registry.push(push, by="operator")


def spec(**fields):
    """Of a short run of two devices."""
    cohort: dict[str, Any] = {"devices": 2, "quorum": 1.0, "deadline_s": 60.0, "patience_s": 20.0}
    cohort |= fields.pop("cohort", {})
    sampling = {"steps": 3, "batch_size": 8, "support": 6, "query": 6}
    return pb.Spec(
        **{
            "model": "tiny",
            "population": POPULATION,
            "rounds": 2,
            "cohort": pb.Cohort(**cohort),
            "sampling": pb.Sampling(**sampling),
            "seed": 7,
            **fields,
        }
    )


def start_request(key=None, **fields):
    return pb.StartRequest(spec=spec(**fields), key=key or secrets.token_bytes(16))


@dataclass
class Kept:
    """A contribution a device made: the bytes of its update, and whether it was acknowledged."""

    task: pb.Task
    told: pb.Contribution
    data: bytes = b""
    acknowledged: bool = False


@dataclass
class Device:
    """Learns as a device does, once per lease. act: what to do with a task instead."""

    __test__ = False

    identity: IdentityFolder
    shard: learn.Shard
    folder: Path
    act: Any = None
    kept: list[Kept] = field(default_factory=list)
    work: pb.Work = field(default_factory=pb.Work)
    heard: list[pb.Work] = field(default_factory=list)

    def __post_init__(self):
        self.name = self.identity.name
        self.blobs = BlobFolder(self.folder / "blobs")
        self.channel: Any = None
        self.told = asyncio.Condition()
        self.plans = {}

    def offer(self):
        return pb.Offer(
            population=POPULATION, examples=self.shard.examples,
            held_out=self.shard.held_out_samples, software="test",
        )  # fmt: skip

    async def _told(self, work):
        async with self.told:
            self.work = work
            self.heard.append(work)
            self.told.notify_all()

    async def until(self, holds):
        async with self.told:
            await self.told.wait_for(lambda: holds(self.work))

    def settled(self, lease):
        """The settlement of a lease that this device was told, or None."""
        return next((s for w in self.heard for s in w.settled if s.lease == lease), None)

    @asynccontextmanager
    async def live(self):
        self.client = SessionClient(
            lambda: connect_aio(self.identity), self._told, rng=lambda: 0.05, software="test",
            greeting=self.offer,
        )  # fmt: skip
        self.channel = connect(self.identity)
        self.threads = ThreadPoolExecutor(2)
        tasks = [asyncio.create_task(self.client.run()), asyncio.create_task(self._obey())]
        try:
            yield self
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            self.channel.close()
            self.threads.shutdown(wait=False)
            for result in results:
                if isinstance(result, Exception):
                    raise result

    async def apart(self, work, *arguments):
        """What the work returns, in a thread of the device's own.

        In those of the loop, devices that wait for a cloud of the same process could take all
        there are, which is six on two cores, and leave the cloud none to answer with.
        """
        return await asyncio.get_running_loop().run_in_executor(self.threads, work, *arguments)

    async def _obey(self):
        done = set()
        while True:
            await self.until(lambda w: any(t.lease not in done for t in w.tasks))
            task = next(t for t in self.work.tasks if t.lease not in done)
            done.add(task.lease)
            if self.act is not None:
                await self.act(self, task)
            else:
                await self._worked(task)

    async def _worked(self, task):
        """Learn and contribute, unless the task is withdrawn meanwhile."""
        try:
            made = await self.learnt(task)
        except (InvalidInput, Conflict):
            await self.until(lambda work: all(t.lease != task.lease for t in work.tasks))
        else:
            await self.contribute(made)

    async def contribute(self, kept):
        self.kept.append(kept)
        await self.client.send(kept.told)
        kept.acknowledged = True

    async def learnt(self, task):
        """Once the cloud is there to fetch from and to send to, however often it dies."""
        while True:
            try:
                return await self.apart(self.learn, task)
            except Unavailable:
                await self.client.connected.wait()

    def fetch(self, blob):
        return download(self.channel, blob.sha256, blob.size, self.blobs)

    def learn(self, task):
        plan = self.plan(task)
        work = work_of(task, self.name)
        told = pb.Contribution(run=task.run, round=task.round, lease=task.lease)
        if task.WhichOneof("work") == "evaluate":
            found = learn.evaluate(plan, work, self.shard, steps=task.evaluate.steps)
            told.score.CopyFrom(
                pb.Score(samples=found.samples, before=found.before, after=found.after)
            )
            return Kept(task, told)
        made = learn.learn(plan, work, self.shard)
        data = update_bytes(task, made.change)
        told.update.CopyFrom(self.sent(data, examples=made.examples, loss=made.loss))
        return Kept(task, told, data)

    def sent(self, data, *, examples, loss=0.5):
        """Upload an update's file."""
        with tempfile.NamedTemporaryFile(dir=self.folder) as file:
            file.write(data)
            file.flush()
            sha256 = upload(self.channel, Path(file.name))
        blob = pb.Blob(sha256=sha256, size=len(data))
        return pb.Update(blob=blob, examples=examples, loss=loss, seconds=0.1)

    def plan(self, task):
        path = self.fetch(task.plan)
        plan = self.plans.setdefault(task.plan.sha256, None) or Plan.load(path)
        self.plans[task.plan.sha256] = plan
        plan.assign(read_state(self.fetch(task.state), plan=plan.digest))
        return plan


def work_of(task, device):
    s = task.sampling
    return learn.Work(
        run=task.run, round=task.round, device=device, seed=task.seed, steps=s.steps,
        batch_size=s.batch_size, support=s.support, query=s.query,
    )  # fmt: skip


def update_bytes(task, change, **other):
    """The file of an update; `other` says what it lies about."""
    facts = {"run": task.run, "round": task.round, "lease": task.lease.hex()} | other
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "update"
        write_update(
            path, change, compression=task.learn.compression, keep=task.learn.keep or 1.0,
            seed=task.seed, **facts,
        )  # fmt: skip
        return path.read_bytes()


async def enrolled(cloud, folder, name, number):
    """A new device of the cloud with a shard of its own."""
    invited = await cloud.principals.invite("operator", PrincipalRole.DEVICE, name=name, labels={})
    place = folder / name
    identity = await asyncio.to_thread(enrol, invited.token, cloud.enrol_address, place)
    return Device(identity, shard(number), place)


async def devices_of(cloud, folder, names):
    """A device a name, each with a shard of its own."""
    return [await enrolled(cloud, folder, name, n) for n, name in enumerate(names)]


async def until_members(cloud, run, holds):
    """Returns once that holds of the run's members by name."""
    while True:
        moved = cloud.federation.moved
        found = await cloud.federation.run(run.id)
        if holds({m.device: m for m in found.members}):
            return
        await moved.wait()


@asynccontextmanager
async def living(devices):
    async with contextlib.AsyncExitStack() as stack:
        for device in devices:
            await stack.enter_async_context(device.live())
        yield


async def ended(cloud, run_id):
    """The run once it cannot change any more, or waits for a person."""
    over = {pb.Run.DONE, pb.Run.FAILED, pb.Run.STOPPED}
    while True:
        moved = cloud.federation.moved
        run = await cloud.federation.run(run_id)
        if run.phase in over:
            return run
        await moved.wait()


def sha256(data):
    return hashlib.sha256(data).digest()
