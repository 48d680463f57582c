"""Runs that a strategy of Flower decides, in a cloud with real processes for strategies."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tests.cloud.federation import given
from tests.device.devices import client_of, cloud_of, process_of, started, within

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
