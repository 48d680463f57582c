"""Runs that a strategy of Flower decides, in a cloud with real processes for strategies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import textwrap
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from tests.cloud.federation import given
from tests.device.devices import (
    Process,
    client_of,
    cloud_of,
    process_of,
    started,
    taking_part,
    within,
)

pytest.importorskip("flwr", reason="needs the extra [flower]")

from triplane.proto import federation_pb2 as pb
from triplane.unified_ir.files.container import Container

pytestmark = pytest.mark.slow


def strategy(name="fedavg", *, app=False, **options):
    said = [pb.Option(name=key, json=json.dumps(value)) for key, value in options.items()]
    return pb.Flower(strategy=name, options=said, app=app)


async def ended_run(cloud, **fields):
    made = await cloud.federation.begin(given.start_request(**fields), by="operator")
    return await given.ended(cloud, made.id)


async def done_run(cloud, **fields):
    run = await ended_run(cloud, **fields)
    assert run.phase == pb.Run.DONE, run.reason
    return run


async def parameters(cloud, reference):
    version = await cloud.registry.version(reference)
    file = Container(cloud.blobs.find(version.blob), kind="model")
    return {name: t.data.copy() for name, t in file.tensors("weights.safetensors").items()}


def written(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(textwrap.dedent(text))
    path.chmod(0o600)
    return path


async def clients_of(cloud, folder, names=("ann", "bob"), **options):
    return [await client_of(cloud, folder, name, k, **options) for k, name in enumerate(names)]


def test_fedavg_of_flower_over_two_device_processes_ends_where_ours_does(tmp_path):
    async def story():
        async with cloud_of(tmp_path) as cloud:
            processes = [await process_of(cloud, tmp_path, n, k) for k, n in enumerate("ab")]
            with started(*processes):
                theirs = await done_run(cloud, model="tiny@1", flower=strategy("fedavg"))
                ours = await done_run(cloud, model="tiny@1")
            found = [await parameters(cloud, run.result) for run in (theirs, ours)]
            return theirs, found, await cloud.registry.version(theirs.result)

    run, (theirs, ours), version = within(story())
    assert [(r.number, r.evaluates, r.counted) for r in run.rounds] == [
        (1, False, 2), (2, False, 2), (2, True, 2),
    ]  # fmt: skip
    assert run.rounds[-1].HasField("after")
    for name, array in ours.items():
        np.testing.assert_allclose(theirs[name], array, rtol=1e-5, atol=1e-6, err_msg=name)
    assert "FedAvg of flwr 1.41.0 over fedavg" in version.lineage.note


APP = """
    import numpy as np
    from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp()
    MOVES = {"ann": (0.25, 10), "bob": (0.75, 20)}

    def reply(message, context, **records):
        kept = context.state.setdefault("seen", MetricRecord({"rounds": 0}))
        kept["rounds"] += 1
        examples = MOVES[context.node_config["device"]][1]
        told = MetricRecord({"num-examples": examples, "rounds": kept["rounds"]})
        return Message(RecordDict({"metrics": told, **records}), reply_to=message)

    @app.train()
    def train(message, context):
        by, _ = MOVES[context.node_config["device"]]
        arrays = {
            name: Array(array.numpy() + np.float32(by))
            for name, array in message.content["arrays"].items()
        }
        return reply(message, context, arrays=ArrayRecord(arrays))

    @app.evaluate()
    def evaluate(message, context):
        assert len(message.content["arrays"])
        told = MOVES[context.node_config["device"]][1] // 2
        found = reply(message, context)
        found.content["metrics"]["num-examples"] = told
        return found
"""


@dataclass
class AppProcess(Process):
    """A device process whose owner gave it an app."""

    app: Path = Path()

    def command(self):
        return [*super().command(), "--app", f"{self.app}:app"]


async def app_processes(cloud, folder, names=("ann", "bob"), text=APP):
    app = written(folder / "apps" / "moving.py", text)
    made = [await process_of(cloud, folder, name, k) for k, name in enumerate(names)]
    return [AppProcess(p.home, p.data, app=app) for p in made]


def test_an_app_of_the_devices_owner_answers_and_keeps_its_state(tmp_path, caplog):
    caplog.set_level("INFO", "triplane")

    async def story():
        async with cloud_of(tmp_path) as cloud:
            plain = await process_of(cloud, tmp_path, "cem", 2)
            with started(*await app_processes(cloud, tmp_path), plain):
                run = await done_run(cloud, rounds=3, flower=strategy("FedAvg", app=True))
            return run, [await parameters(cloud, name) for name in ("tiny@1", run.result)]

    run, (before, after) = within(story())
    assert [(r.number, r.evaluates, r.counted) for r in run.rounds] == [
        (1, False, 2), (2, False, 2), (3, False, 2), (3, True, 2),
    ]  # fmt: skip
    assert [m.device for m in run.members] == ["ann", "bob"]
    moved = 3 * (0.25 * 10 + 0.75 * 20) / 30
    for name, array in before.items():
        np.testing.assert_allclose(after[name], array + moved, rtol=1e-5, err_msg=name)
    (record,) = (r for r in caplog.records if r.message == "strategy evaluated")
    assert record.metrics == {"rounds": 4.0}


async def killed_at(cloud, when):
    """Kill the strategy's process once the run's newest round is `when`."""
    while True:
        moved = cloud.federation.moved
        run = (await cloud.federation.runs())[0]
        found = cloud.federation._flower._runs.get(run.id)
        if run.round >= when and found is not None and found.process is not None:
            os.killpg(found.process.pid, signal.SIGKILL)
            return
        await moved.wait()


def test_a_killed_strategy_goes_on_to_the_same_bits_from_what_it_remembered(tmp_path, caplog):
    fields = {"model": "tiny@1", "rounds": 4, "flower": strategy("fedadam", eta=0.05)}

    async def story():
        async with cloud_of(tmp_path) as cloud:
            clients = await clients_of(cloud, tmp_path)
            async with taking_part(*clients):
                calm = await done_run(cloud, **fields)
                killing = asyncio.create_task(killed_at(cloud, 3))
                killed = await done_run(cloud, **fields)
                await killing
            return [await parameters(cloud, run.result) for run in (calm, killed)]

    calm, killed = within(story())
    assert "strategy begun anew" in caplog.text
    for name, array in calm.items():
        np.testing.assert_array_equal(killed[name], array, err_msg=name)
