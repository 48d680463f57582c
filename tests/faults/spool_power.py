"""A cloud that receives updates on a disk that forgets."""

import asyncio
import contextlib
import hashlib
import shutil
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
from tests.cloud.federation.given import POPULATION, spec
from tests.faults.crash_disk import PowerCut
from tests.faults.cuts import Forgetful, cuts, on, plugged
from tests.faults.lab import OVER

from triplane.cloud.federation import journal
from triplane.cloud.federation.federation import Federation
from triplane.cloud.federation.journal import Prepared, RunRecord
from triplane.cloud.federation.spec import with_defaults
from triplane.cloud.federation.tables import SMALL
from triplane.cloud.registry.collecting import MIN_AGE_S, unwanted
from triplane.cloud.registry.conversions import Conversions
from triplane.cloud.registry.registry import Registry
from triplane.cloud.store import Database
from triplane.proto import federation_pb2 as pb
from triplane.proto.blobs import BlobFolder
from triplane.proto.errors import Corrupt, NotFound
from triplane.unified_ir.federated.algorithms import algorithm
from triplane.unified_ir.federated.core.files import like_of, write_state, write_update
from triplane.unified_ir.federated.core.rules import lease_id
from triplane.unified_ir.federated.core.run import Arrived, Reduced
from triplane.unified_ir.federated.core.vector import VectorLayout, encode_vector

RUN, PLAN_DIGEST = "0123456789abcdef", "d" * 64
NAMES = ("ann", "bob")
ROUNDS = 2
ROLES = {"w": "parameter", "scale": "buffer"}
FIRST = {"w": np.arange(6, dtype=np.float32), "scale": np.ones((), np.float32)}
LAYOUT = VectorLayout.of(like_of(FIRST))
EPOCH = "the same in each life, so that updates are the same bytes in each story"
DEADLINE_S = 60.0
POINTS = 30  # of some 70 operations


def sha256(content):
    return hashlib.sha256(content).digest()


class Cut(Database):
    """A database that the power cut takes along: each commit is one more operation of the disk."""

    disk: Any = None

    def _submit(self, work):
        if self.disk is not None:
            self.disk._step()
        return super()._submit(work)


@dataclass
class Story:
    """A cloud's two folders, and what its devices know. acknowledged: updates by lease.

    inline: updates come within their contributions; vector: as vectors. rows: small updates and
    states of the database.
    """

    folder: Path
    given: "Given"
    expected: list = field(default_factory=list)
    copies: int = 0
    acknowledged: dict = field(default_factory=dict)
    read: Any = None  # what the database says, until the next life
    inline: bool = False
    vector: bool = False
    rows: dict = field(default_factory=dict)

    @property
    def url(self):
        return f"sqlite:///{self.folder / 'cloud.db'}"

    def copy(self):
        folder = self.folder.with_name(f"{self.folder.name}-{self.copies}")
        self.copies += 1
        shutil.copytree(self.folder, folder)
        return replace(self, folder=folder, acknowledged=dict(self.acknowledged))

    def live(self, root):
        """Be the cloud, and its devices, until so many rounds were reduced; PowerCut."""
        disk, self.read = plugged(), None
        is_over = asyncio.run(self._live(root, disk))
        if disk.is_cut:
            raise PowerCut
        assert is_over
        found = self.states()
        assert found == (self.expected or found)
        assert not [*(root / "blobs" / "partial").iterdir()]
        self._check_collected(root)
        updates = root / "federation" / "updates"
        left = {path.name for path in [*updates.iterdir(), *(updates / "partial").iterdir()]}
        known = {sha256(content).hex() for content in self.given.updates.values()}
        assert left - {"partial"} <= known, "what may still be meant is swept a minute later"

    def _check_collected(self, root):
        """What the run references is there; the collector removes all that a crash left beside it.

        Without a crash there is nothing else.
        """
        with contextlib.closing(Database.open(self.url)) as database:
            ask = unwanted(
                database, BlobFolder(root / "blobs"), [journal.referenced],
                older_than_s=MIN_AGE_S, clock=lambda: time.time() + 2 * MIN_AGE_S,
            )  # fmt: skip
            left = {blob.sha256.hex() for blob in asyncio.run(ask)}
            rows = {sha256.hex() for sha256 in database.read_now(journal.small_states)}
        names = {path.name for path in (root / "blobs").iterdir() if path.is_file()}
        assert names - left == self._named()
        assert rows <= self._named()
        assert not left or self.expected, "nothing stays where nobody was killed"

    def states(self):
        """Shared states in the order in which they were reduced."""
        return [event.shared for event in self.journaled()[2] if isinstance(event, Reduced)]

    async def _live(self, root, disk):
        with contextlib.closing(Cut.open(self.url)) as opened:
            database: Any = opened
            database.disk = disk
            blobs = BlobFolder(root / "blobs")
            registry = Registry(database, blobs, Conversions(self.folder / "conversions"))
            federation = Federation(database, blobs, registry, root / "federation", epoch=EPOCH)
            try:
                return await self._worked(federation, disk)
            finally:
                await federation.stop()
                disk.on_cut = lambda: None

    async def _worked(self, federation, disk):
        """Whether the devices' work came to its end before the power went."""
        cut, loop = asyncio.Event(), asyncio.get_running_loop()
        disk.on_cut = lambda: loop.call_soon_threadsafe(cut.set)
        devices = asyncio.create_task(self._devices(federation))
        power = asyncio.create_task(cut.wait())
        try:
            async with asyncio.timeout(DEADLINE_S):
                await asyncio.wait({devices, power}, return_when=asyncio.FIRST_COMPLETED)
            if devices.done() and not disk.is_cut:
                devices.result()
            return not disk.is_cut
        finally:
            for task in (devices, power):
                task.cancel()
            await asyncio.gather(devices, power, return_exceptions=True)

    async def _devices(self, federation):
        await federation.start()
        for name in NAMES:
            federation.devices.greeting(name)
            offer = pb.Offer(population=POPULATION, examples=10, software="test")
            await federation.devices.take(name, offer)
        while True:
            moved = federation.moved
            run = await federation.run(RUN)
            assert run.phase not in OVER, run.reason
            assert not run.refusals.reasons, run.refusals.reasons
            if sum(r.counted == len(NAMES) for r in run.rounds) >= ROUNDS and run.round > ROUNDS:
                return True
            if run.round % 2:
                await asyncio.gather(*(self._work(federation, name) for name in NAMES))
            else:
                for name in NAMES:
                    await self._work(federation, name)
            await moved.wait()

    async def _work(self, federation, name):
        for task in federation.devices.work_of(name).tasks:
            await self._contribute(federation, name, task)

    async def _contribute(self, federation, name, task):
        lease = task.lease.hex()
        content = (self.given.vectors if self.vector else self.given.updates)[lease]
        blob = pb.Blob(sha256=sha256(content), size=len(content))
        told = pb.Update(blob=blob, examples=10, loss=0.5, seconds=0.1)
        if self.vector:
            assert task.takes_vector
            told.vector.CopyFrom(pb.UpdateVector(data=content, layout=LAYOUT.digest))
        elif self.inline:
            told.inline = content
        else:
            await self._upload(federation, name, content)
        await federation.devices.take(
            name, pb.Contribution(run=task.run, round=task.round, lease=task.lease, update=told)
        )
        self.acknowledged[task.lease.hex()] = sha256(content).hex()

    async def _upload(self, federation, name, content):
        folder = await federation.devices.folder_for(name, sha256(content), len(content))
        if not folder.has(sha256(content)):
            with folder.receive(sha256(content), len(content)) as receiving:
                for cut in (len(content) // 2, len(content)):
                    receiving.write(content[receiving.stored : cut])
                    receiving.sync()
                receiving.finish()

    def check(self, root):
        """What was acknowledged is journaled; what the journal names is there, whole."""
        _, projection, events = self.journaled()
        arrived = {e.lease: e.update.blob for e in events if isinstance(e, Arrived)}
        assert self.acknowledged.items() <= arrived.items()
        for name in self._named():
            assert self._is_there(root / "blobs" / name)
        for lease in projection.state.round.leases if projection.state.round else ():
            if lease.update:
                assert self._is_there(root / "federation" / "updates" / lease.update.blob)

    def _named(self):
        """The blobs of the run's plan and of the states that it still needs."""
        entry, projection, _ = self.journaled()
        assert entry.prepared is not None
        state = projection.state
        named = (
            entry.prepared.plan, entry.prepared.state, state.shared, state.good, entry.slots.hex(),
        )  # fmt: skip
        return {name for name in named if name}

    def _is_there(self, path):
        """In its row, or as a durable file."""
        content = self.rows.get(path.name)
        return sha256(content or path.read_bytes()).hex() == path.name

    def journaled(self):
        if self.read is None:
            with contextlib.closing(Database.open(self.url)) as database:
                ((entry, projection),) = database.read_now(lambda c: journal.find(c, RUN))
                self.read = entry, projection, database.read_now(lambda c: journal.events(c, RUN))
                self.rows = database.read_now(rows_of)
        return self.read


def rows_of(connection):
    """Small updates and states, by SHA-256 in hexadecimal."""
    updates = connection.execute(sa.select(SMALL.c.sha256, SMALL.c.data))
    return {row.sha256.hex(): row.data for row in updates} | {
        sha256.hex(): data for sha256, data in journal.small_states(connection).items()
    }


@dataclass(frozen=True)
class Given:
    """What every story begins with. updates, vectors: by lease, the same bytes in each."""

    plan: bytes
    state: bytes
    updates: dict
    vectors: dict

    @classmethod
    def make(cls, folder):
        path, updates, vectors = folder / "made", {}, {}
        write_state(path, FIRST, ROLES, plan=PLAN_DIGEST)
        state = path.read_bytes()
        for number in range(1, ROUNDS + 2):
            for name in NAMES:
                lease = lease_id(RUN, number, evaluates=False, attempt=0, device=name, epoch=EPOCH)
                value = number + len(name) * NAMES.index(name)
                change = {n: np.full(x.shape, value, x.dtype) for n, x in FIRST.items()}
                write_update(
                    path, change, run=RUN, round=number, lease=lease, compression="", keep=1.0,
                    seed=0, device=name,
                )  # fmt: skip
                updates[lease] = path.read_bytes()
                vectors[lease] = encode_vector(change, LAYOUT, lease)
        return cls(b"a plan that no device of this story opens", state, updates, vectors)

    def entry(self):
        row = algorithm("fedadam")
        prepared = Prepared(
            plan=sha256(self.plan).hex(), plan_digest=PLAN_DIGEST, state=sha256(self.state).hex(),
            roles=ROLES, weighting=row.weighting, server=row.server.name, since_s=1.0,
        )  # fmt: skip
        asked = with_defaults(spec(model="tiny@1", algorithm=row.name, rounds=ROUNDS + 2))
        return RunRecord(
            number=0, id=RUN, key=bytes(16), asked=bytes(32), spec=asked, started_s=1.0,
            started_by="operator", prepared=prepared,
        )  # fmt: skip

    def begin(self, root, folder):
        """A home with the run's first blobs, and a database with the run; the story of both."""
        for made in ("blobs/partial", "federation/updates/partial"):
            (root / made).mkdir(parents=True)
        for content in (self.plan, self.state):
            (root / "blobs" / sha256(content).hex()).write_bytes(content)
        folder.mkdir()
        story, entry = Story(folder, self), self.entry()
        database = Database.open(story.url)

        def work(connection):
            journal.begin(connection, entry)
            journal.prepare(connection, RUN, entry.prepared)

        database.write_now(work)
        database.close()
        return story


def stories(quick_folder, *, inline=False, vector=False):
    """What begins a story on a home; it must come to the states of an undisturbed one.

    The undisturbed one has files, so that vectors must come to the same states.
    """
    folder = quick_folder / "given"
    folder.mkdir()
    given, calm_home = Given.make(folder), quick_folder / "calm"
    calm_home.mkdir()
    calm = replace(given.begin(calm_home, folder / "calm"), inline=inline)
    with on(Forgetful(calm_home)):
        calm.live(calm_home)
    expected = calm.states()
    assert len(expected) == ROUNDS

    def begin(root):
        begun = given.begin(root, folder / root.name)
        made = replace(begun, inline=inline, vector=vector)
        made.expected = expected
        return made

    return begin


def check_found(quick_folder, play, **options):
    with pytest.raises((AssertionError, Corrupt, FileNotFoundError, NotFound)):
        cuts(quick_folder, play, points=10 * POINTS, seed=1, **options)
