"""A graph that never ends does not keep a device: deadline, the cloud and its owner each end it."""

import asyncio

import pytest
from tests.device.devices import within
from tests.device.endless import entries
from tests.device.stage import client_at, lease, serving, staged
from tests.federated.core import plans

from triplane.proto import federation_pb2 as pb

pytestmark = pytest.mark.slow

SHARD = plans.shard(held_out=6)
WORK = {
    "local_update": ("loss", {"learn": pb.Learn()}),
    "evaluate": ("accuracy", {"evaluate": pb.Evaluate(steps=1)}),
}


def task_of(stage, entry, number=1, **changes):
    output, work = WORK[entry]
    plan, digest = stage.plan(entries=entries(entry, output))
    return stage.task(number, plan=plan, state=stage.state(digest), **work, **changes)


async def graph_runs(folder, stage):
    """The device has plan and state of its task: what follows is the graph."""
    while len([p for p in (folder / "ann/plans").glob("*") if p.is_file()]) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("entry", WORK)
def test_a_deadline_ends_a_graph_that_never_ends_and_the_cloud_reads_why(tmp_path, entry):
    async def story():
        async with (
            staged(tmp_path / "stage") as stage,
            serving(client_at(stage, tmp_path / "ann", SHARD)),
        ):
            await stage.offer()
            stage.tell(task_of(stage, entry, deadline_s=1.0))
            told = await stage.contribution(lease(1))
            stage.tell(stage.task(2))
            return told.declined, await stage.contribution(lease(2))

    declined, honest = within(story())
    assert "the task was not done by its deadline" in declined
    assert honest.WhichOneof("outcome") == "update"


@pytest.mark.parametrize("entry", WORK)
def test_the_cloud_ends_a_graph_that_never_ends_by_withdrawing_its_task(tmp_path, entry):
    async def story():
        async with (
            staged(tmp_path / "stage") as stage,
            serving(client_at(stage, tmp_path / "ann", SHARD)),
        ):
            await stage.offer()
            stage.tell(task_of(stage, entry))
            await graph_runs(tmp_path, stage)
            stage.tell(stage.task(2))
            return await stage.contribution(lease(2)), stage.heard

    honest, heard = within(story())
    assert honest.WhichOneof("outcome") == "update"
    assert not any(isinstance(m, pb.Contribution) and m.lease == lease(1) for m in heard)


@pytest.mark.parametrize("entry", WORK)
def test_an_application_ends_a_graph_that_never_ends_by_stop(tmp_path, entry):
    async def story():
        async with staged(tmp_path / "stage") as stage:
            client = client_at(stage, tmp_path / "ann", SHARD)
            working = asyncio.create_task(client.serve())
            await stage.offer()
            stage.tell(task_of(stage, entry))
            await graph_runs(tmp_path, stage)
            client.stop()
            await working

    within(story())
