"""Devices and cloud in masked runs, over mutual TLS."""

import asyncio

import numpy as np
import pytest
from tests.cloud.federation.given import ended, start_request
from tests.cloud.federation.masked import masked_request
from tests.device.devices import client_of, cloud_of, taking_part
from tests.support.deadlines import within

from triplane.proto import federation_pb2 as pb
from triplane.unified_ir.convert.conversion import read_model

NAMES = ("ann", "bob", "cem")

pytestmark = [pytest.mark.slow, pytest.mark.long]


async def model_of(cloud, reference):
    version = await cloud.registry.version(reference)
    module, _ = await asyncio.to_thread(read_model, cloud.blobs.find(version.blob))
    return {name: x.array.astype(np.float64) for name, x in module.state.items()}


def distance(one, other, names):
    return np.sqrt(sum(float(np.square(one[n] - other[n]).sum()) for n in names))


async def result_of(cloud, request):
    begun = await cloud.federation.begin(request, by="operator")
    run = await ended(cloud, begun.id)
    assert run.phase == pb.Run.DONE, run.reason
    return run, await model_of(cloud, run.result)


def test_a_masked_run_of_devices_gives_the_model_of_a_run_in_the_clear_but_for_the_rounding(
    tmp_path,
):
    async def story():
        async with cloud_of(tmp_path) as cloud:
            clients = [await client_of(cloud, tmp_path, n, i) for i, n in enumerate(NAMES)]
            async with taking_part(*clients):
                masked, hidden = await result_of(cloud, masked_request(model="tiny@1", norm=0.5))
                request = start_request(
                    model="tiny@1", cohort={"devices": 3, "quorum": 1.0},
                    robustness=pb.Robustness(norm_bound="0.5"),
                )  # fmt: skip
                _, clear = await result_of(cloud, request)
            return masked, await model_of(cloud, "tiny@1"), hidden, clear

    run, before, hidden, clear = within(story())
    assert [(r.number, r.evaluates, r.counted) for r in run.rounds] == [
        (1, False, 3), (2, False, 3), (2, True, 3),
    ]  # fmt: skip
    assert not run.refusals.reasons
    assert all(m.counted == 3 and not m.dropped for m in run.members)
    assert 0 < distance(hidden, clear, before) < 0.1 * distance(clear, before, before)


def test_the_bound_of_a_masked_run_follows_the_bits_of_devices(tmp_path):
    async def story():
        async with cloud_of(tmp_path) as cloud:
            clients = [await client_of(cloud, tmp_path, n, i) for i, n in enumerate(NAMES)]
            async with taking_part(*clients):
                request = masked_request(model="tiny@1", norm="adaptive:64", rounds=4)
                return (await result_of(cloud, request))[0]

    run = within(story())
    assert not run.refusals.reasons
    bounds = [r.norm_bound for r in run.rounds if not r.evaluates]
    assert bounds == pytest.approx([64 * np.exp(-i / 2) for i in range(4)]), "all are short"


@pytest.mark.parametrize("step", ["inputs", "signatures", "reveals"])
def test_a_run_that_is_stopped_while_devices_mask_finishes_the_round_and_can_be_resumed(
    tmp_path, step
):
    def is_there(cloud, run):
        live = cloud.federation.live.get(run.id)
        round_ = live.projection.state.round if live else None
        return round_ is not None and round_.masked is not None and round_.masked.step == step

    async def story():
        async with cloud_of(tmp_path) as cloud:
            clients = [await client_of(cloud, tmp_path, n, i) for i, n in enumerate(NAMES)]
            async with taking_part(*clients):
                request = masked_request(model="tiny@1", rounds=3)
                run = await cloud.federation.begin(request, by="operator")
                while not is_there(cloud, run):
                    await cloud.federation.moved.wait()
                stopped = await cloud.federation.halt(run.id, reason="lunch", by="operator")
                await cloud.federation.resume(run.id, reason="", by="operator")
                return stopped, await ended(cloud, run.id)

    stopped, run = within(story())
    assert (stopped.phase, stopped.reason) == (pb.Run.STOPPED, "lunch")
    assert (run.phase, run.reason) == (pb.Run.DONE, "")
    assert [r.counted for r in run.rounds] == [3, 3, 3, 3]
