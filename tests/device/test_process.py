"""The device as a real process: what it imports and takes, how it starts, stops and dies."""

import asyncio
import contextlib
import random
import re
import subprocess
import sys

import numpy as np
import pytest
from tests.cloud.federation import given
from tests.device.devices import Process, cloud_of, process_of, save_shard, started
from tests.support.deadlines import within

from triplane.cloud.registry import Push
from triplane.proto import federation_pb2 as pb
from triplane.unified_ir import nn, optim, train
from triplane.unified_ir.federated.core.learn import Shard
from triplane.unified_ir.ir import TensorSpec

pytestmark = pytest.mark.slow

READY_S = 1.0
WEIGHTLESS = re.compile(
    r"\| +(onnx|flwr|dp_accounting|cryptography|click|rich|sqlalchemy|tuf|ml_dtypes|torch|jax)\b"
)
MIB = 1 << 20


async def one_run(cloud, **fields):
    made = await cloud.federation.begin(given.start_request(**fields), by="operator")
    run = await given.ended(cloud, made.id)
    assert run.phase == pb.Run.DONE, run.reason
    return await cloud.registry.version(run.result), run


def test_a_process_says_that_it_is_ready_learns_and_stops_when_told(tmp_path):
    async def story():
        async with cloud_of(tmp_path) as cloud:
            process = await process_of(cloud, tmp_path, "ann", 0)
            with started(process):
                await one_run(cloud, cohort={"devices": 1})
                return process.said, await asyncio.to_thread(process.stop), process.log()

    said, code, log = within(story())
    assert said["device"] == "ann"
    assert (said["population"], said["examples"], said["held_out"]) == (given.POPULATION, 24, 12)
    assert code == 0
    for event in ("device started", "task begun", "contributed", "update settled", "stopped"):
        assert event in log


def test_a_whole_run_imports_nothing_of_weight(tmp_path):
    """Every import of the device and of the process for its tasks is on standard error."""

    async def story():
        async with cloud_of(tmp_path) as cloud:
            process = await process_of(cloud, tmp_path, "ann", 0)
            process.interpreter = ("/usr/bin/env", "PYTHONPROFILEIMPORTTIME=1", sys.executable)
            with started(process):
                await one_run(cloud, cohort={"devices": 1})
            return process.log()

    log = within(story())
    assert "| onnxruntime" in log.replace("  ", "")
    assert not WEIGHTLESS.findall(log)


def test_the_process_of_the_session_imports_neither_onnxruntime_nor_what_verifies():
    """16 MB that the child has already."""
    heavy = "{'onnxruntime', 'tuf', 'cryptography', 'onnx'}"
    code = f"import sys, triplane.device.client; sys.exit(str({heavy} & set(sys.modules) or ''))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""


def test_it_is_ready_within_a_second_of_a_free_processor(tmp_path):
    """Processor seconds, which other processes of the machine do not lengthen."""

    async def story():
        async with cloud_of(tmp_path) as cloud:
            process = await process_of(cloud, tmp_path, "ann", 0)
            with started(process):
                return process.processor_s()

    assert within(story()) <= READY_S


def wide_model(folder):
    """About 20 MB of parameters, in one matrix for the most part."""
    cell = nn.Sequential(nn.Dense(500, 10_000), nn.Tanh(), nn.Dense(10_000, 10))
    trainer = train.Trainer(cell, loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.1))
    trainer.prepare(TensorSpec(("N", 500), "float32"), TensorSpec(("N",), "int64"))
    module = trainer.export(("predict", "evaluate", "loss"))
    module.save(folder / "wide.tpm")
    size = sum(t.array.nbytes for t in module.state.values())
    return (folder / "wide.tpm").read_bytes(), size


@pytest.mark.parametrize(
    "compression", ["int8", *(pytest.param(c, marks=pytest.mark.deep) for c in ("", "top-k"))]
)
def test_its_memory_is_150_mb_and_5_times_the_parameters(tmp_path, compression):
    async def story():
        async with cloud_of(tmp_path) as cloud:
            data, size = wide_model(tmp_path)
            blob = cloud.blobs.put(data)
            push = Push(model="wide", blob=blob, key=b"k" * 16)
            await cloud.registry.push(push, by="operator")
            process = await process_of(cloud, tmp_path, "ann", 0)
            rng = np.random.default_rng(0)
            x, y = rng.normal(size=(100, 500)).astype(np.float32), rng.integers(0, 10, 100)
            save_shard(process.data, Shard({"x": x[20:], "y": y[20:]}, {"x": x[:20], "y": y[:20]}))
            with started(process):
                await one_run(
                    cloud, model="wide", cohort={"devices": 1}, evaluate_every=1, rounds=2,
                    compression=compression, keep=0.1 if compression == "top-k" else 0,
                )  # fmt: skip
                return process.peak_bytes(), size

    peak, size = within(story())
    assert peak <= 150 * MIB + 5 * size


@pytest.mark.parametrize(
    ("rounds", "most_kills"),
    [pytest.param(60, 10, marks=pytest.mark.long), pytest.param(400, 60, marks=pytest.mark.deep)],
)
def test_killed_devices_end_with_the_very_model_of_undisturbed_ones(tmp_path, rounds, most_kills):
    """Learning is by seed, round and name; int8's remainder and the update survive each kill."""

    async def story():
        async with cloud_of(tmp_path) as cloud:
            processes = [
                await process_of(cloud, tmp_path, name, k) for k, name in enumerate(("ann", "bob"))
            ]
            spec = {"model": "tiny@1", "rounds": rounds, "compression": "int8"}
            with started(*processes):
                undisturbed, _ = await one_run(cloud, **spec)
                over = asyncio.Event()
                killing = asyncio.create_task(killed_often(processes, most_kills, over))
                try:
                    disturbed, run = await one_run(cloud, **spec)
                finally:
                    over.set()
                    kills = await killing
            return undisturbed, disturbed, run, kills

    undisturbed, disturbed, run, kills = within(story(), 900)
    assert kills >= 3
    assert disturbed.model_digest == undisturbed.model_digest
    assert all(r.counted == 2 for r in run.rounds)


async def killed_often(processes, most, over):
    """Kill and start one of them again and again, at instants that nothing announces."""
    rng = random.Random(5)
    for kills in range(most):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(rng.uniform(0.02, 0.2)):
                await over.wait()
        if over.is_set():
            return kills
        process = rng.choice(processes)
        await asyncio.to_thread(process.kill)
        await asyncio.to_thread(process.start)
    return most


def test_one_home_is_one_process(tmp_path):
    async def story():
        async with cloud_of(tmp_path) as cloud:
            process = await process_of(cloud, tmp_path, "ann", 0)
            with started(process):
                return await asyncio.to_thread(
                    subprocess.run, process.command(), capture_output=True, text=True, timeout=30
                )

    second = within(story())
    assert second.returncode == 1
    assert "another process works in" in second.stderr


def test_a_home_without_an_identity_says_what_to_do(tmp_path):
    (tmp_path / "empty").mkdir()
    save_shard(tmp_path / "data.npz", given.shard(0))
    command = Process(tmp_path / "empty", tmp_path / "data.npz").command()
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert "triplane device enrol TOKEN --cloud HOST:PORT" in done.stderr


def test_a_home_that_cannot_be_written_is_one_line_not_a_traceback(tmp_path):
    home = tmp_path / "home"
    (home / "identity").mkdir(parents=True)
    (home / "identity" / "cert.pem").touch()
    (home / "lock").mkdir()
    save_shard(tmp_path / "data.npz", given.shard(0))
    command = Process(home, tmp_path / "data.npz").command()
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert done.stderr.startswith("device: ")
    assert str(home / "lock") in done.stderr
    assert len(done.stderr.splitlines()) == 1
