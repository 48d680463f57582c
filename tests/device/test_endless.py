"""A graph that never ends does not keep a device: deadline, the cloud and its owner each end it."""

import asyncio
import json
import os
import signal
from typing import Any

import psutil
import pytest
from tests.device.devices import Process, save_shard, started
from tests.device.endless import entries, greedy
from tests.device.stage import client_at, lease, serving, staged
from tests.federated.core import plans
from tests.support.deadlines import within

from triplane.proto import federation_pb2 as pb

pytestmark = pytest.mark.slow

SHARD = plans.shard(held_out=6)
WORK: dict[str, Any] = {
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


def process_at(stage, home, **settings):
    """`triplane device run` of a device that is enrolled at the stage."""
    client_at(stage, home, SHARD)
    (home / "device.json").write_text(json.dumps(settings))
    save_shard(home / "samples.npz", SHARD)
    return Process(home, home / "samples.npz")


def story_of_process(folder, tell, **settings):
    """Run `tell(stage, process)` with a device process at work; what it returns."""

    async def story():
        async with staged(folder / "stage") as stage:
            process = process_at(stage, folder / "ann", **settings)
            with started(process):
                await stage.offer()
                return await tell(stage, process)

    return within(story(), 120)


async def honest_work(stage):
    stage.tell(stage.task(2))
    return (await stage.contribution(lease(2))).WhichOneof("outcome")


@pytest.mark.parametrize("entry", WORK)
def test_a_process_goes_on_after_the_deadline_of_a_graph_that_never_ends(tmp_path, entry):
    async def tell(stage, _process):
        stage.tell(task_of(stage, entry, deadline_s=3.0))
        return (await stage.contribution(lease(1))).declined, await honest_work(stage)

    declined, then = story_of_process(tmp_path, tell)
    assert "the task was not done by its deadline" in declined
    assert then == "update"


def test_a_process_goes_on_when_the_cloud_withdraws_a_graph_that_never_ends(tmp_path):
    async def tell(stage, _process):
        stage.tell(task_of(stage, "local_update"))
        await graph_runs(tmp_path, stage)
        return await honest_work(stage), stage.heard

    then, heard = story_of_process(tmp_path, tell)
    assert then == "update"
    assert not any(isinstance(m, pb.Contribution) and m.lease == lease(1) for m in heard)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_process_whose_graph_never_ends_and_its_child(tmp_path, number):
    async def tell(stage, process):
        stage.tell(task_of(stage, "local_update"))
        await graph_runs(tmp_path, stage)
        (child,) = psutil.Process(process.child.pid).children()
        process.child.send_signal(number)
        code = await asyncio.to_thread(process.child.wait, 60)
        return code, child.is_running(), process.log()

    code, runs, log = story_of_process(tmp_path, tell)
    assert (code, runs) == (0, False)
    assert "Traceback" not in log
    assert "device stopped" in log


def test_a_child_ends_with_a_process_that_is_killed_and_the_next_one_works(tmp_path):
    async def tell(stage, process):
        stage.tell(task_of(stage, "local_update"))
        await graph_runs(tmp_path, stage)
        (child,) = psutil.Process(process.child.pid).children()
        await asyncio.to_thread(process.kill)
        await asyncio.to_thread(process.start)
        await asyncio.to_thread(psutil.wait_procs, [child], 60)
        return child.is_running(), await honest_work(stage)

    assert story_of_process(tmp_path, tell) == (False, "update")


def test_a_graph_that_takes_all_memory_is_declined_with_the_limit(tmp_path):
    async def tell(stage, _process):
        plan, digest = stage.plan(entries=entries("local_update", "loss", greedy))
        stage.tell(stage.task(1, plan=plan, state=stage.state(digest)))
        return (await stage.contribution(lease(1))).declined, await honest_work(stage)

    declined, then = story_of_process(tmp_path, tell, max_memory_bytes=256 << 20)
    assert "memory" in declined
    assert "max_memory_bytes" in declined
    assert then == "update"


def test_a_graph_that_takes_too_much_processor_time_is_declined_with_the_limit(tmp_path):
    async def tell(stage, _process):
        stage.tell(task_of(stage, "local_update"))
        return (await stage.contribution(lease(1))).declined, await honest_work(stage)

    declined, then = story_of_process(tmp_path, tell, max_cpu_s=1.0)
    assert "more than 1 s of processor time (max_cpu_s" in declined
    assert then == "update"


def test_a_crash_of_a_graph_is_declined_and_the_device_goes_on(tmp_path):
    """The child that runs the graph is killed, as a fault in a kernel would."""

    async def tell(stage, process):
        stage.tell(task_of(stage, "local_update"))
        await graph_runs(tmp_path, stage)
        (child,) = psutil.Process(process.child.pid).children()
        os.kill(child.pid, signal.SIGSEGV)
        return (await stage.contribution(lease(1))).declined, await honest_work(stage)

    declined, then = story_of_process(tmp_path, tell)
    assert "ended by signal SIGSEGV" in declined
    assert then == "update"


def test_a_child_that_died_while_it_had_nothing_to_do_costs_no_task(tmp_path):
    async def tell(stage, process):
        stage.tell(stage.task(1))
        await stage.contribution(lease(1))
        (child,) = psutil.Process(process.child.pid).children()
        child.kill()
        await asyncio.to_thread(zombie, child)
        return await honest_work(stage)

    assert story_of_process(tmp_path, tell) == "update"


def zombie(process):
    """Return when the process has ended; only its parent, the device, may take it away."""
    while process.status() != psutil.STATUS_ZOMBIE:
        pass
