"""Homes that earlier releases wrote, with a rollout and a run under way: they open and go on."""

import asyncio
import json
import tarfile
import time
from pathlib import Path

import pytest
from tests.golden.cloud_home.make import DEVICES, NODES, STRATEGY_RUN, Story

from triplane.cloud.federation import coding, journal
from triplane.cloud.federation.run_projection import RunProjection
from triplane.cloud.federation.tables import EVENTS, RUNS
from triplane.cloud.fleet import storage
from triplane.cloud.fleet.tables import MEMBERS, ROLLOUTS
from triplane.cloud.home import Home, open_database
from triplane.cloud.identity import audit
from triplane.cloud.registry import Push
from triplane.cloud.server import running
from triplane.proto import federation_pb2 as run_pb
from triplane.proto import fleet_pb2 as fleet_pb

HERE = Path(__file__).parent
WAIT_S = 60
LATER = {"Masked", "Exchanged"}
"""Kinds of events that came after the newest home; `test_journal.py` holds their bytes."""


@pytest.fixture(params=sorted(path.name for path in HERE.glob("*.tar.xz")))
def home(request, tmp_path):
    """A copy of the home, and what `golden.json` says of it."""
    with tarfile.open(HERE / request.param) as tar:
        tar.extractall(tmp_path, filter="data")
    return Home(tmp_path / "home"), json.loads((tmp_path / "home" / "golden.json").read_bytes())


def opened(home, story):
    """Run `story(cloud, golden)` on the cloud of the home, whose clock went on where it stopped."""
    place, golden = home
    began_s = time.monotonic()

    async def run():
        clock = lambda: golden["now_s"] + time.monotonic() - began_s
        async with running(place, clock=clock) as cloud:
            return await story(cloud, golden)

    return asyncio.run(asyncio.wait_for(run(), WAIT_S))


def rows(home, table):
    database = open_database(home[0])
    found = database.read_now(lambda connection: connection.execute(table.select()).all())
    database.close()
    return found


def test_the_rollout_takes_reports_opens_its_last_wave_and_ends(home):
    async def story(cloud, _):
        nodes = Story(cloud)
        before = (await cloud.fleet.rollout("last")).rollout
        for node in ("south", "west"):
            await nodes.assigned(node, 2)
            await nodes.says(node, fleet_pb.COMMITTED)
        after = (await nodes.rollout_is("DONE")).rollout
        return before, after, {node: cloud.fleet.node(node) for node in NODES}

    before, after, nodes = opened(home, story)
    stages = {name: m.stage.name for name, m in before.members.items()}
    assert (before.state.name, before.wave, before.resumed) == (
        "RUNNING", 0, "resumed by operator",
    )  # fmt: skip
    assert stages == {"north": "COMMITTED", "south": "PROBATION", "west": "WAITING"}
    assert after.wave == 1
    assert {row.held["digits"].good_version for row in nodes.values()} == {2}
    assert dict(nodes["west"].labels) == {"camera": "new"}


def test_the_run_counts_what_had_arrived_closes_its_rounds_and_ends(home):
    async def story(cloud, golden):
        devices = Story(cloud)
        before = await cloud.federation.run(golden["run"])
        for device in DEVICES:
            await devices.connect(device)
        await devices.works("bob", await devices.task("bob", golden["run"]))
        last = dict[str, bytes]()
        while (await cloud.federation.run(golden["run"])).phase != run_pb.Run.DONE:
            last = await devices.round(golden["run"], last) or last
        after = await cloud.federation.run(golden["run"])
        return before, after, await cloud.registry.version(after.result)

    before, after, version = opened(home, story)
    assert [(r.number, r.evaluates, r.counted) for r in before.rounds] == [
        (1, False, 2), (1, True, 2), (2, False, 0), (2, False, 1),
    ]  # fmt: skip
    assert after.rounds[:3] == before.rounds[:3]
    assert [(r.number, r.evaluates, r.counted) for r in after.rounds[3:]] == [
        (2, False, 2), (2, True, 2), (3, False, 2), (3, True, 2),
    ]  # fmt: skip
    assert (str(version), version.lineage.parent) == ("tiny@3", "tiny@2")
    assert {m.device: m.dropped for m in after.members} == {"ann": 1, "bob": 1}


def test_ended_runs_rollouts_versions_and_the_audit_log_are_read(home):
    async def story(cloud, _):
        runs = {run.id: await cloud.federation.run(run.id) for run in await cloud.federation.runs()}
        rollouts = [record.rollout for record in await cloud.fleet.rollouts(10)]
        stable = await cloud.registry.version("digits@stable")
        again = Push(model="digits", blob=stable.blob, key=bytes([2]) * 16, aliases=("stable",))
        assert await cloud.registry.push(again, by="operator") == stable
        incidents = await cloud.fleet.incidents(10)
        return runs, rollouts, stable, incidents, await cloud.principals.all()

    runs, rollouts, stable, incidents, principals = opened(home, story)
    assert sorted(run_pb.Run.Phase.Name(run.phase) for run in runs.values()) == [
        "COLLECTING", "DONE", "FAILED",
    ]  # fmt: skip
    assert runs[STRATEGY_RUN].reason == "the strategy failed"
    assert [(r.plan.version, r.state.name) for r in rollouts] == [(2, "RUNNING"), (1, "DONE")]
    assert str(stable) == "digits@2"
    assert [(name, incident.kind) for name, incident in incidents] == [("south", "restart")]
    assert {p.name: p.revoked for p in principals}["gone"]


def test_everything_stored_is_written_again_with_the_same_bytes(home):
    """Names of fields, of kinds and of states are those of the release that wrote the home."""
    kinds = set()
    for row in rows(home, EVENTS):
        kinds.add(row.kind)
        assert coding.to_json(coding.from_json(journal.KINDS[row.kind], row.body)) == row.body
    assert kinds == set(journal.KINDS) - LATER
    for row in rows(home, RUNS):
        assert coding.to_json(coding.from_json(journal.Prepared, row.prepared)) == row.prepared
        if row.snapshot:
            assert coding.to_json(coding.from_json(RunProjection, row.snapshot)) == row.snapshot
    members = {(row.rollout, row.name): row.body for row in rows(home, MEMBERS)}
    for row in rows(home, ROLLOUTS):
        record = storage._rollout_record(row, ())
        assert storage._rollout_row(record)["body"] == row.body
    for (rollout, _), body in members.items():
        assert storage._member_row(rollout, storage._member(json.loads(body)))["body"] == body


def test_audit_entries_keep_their_verbs_and_their_chain(home):
    database = open_database(home[0])
    entries = database.read_now(lambda connection: audit.page(connection, 1))
    database.close()
    assert audit.verify(entries) == (len(entries), entries[-1].digest)
    assert {entry.action for entry in entries} == {
        "federation.resume", "federation.start", "federation.stop", "identity.enrol",
        "identity.revoke", "metadata.submit", "node.cordon", "node.labels", "node.uncordon",
        "registry.bundle", "registry.push", "registry.signed", "rollout.deploy", "rollout.pause",
        "rollout.resume", "token.create",
    }  # fmt: skip
