"""Runs that a strategy of Flower decides, in a cloud with real processes for strategies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import textwrap
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from tests.cloud.federation import given
from tests.device.devices import Process, client_of, cloud_of, process_of, started, taking_part
from tests.support.deadlines import within

pytest.importorskip("flwr", reason="needs the extra [flower]")

from triplane.cloud.home import Home
from triplane.cloud.server import running
from triplane.proto import federation_pb2 as pb
from triplane.unified_ir.files.container import Container

pytestmark = pytest.mark.slow

DEADLINE_S = 200.0
"""Of one story: several runs, each with two interpreters to start."""


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

    run, (theirs, ours), version = within(story(), DEADLINE_S)
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


def test_an_app_of_the_devices_owner_answers_and_keeps_its_state_beyond_a_cloud(tmp_path, caplog):
    caplog.set_level("INFO", "triplane")

    async def story():
        with contextlib.ExitStack() as devices:
            async with cloud_of(tmp_path) as cloud:
                plain = await process_of(cloud, tmp_path, "cem", 2)
                devices.enter_context(started(*await app_processes(cloud, tmp_path), plain))
                asked = given.start_request(rounds=3, flower=strategy("FedAvg", app=True))
                made = await cloud.federation.begin(asked, by="operator")
                await process_in_round(cloud, made.id, 2)
            async with running(Home(tmp_path / "home"), port=cloud.port) as cloud:
                run = await given.ended(cloud, made.id)
                return run, [await parameters(cloud, name) for name in ("tiny@1", run.result)]

    run, (before, after) = within(story(), DEADLINE_S)
    assert [(r.number, r.evaluates, r.counted) for r in run.rounds] == [
        (1, False, 2), (2, False, 2), (3, False, 2), (3, True, 2),
    ]  # fmt: skip
    assert [m.device for m in run.members] == ["ann", "bob"]
    moved = 3 * (0.25 * 10 + 0.75 * 20) / 30
    for name, array in before.items():
        np.testing.assert_allclose(after[name], array + moved, rtol=1e-5, err_msg=name)
    (record,) = (r for r in caplog.records if r.message == "strategy evaluated")
    assert record.metrics == {"rounds": 4.0}


def test_a_killed_strategy_and_a_new_cloud_end_with_the_same_bits(tmp_path, caplog):
    fields = {"model": "tiny@1", "rounds": 6, "flower": strategy("fedadam", eta=0.05)}

    async def story():
        async with contextlib.AsyncExitStack() as devices:
            async with cloud_of(tmp_path) as cloud:
                await devices.enter_async_context(taking_part(*await clients_of(cloud, tmp_path)))
                calm = await done_run(cloud, **fields)
                made = await cloud.federation.begin(given.start_request(**fields), by="operator")
                os.killpg(await process_in_round(cloud, made.id, 2), signal.SIGKILL)
                await process_in_round(cloud, made.id, 4)
            async with running(Home(tmp_path / "home"), port=cloud.port) as cloud:
                killed = await given.ended(cloud, made.id)
                return [await parameters(cloud, run.result) for run in (calm, killed)]

    calm, killed = within(story(), DEADLINE_S)
    assert "strategy begun anew" in caplog.text
    for name, array in calm.items():
        np.testing.assert_array_equal(killed[name], array, err_msg=name)


LIAR = """
    import numpy as np
    from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp()

    def arrays_of(message, device, number):
        arrays = {k: v.numpy() for k, v in message.content["arrays"].items()}
        name = min(arrays)
        if device == "bob" and number == 2:
            arrays[name] = np.full_like(arrays[name], np.nan)
        if device == "bob" and number == 4:
            arrays[name] = arrays[name][..., None]
        if device == "bob" and number == 7:
            del arrays[name]
        return ArrayRecord({k: Array(v) for k, v in arrays.items()})

    @app.train()
    def train(message, context):
        device, number = context.node_config["device"], message.content["config"]["server-round"]
        if device == "bob" and number == 1:
            raise OSError("the camera is unplugged")
        told = {"num-examples": 10**6 if device == "bob" and number == 12 else 5}
        if device == "bob":
            told["odd"] = 1
        records = {"arrays": arrays_of(message, device, number), "metrics": MetricRecord(told)}
        return Message(RecordDict(records), reply_to=message)
"""


def test_replies_that_do_not_fit_are_refused_with_a_word_and_stop_nothing(tmp_path):
    async def story():
        async with cloud_of(tmp_path) as cloud:
            with started(*await app_processes(cloud, tmp_path, text=LIAR)):
                fields = {"rounds": 12, "cohort": {"devices": 2, "quorum": 0.5}}
                return await done_run(cloud, flower=strategy(app=True), **fields)

    run = within(story(), DEADLINE_S)
    found = {refusal.kind: refusal.newest for refusal in run.refusals.reasons}
    assert found.keys() == {"nonfinite", "shape", "names", "figures"}
    assert "1 to 24 num-examples, got 1000000" in found["figures"]
    learnt = [(r.counted, r.refused) for r in run.rounds if not r.evaluates]
    # A device rests after each refusal, for twice as many rounds as after the one before.
    assert learnt == [(1, int(number in {1, 2, 4, 7, 12})) for number in range(1, 13)]


SOME = """
    import random
    from flwr.serverapp.strategy import FedAvg

    class Some(FedAvg):
        \"\"\"Asks one device a round, fewer to evaluate, and counts its rounds.\"\"\"

        def __init__(self, fails_in=0):
            super().__init__(
                fraction_train=0.1, min_train_nodes=1, min_available_nodes=1, fraction_evaluate=0.0
            )
            self.seen, self.fails_in = [], fails_in

        def aggregate_train(self, server_round, replies):
            replies = list(replies)
            self.seen.append([server_round, len(replies)])
            if server_round == self.fails_in:
                raise OSError(f"no room after {self.seen}")
            return super().aggregate_train(server_round, replies)

    def make(fails_in=0):
        return Some(fails_in)
"""
ALONE = {"cohort": {"devices": 3, "quorum": 0.3}}


def test_a_strategy_of_the_operators_asks_whom_it_likes_and_may_fail(tmp_path):
    async def story():
        async with cloud_of(tmp_path) as cloud:
            written(tmp_path / "home" / "strategies" / "some.py", SOME)
            clients = await clients_of(cloud, tmp_path, ("ann", "bob", "cem"))
            async with taking_part(*clients):
                asked = strategy("some:make")
                done = await done_run(cloud, rounds=4, flower=asked, **ALONE)
                asked = strategy("some:make", fails_in=2)
                failed = await ended_run(cloud, rounds=4, flower=asked, **ALONE)
                quorum = await ended_run(cloud, flower=strategy("some:make"))
            return done, failed, quorum, await cloud.registry.version(done.result)

    done, failed, quorum, version = within(story(), DEADLINE_S)
    learnt = [r for r in done.rounds if not r.evaluates]
    assert [(r.asked, r.counted) for r in learnt] == [(1, 1)] * 4
    assert sum(m.counted for m in done.members) == 4
    assert len([m for m in done.members if m.counted]) > 1
    assert [r.asked for r in done.rounds if r.evaluates] == [0]
    assert done.spec.flower.sha256.hex()[:16] in version.lineage.note
    assert failed.phase == pb.Run.FAILED
    assert "OSError (some.py:18): no room after [[1, 1], [2, 1]]" in failed.reason
    assert quorum.phase == pb.Run.FAILED
    assert "asks 1 of 2 devices, a round needs 2 updates" in quorum.reason


GREEDY = """
    from flwr.serverapp.strategy import FedAvg

    strategy = FedAvg(min_available_nodes=3)
"""
DYING = """
    import os
    from flwr.serverapp.strategy import FedAvg

    class Dying(FedAvg):
        def configure_train(self, *_):
            os._exit(3)

    strategy = Dying()
"""
PAGE = Path(__file__).parents[4] / "docs" / "federated.md"


def test_the_strategy_of_the_page_runs_and_those_that_cannot_go_on_stop_and_say_why(tmp_path):
    fence = r"/strategies/halving\.py <<'END'\n(.*?)END\n"
    (example,) = re.findall(fence, PAGE.read_text(), re.DOTALL)

    async def story():
        async with cloud_of(tmp_path) as cloud:
            folder = tmp_path / "home" / "strategies"
            written(folder / "halving.py", example)
            written(folder / "greedy.py", GREEDY)
            written(folder / "dying.py", DYING)
            async with taking_part(*await clients_of(cloud, tmp_path)):
                done = await done_run(cloud, rounds=1, flower=strategy("halving", rate=0.1))
                stopped = await ended_run(cloud, flower=strategy("greedy"))
                return done, stopped, await ended_run(cloud, flower=strategy("dying"))

    done, stopped, dead = within(story(), DEADLINE_S)
    assert done.spec.flower.strategy == "halving:strategy"
    assert stopped.phase == pb.Run.STOPPED
    assert "waits for more than the 2 devices of round 1" in stopped.reason
    assert dead.phase == pb.Run.STOPPED
    assert "process ended with status 3" in dead.reason


def test_a_run_that_is_stopped_ends_its_process_and_goes_on_when_resumed(tmp_path):
    async def story():
        async with cloud_of(tmp_path) as cloud:
            (ann,) = await clients_of(cloud, tmp_path, ("ann",))
            async with taking_part(ann):
                fields = {"cohort": {"devices": 1}, "rounds": 30, "flower": strategy()}
                made = await cloud.federation.begin(given.start_request(**fields), by="operator")
                pid = await process_in_round(cloud, made.id, 3)
                await cloud.federation.halt(made.id, reason="lunch", by="operator")
                await ended_process(pid)
                stopped = await cloud.federation.run(made.id)
                await cloud.federation.resume(made.id, reason="", by="operator")
                other = await process_in_round(cloud, made.id, stopped.round + 1)
                return stopped, pid, other, await given.ended(cloud, made.id)

    stopped, pid, other, done = within(story(), DEADLINE_S)
    assert (stopped.phase, stopped.reason) == (pb.Run.STOPPED, "lunch")
    assert other != pid
    assert done.phase == pb.Run.DONE, done.reason
    assert len({r.number for r in done.rounds if r.counted and not r.evaluates}) == 30


async def process_in_round(cloud, run_id, number):
    """The strategy's process once the run is that far."""
    while True:
        moved = cloud.federation.moved
        run = await cloud.federation.run(run_id)
        found = cloud.federation._flower._runs.get(run_id)
        if run.round >= number and found is not None and found.process is not None:
            return found.process.pid
        await moved.wait()


async def ended_process(pid):
    descriptor = None
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop, gone = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, gone.set)
    try:
        await gone.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
