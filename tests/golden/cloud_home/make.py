"""Writes a cloud's home with much under way: `python -m tests.golden.cloud_home.make v2.tar.xz`.

Keys, certificates and ids are random, so no two homes are alike; a released archive is never
written again. A change of what is stored is a new archive beside the old ones, which stay
readable. The keys inside protect nothing: tests open the home with the clock of `golden.json`.
"""

import asyncio
import json
import secrets
import sys
import tarfile
import tempfile
import time
from pathlib import Path

from tests.cloud import nodes
from tests.cloud.federation import given
from tests.cloud.nodes import CAPABILITY
from tests.cloud.registry.models import model_bytes

from triplane.cloud.cli.connection import calls
from triplane.cloud.cli.remote import remote_at
from triplane.cloud.federation import journal, live
from triplane.cloud.federation.journal import Prepared, RunRecord
from triplane.cloud.federation.run_projection import follow
from triplane.cloud.home import initialize, open_database
from triplane.cloud.registry import Push
from triplane.cloud.server import running
from triplane.cloud.trust.signing import sign_release
from triplane.proto import federation_pb2 as run_pb
from triplane.proto import fleet_pb2 as fleet_pb
from triplane.unified_ir.federated.core import learn, run
from triplane.unified_ir.federated.core.files import read_state
from triplane.unified_ir.runtime import Plan

WAIT_S = 120
NODES = ("north", "south", "west")
DEVICES = ("ann", "bob")
DEADLINE_S = 3600.0
STRATEGY_RUN = "f" * 16


def report(story, node, state, **fields):
    """What a node says of `digits` in this state, as far as its desired document goes."""
    message = fleet_pb.Report(capability=CAPABILITY, serving_up=True)
    for wanted in story.fleet_document(node).assignments:
        done = state == fleet_pb.COMMITTED
        message.models.add(
            model=wanted.model, version=wanted.version, attempt=wanted.attempt, state=state,
            committed_version=wanted.version if done else 0,
            committed_sha256=wanted.sha256 if done else b"", **fields,
        )  # fmt: skip
    return message


class Story:
    """Nodes and devices of one cloud, which speak with its services in this process."""

    def __init__(self, cloud):
        self.cloud, self.plans = cloud, dict[bytes, Plan]()

    def fleet_document(self, node):
        return fleet_pb.Desired.FromString(self.cloud.node_peer.greeting(node).SerializeToString())

    async def says(self, node, state, **fields):
        await self.cloud.fleet.report(node, report(self, node, state, **fields))

    async def until(self, part, holds):
        """Wait until `holds()` of the fleet or the federation, looking after each change."""
        while True:
            moved = part.moved
            if outcome := await holds():
                return outcome
            await moved.wait()

    async def rollout_is(self, state, rollout="last"):
        async def holds():
            record = await self.cloud.fleet.rollout(rollout)
            return record if record.rollout.state.name == state else None

        return await self.until(self.cloud.fleet, holds)

    async def assigned(self, node, version):
        async def holds():
            wanted = self.fleet_document(node).assignments
            return any(a.version == version for a in wanted)

        await self.until(self.cloud.fleet, holds)

    async def connect(self, device):
        """A device's stream opens and offers its samples."""
        shard = self.shard(device)
        self.cloud.federation.devices.greeting(device)
        await self.cloud.federation.devices.take(
            device,
            run_pb.Offer(
                population=given.POPULATION, examples=shard.examples,
                held_out=shard.held_out_samples, software="golden",
            ),
        )  # fmt: skip

    def shard(self, device):
        return given.shard(DEVICES.index(device))

    async def task(self, device, run_id, lease=b""):
        """The device's next task of the run, another than of `lease`; None where the run ended."""

        async def holds():
            tasks = self.cloud.federation.devices.work_of(device).tasks
            ours = [t for t in tasks if t.run == run_id and t.lease != lease]
            over = (await self.cloud.federation.run(run_id)).phase in {
                run_pb.Run.DONE, run_pb.Run.FAILED,
            }  # fmt: skip
            return ours or over

        ours = await self.until(self.cloud.federation, holds)
        return None if ours is True else ours[0]

    def plan(self, task):
        plan = self.plans.get(task.plan.sha256)
        if plan is None:
            plan = Plan.load(self.cloud.blobs.find(task.plan.sha256))
            self.plans[task.plan.sha256] = plan
        plan.assign(read_state(self.cloud.blobs.find(task.state.sha256), plan=plan.digest))
        return plan

    async def works(self, device, task):
        """Learn or evaluate, and contribute."""
        plan, work = self.plan(task), given.work_of(task, device)
        message = self.contribution(task)
        if task.WhichOneof("work") == "evaluate":
            score = learn.evaluate(plan, work, self.shard(device), steps=task.evaluate.steps)
            message.score.CopyFrom(
                run_pb.Score(samples=score.samples, before=score.before, after=score.after)
            )
        else:
            learnt = learn.learn(plan, work, self.shard(device))
            data = given.update_bytes(task, learnt.change)
            message.update.CopyFrom(
                await self.update(device, data, examples=learnt.examples, loss=learnt.loss)
            )
        await self.cloud.federation.devices.take(device, message)

    async def update(self, device, data, *, examples, loss):
        """Ann sends the bytes within her message, bob uploads a file."""
        update = run_pb.Update(examples=examples, loss=loss, seconds=0.1)
        if device == "ann":
            update.inline = data
        else:
            folder = await self.cloud.federation.devices.folder_for(
                device, given.sha256(data), len(data)
            )
            folder.put(data)
        update.blob.CopyFrom(run_pb.Blob(sha256=given.sha256(data), size=len(data)))
        return update

    def contribution(self, task):
        return run_pb.Contribution(run=task.run, round=task.round, lease=task.lease)

    async def round(self, run_id, last=None):
        """Every device does its next task; those tasks by device."""
        last = last or {}
        tasks = {d: await self.task(d, run_id, last.get(d, b"")) for d in DEVICES}
        for device, task in tasks.items():
            if task is not None:
                await self.works(device, task)
        return {device: task.lease for device, task in tasks.items() if task is not None}


async def _enrol(cloud, folder):
    for name in (*NODES, "gone"):
        await nodes.enrolled(cloud, folder, name, site=name)
    for name in DEVICES:
        await given.enrolled(cloud, folder, name, 0)


async def _release(cloud, folder, home):
    for version in (1, 2):
        blob = cloud.blobs.put(model_bytes(folder, seed=version))
        await cloud.registry.push(
            Push(model="digits", blob=blob, key=bytes([version]) * 16, aliases=("stable",)),
            by="operator",
        )
        await cloud.registry.wait_bundle("digits", version, "ort-x64")
        await asyncio.to_thread(_sign, home, version, folder / "keys")
    await given.registered(cloud, folder)


def _sign(home, version, keys):
    with calls(home.operator) as cloud, remote_at(cloud) as remote:
        assert sign_release(remote, f"digits@{version}", "ort-x64", keys).submitted.published


async def _roll_out(story):
    """Version 1 is everywhere; version 2 has reached one node of the first wave of two."""
    fleet = story.cloud.fleet
    for node in NODES:
        await fleet.report(node, fleet_pb.Report(capability=CAPABILITY, serving_up=True))
    await fleet.deploy(
        fleet_pb.DeployRequest(
            reference="digits@1", selector="all", key=b"1" * 16, role="release", probation_s=5
        ),
        by="operator",
    )
    for node in NODES:
        await story.assigned(node, 1)
        await story.says(node, fleet_pb.DOWNLOADING, downloaded_bytes=10, total_bytes=100)
        await story.says(node, fleet_pb.COMMITTED)
    await story.cloud.principals.revoke("operator", "gone", "sold")
    await fleet.remove_node("gone", "revoked")
    await story.rollout_is("DONE")
    await fleet.set_labels("west", put={"camera": "new"}, remove=["site"], by="operator")
    request = fleet_pb.DeployRequest(
        reference="digits@2", selector="all", key=b"2" * 16, role="release",
        waves=[fleet_pb.Wave(nodes=2), fleet_pb.Wave(percent=100)], node_deadline_s=DEADLINE_S,
    )  # fmt: skip
    await fleet.deploy(request, by="operator")
    await story.assigned("north", 2)
    await story.says("south", fleet_pb.FAILED, reason="golden sample 3")
    await story.rollout_is("PAUSED")
    await fleet.resume("last", reason="tried by hand", by="operator")
    await fleet.pause("last", reason="lunch", by="operator")
    await fleet.resume("last", by="operator")
    await fleet.cordon("west", cordoned=True, by="operator")
    await fleet.cordon("west", cordoned=False, by="operator")
    await story.says("north", fleet_pb.COMMITTED)
    probing = report(story, "south", fleet_pb.PROBATION)
    probing.incidents.add(time_s=1.0, kind="restart", text="serving was killed")
    await fleet.report("south", probing)


async def _learn(story):
    """One run is done; another has closed a round, evaluated, and holds an update of the next."""
    federation = story.cloud.federation
    for device in DEVICES:
        await story.connect(device)
    done = await federation.begin(given.start_request(rounds=1), by="operator")
    last = dict[str, bytes]()
    while (await federation.run(done.id)).phase != run_pb.Run.DONE:
        last = await story.round(done.id, last) or last
    going = await federation.begin(
        given.start_request(
            algorithm="fedadam", rounds=3, evaluate_every=1, cohort={"deadline_s": DEADLINE_S}
        ),
        by="operator",
    )
    learnt = await story.round(going.id)
    scored = await story.round(going.id, learnt)
    ann = await story.task("ann", going.id, scored["ann"])
    bob = await story.task("bob", going.id, scored["bob"])
    declined = story.contribution(ann)
    declined.declined = "battery"
    await federation.devices.take("ann", declined)
    refused = story.contribution(bob)
    refused.update.CopyFrom(await story.update("bob", b"no update at all", examples=1, loss=0.5))
    await federation.devices.take("bob", refused)
    await federation.halt(going.id, reason="a look", by="operator")
    await federation.resume(going.id, reason="", by="operator")
    federation.devices.left("bob")
    await story.connect("bob")
    task = await story.task("ann", going.id, ann.lease)
    await story.works("ann", task)
    await story.until(federation, lambda: _counted(federation, going.id))
    return going.id


async def _counted(federation, run_id):
    state = federation.live.get(run_id).projection.state
    return state.round is not None and any(x.update for x in state.round.leases)


def _strategy_run(home, model):
    """A run of a strategy, event by event: the strategies themselves are an extra."""
    database = open_database(home)
    spec = given.spec(model=model)
    spec.flower.strategy = "fedavg"
    spec.flower.app = True
    prepared = Prepared(
        plan="aa" * 32, plan_digest="d", state="bb" * 32, roles={"w": "parameter"},
        weighting="examples", server="sgd", since_s=1.0, rules=run.NEWEST_RULES,
    )  # fmt: skip
    entry = RunRecord(
        number=0, id=STRATEGY_RUN, key=secrets.token_bytes(16), asked=journal.asked_digest(spec),
        spec=spec, started_s=1.0, started_by="operator",
        prepared=prepared,
    )  # fmt: skip
    projection, events = journal.first_projection(entry), []

    def happens(kind, at_s, **fields):
        nonlocal projection
        event = kind(at_s=at_s, **fields)
        projection, _ = follow(projection, event)
        events.append(event)

    happens(run.Restarted, 1.0, epoch="e" * 16)
    happens(run.Joined, 2.0, device="ann", examples=4, held_out=2)
    happens(run.Joined, 3.0, device="bob", examples=6)
    turn = projection.state.round
    assert turn is not None
    asked = {"number": turn.number, "evaluates": turn.evaluates, "attempt": turn.attempt}
    happens(run.Asked, 4.0, **asked, messages={"ann": "cc" * 32, "bob": ""})
    update = run.Update(blob="dd" * 32, size=10, examples=4, loss=float("nan"), seconds=1.5)
    lease = next(x.id for x in turn.leases if x.device == "ann")
    happens(run.Answered, 5.0, device="ann", lease=lease, update=update, bytes_down=7)
    happens(run.Tick, 6.0)
    happens(run.Left, 7.0, device="bob")
    happens(run.Failed, 8.0, reason="the strategy failed")

    def write(connection):
        journal.begin(connection, entry)
        journal.prepare(connection, entry.id, prepared)
        journal.append(connection, entry.id, events, projection.revision)
        journal.change(connection, entry.id, live=False, ended_s=8.0)

    asyncio.run(database.write(write))
    database.close()


async def _happens(home, folder):
    async with running(home) as cloud:
        await _enrol(cloud, folder)
        await _release(cloud, folder, home)
        story = Story(cloud)
        await _roll_out(story)
        return await _learn(story)


def make(archive):
    """Write a home into a compressed archive, with the ids and the time a reader needs."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        home = initialize(folder / "home", offline_keys=folder / "keys").home
        live.SNAPSHOT_EVENTS = 8  # type: ignore[misc]  # so that a short run has one
        going = asyncio.run(asyncio.wait_for(_happens(home, folder), WAIT_S))
        _strategy_run(home, "tiny@1")
        (home.path / "golden.json").write_text(json.dumps({"run": going, "now_s": time.time()}))
        with tarfile.open(archive, "w:xz") as tar:
            tar.add(home.path, "home")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
