"""Whole masked rounds of real devices over mutual TLS, some of which are killed on the way."""

import asyncio
import contextlib
import logging
import random
from collections import Counter

import numpy as np
import pytest
from tests.device.devices import Process, save_shard, started
from tests.device.masked_stage import MaskedRun, MaskedStage
from tests.device.stage import RUN, client_at, lease, serving, staged
from tests.federated.core import plans
from tests.support.deadlines import within
from tests.support.masked_rounds import MaskedRound

from triplane.device.client import Graphs
from triplane.device.home import DeviceHome
from triplane.device.memory import Memory
from triplane.proto import federation_pb2 as pb
from triplane.unified_ir.federated.core.learn import Work, learn

pytestmark = pytest.mark.long
SIZES = {"parameters": 2, "buffers": 1}
NAMES = ("ann", "ben", "cat", "dan", "eve")


def shard_of(name):
    number = NAMES.index(name)
    return plans.shard(n=12 + 4 * number, held_out=6, seed=number)


def plain(folder, name, state=(), round_=1):
    """The change that a device learns from a state, and its examples."""
    work = Work(
        run=RUN, round=round_, device=name, seed=7, steps=3, batch_size=4, support=4, query=3
    )
    plan = plans.plan(folder)
    plan.assign(dict(state))
    learned = learn(plan, work, shard_of(name))
    return learned.change, learned.examples


def client_of(stage, folder, name, graphs):
    if graphs is Graphs.IN_PROCESS:
        return client_at(stage, folder / name, shard_of(name), name=name)
    save_shard(folder / f"{name}.npz", shard_of(name))
    return client_at(stage, folder / name, folder / f"{name}.npz", name=name, graphs=graphs)


def test_a_device_killed_after_it_masked_never_contributes_to_that_state_again(tmp_path):
    """The whole device, which is started again; the cloud asks for the round once more."""

    async def story():
        async with staged(tmp_path / "stage", kind=MaskedStage) as stage:
            plan, digest = stage.plan()
            files = {"plan": plan, "state": stage.state(digest)}
            client_of(stage, tmp_path, "ann", Graphs.CHILD)
            process = Process(tmp_path / "ann", tmp_path / "ann.npz")
            with started(process):
                await stage.offers("ann")
                first, asks = await masked_by(stage, files, attempt=0)
                process.kill()
                process.start()
                left = await stage.ask("ann", stage.task(1, **files, masking=asks))
                again = MaskedRound(RUN, 1, files["state"].sha256, **SIZES, attempt=1)
                refused = await stage.ask("ann", stage.task(2, **files, masking=again.step()))
                return first, left.declined, refused.declined

    first, left, refused = within(story())
    assert first.input.data
    assert "the process that held them has ended" in left
    assert "did so in round 1, attempt 0, and is asked again for round 1, attempt 1" in refused


async def masked_by(stage, files, **terms):
    """The masked input of the device ann in a round with simulated ones, and what comes next."""
    round_ = MaskedRound(RUN, 1, files["state"].sha256, **SIZES, simulated=3, **terms)
    run = MaskedRun(stage, round_, files, ["ann"])
    answers = await run.phase(round_.step())
    asks = round_.share(*answers.values())
    run.positions = {"ann": round_.position(answers["ann"].keys.device)}
    asks = round_.mask(*(await run.phase(asks)).values())
    answers = await run.phase(asks)
    return answers["ann"], round_.sign(*answers.values())


def kill_child(client):
    """Kill the process that does the tasks of a client, as `kill -9` does, and wait for its end.

    A task that came before its end would be declined because it ended.
    """
    child = client._working._runner._child
    child.kill()
    assert child.ends_within(30.0)


async def played(folder, graphs, names, kills=()):
    """The run, and the mean over the devices that were counted. kills: a device by step."""
    async with contextlib.AsyncExitStack() as stack:
        stage = await stack.enter_async_context(staged(folder / "stage", kind=MaskedStage))
        clients = {name: client_of(stage, folder, name, graphs) for name in names}
        for client in clients.values():
            await stack.enter_async_context(serving(client))
        await stage.offers(*names)
        plan, digest = stage.plan()
        state = stage.state(digest)
        round_ = MaskedRound(RUN, 1, state.sha256, parameters=2, buffers=1, encoding={"bits": 16})
        run = MaskedRun(stage, round_, {"plan": plan, "state": state}, names)
        mean = round_.mean(
            await run.play(
                lambda step: [kill_child(clients[n]) for s, n in dict(kills).items() if s == step]
            )
        )
        return run, mean


def check(folder, run, mean, counted):
    """Compare with the plain weighted mean over the counted devices."""
    compare(run, mean, [plain(folder, name) for name in counted])


def compare(run, mean, changes):
    (w, bias), weight = mean
    caps = [min(examples, 32) for _, examples in changes]
    assert weight == sum(caps)
    for section, actual, name in zip(
        run.round.codec.sections, (w, bias), ("w", "bias"), strict=True
    ):
        wanted = sum(
            change[name].reshape(-1) * cap for (change, _), cap in zip(changes, caps, strict=True)
        )
        bound = section.error_bound(len(changes)) * 32 / weight
        assert np.linalg.norm(actual - wanted / weight) < bound
        assert np.linalg.norm(wanted / weight) > 5 * bound, "the bound tells something"


@pytest.mark.parametrize("graphs", Graphs)
def test_the_masked_sum_of_devices_is_their_plain_weighted_sum(tmp_path, graphs):
    run, mean = within(played(tmp_path, graphs, NAMES[:3]))
    assert run.declined == {}
    check(tmp_path, run, mean, NAMES[:3])


@pytest.mark.parametrize(
    ("step", "is_counted"), [("share", False), ("mask", False), ("sign", True), ("unmask", True)]
)
def test_a_device_killed_before_a_step_leaves_and_the_sum_of_the_others_is_right(
    tmp_path, step, is_counted, caplog
):
    """What it masked before it was killed stays in the sum."""
    caplog.set_level(logging.WARNING)
    run, mean = within(played(tmp_path, Graphs.CHILD, NAMES, {step: "cat"}))
    assert list(run.declined) == ["cat"]
    assert "the process that held them has ended" in run.declined["cat"]
    counted = [name for name in NAMES if is_counted or name != "cat"]
    assert run.counted == counted
    check(tmp_path, run, mean, counted)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("rounds", [4, pytest.param(360, marks=pytest.mark.deep)])
def test_devices_killed_at_random_instants_count_once_or_not_at_all(tmp_path, rounds):
    """In each round a device is killed during a step; what it learned for itself follows the sum.

    `head` counts the steps of a device: three for each round that counted it.
    """
    rng = random.Random(rounds)
    counted: Counter[str] = Counter()
    ends: Counter[str] = Counter()

    async def one_round(stage, clients, number, settled):
        plan, digest = stage.plan()
        w = rng.uniform(-1, 1) * np.ones((2, 1), np.float32)
        state = stage.state(digest, w=w)
        round_ = MaskedRound(RUN, number, state.sha256, **SIZES, encoding={"bits": 16})
        files = {"plan": plan, "state": state, "round": number}
        run = MaskedRun(stage, round_, files, NAMES, first=10 * number, settled=settled)
        victim, at = rng.choice(NAMES), rng.choice(("share", "mask", "sign", "unmask"))
        delay_s = rng.uniform(0, 0.02)

        def kill(step):
            if step == at:
                asyncio.get_running_loop().call_later(delay_s, kill_child, clients[victim])

        mean = round_.mean(await run.play(kill))
        assert set(run.declined) <= {victim}
        compare(run, mean, [plain(tmp_path, n, {"w": w}, number) for n in run.counted])
        counted.update(run.counted)
        ends["counted" if victim in run.counted else "lost"] += bool(run.declined)
        return {n: [settlement_of(run, n)] for n in NAMES}

    async def story():
        async with contextlib.AsyncExitStack() as stack:
            stage = await stack.enter_async_context(staged(tmp_path / "stage", kind=MaskedStage))
            clients = {name: client_of(stage, tmp_path, name, Graphs.CHILD) for name in NAMES}
            for client in clients.values():
                await stack.enter_async_context(serving(client))
            await stage.offers(*NAMES)
            settled: dict[str, list[pb.Settlement]] = {}
            for number in range(1, rounds + 1):
                settled = await one_round(stage, clients, number, settled)
            # One more task each: before it, a device settles what went before.
            for n in NAMES:
                plan, digest = stage.plan()
                task = stage.task(9999, plan=plan, state=stage.state(digest))
                await stage.ask(n, task, settled[n])

    within(story(), 60 * rounds)
    for name in NAMES:
        home = DeviceHome(tmp_path / name)
        head = Memory(home.personal, home.pending).personal(RUN).tensors.get("head", np.zeros(1))
        assert head[0] == 3 * counted[name]
    assert rounds < 10 or min(ends["counted"], ends["lost"]) > rounds / 10, "kills before and after"


def settlement_of(run, name):
    is_counted = name in run.counted
    return pb.Settlement(run=RUN, lease=lease(run.number(name)), counted=is_counted)
