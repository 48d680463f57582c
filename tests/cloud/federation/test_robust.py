"""Devices that lie in a run over the wire: what they may change, and what people see."""

import asyncio

import numpy as np
import pytest
from tests.cloud.federation.given import (
    Kept,
    devices_of,
    ended,
    living,
    make_home,
    registered,
    start_request,
    update_bytes,
    work_of,
)

from triplane.cloud.cli.runs import headline, run_text
from triplane.cloud.federation import journal
from triplane.cloud.federation.spec import robustness_of, with_defaults
from triplane.cloud.server import running
from triplane.proto import federation_pb2 as pb
from triplane.proto.errors import InvalidInput
from triplane.unified_ir.convert.conversion import read_model
from triplane.unified_ir.federated.algorithms.aggregators import UNLIMITED, Robustness
from triplane.unified_ir.federated.core import learn
from triplane.unified_ir.federated.core.run import Arrived, Phase, Reduced
from triplane.unified_ir.federated.core.spoilt import PATIENCE

DEADLINE_S = 90.0
NAMES = ("ann", "bob", "cy")


MOST_EXAMPLES = 2**32 - 1


def lying(times, rounds=range(1, 100), *, boasts=False):
    """Learns honestly and sends that many times the change, as finite as float32 is.

    boasts: claims as many examples as 32 bits hold.
    """

    def lie(device, task):
        plan = device.plan(task)
        made = learn.learn(plan, work_of(task, device.name), device.shard)
        change = {
            n: np.clip(x.astype(np.float64) * times, -3e38, 3e38).astype(x.dtype)
            for n, x in made.change.items()
        }
        contribution = pb.Contribution(run=task.run, round=task.round, lease=task.lease)
        data = update_bytes(task, change)
        examples = MOST_EXAMPLES if boasts else made.examples
        contribution.update.CopyFrom(device.sent(data, examples=examples, loss=made.loss))
        return Kept(task, contribution, data)

    async def act(device, task):
        if task.WhichOneof("work") == "evaluate" or task.round not in rounds:
            return await device._worked(task)
        return await device.contribute(await asyncio.to_thread(lie, device, task))

    return act


def boasting_offer(device):
    return pb.Offer(
        population="labs", examples=MOST_EXAMPLES, held_out=device.shard.held_out_samples,
        software="test",
    )  # fmt: skip


async def story(folder, act=None, offer=None, **fields):
    """The ended run, its events, the blobs that stay, and the result's arrays."""
    async with asyncio.timeout(DEADLINE_S), running(make_home(folder)) as cloud:
        await registered(cloud, folder)
        devices = await devices_of(cloud, folder, NAMES)
        devices[2].act = act
        if offer is not None:
            devices[2].offer = lambda: offer(devices[2])
        async with living(devices):
            request = start_request(cohort={"devices": len(NAMES)}, **fields)
            made = await cloud.federation.begin(request, by="operator")
            run = await ended(cloud, made.id)
        events = await cloud.database.read(lambda c: journal.events(c, run.id))
        last = await cloud.database.read(lambda c: journal.last_projection(c, run.id))
        arrays = {}
        if run.result:
            version = await cloud.registry.version(run.result)
            module, _ = read_model(cloud.blobs.find(version.blob))
            arrays = {n: x.array.copy() for n, x in module.state.items()}
        return run, events, last, arrays


def distance(one, other):
    return max(float(np.abs(one[n] - other[n]).max()) for n in one if one[n].dtype.kind == "f")


@pytest.mark.long
@pytest.mark.parametrize("inline", [True, False])
def test_a_device_that_scales_its_change_moves_the_result_like_another(
    tmp_path, inline, monkeypatch
):
    if not inline:  # states in files, updates judged in a thread
        monkeypatch.setattr("triplane.cloud.federation.results.INLINE_BYTES", 0)
        monkeypatch.setattr("triplane.cloud.federation.update_store.INLINE_BYTES", 0)
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    honest = asyncio.run(story(folders[0], rounds=3))[-1]
    run, events, _, found = asyncio.run(story(folders[1], lying(3e38), rounds=3))
    assert run.phase == pb.Run.DONE, run.reason
    assert run.spec.robustness == pb.Robustness(norm_bound="adaptive", aggregator="mean", returns=3)
    assert [r.scaled for r in run.rounds if not r.evaluates] == [1, 1, 1]
    assert "1 update above the norm bound" in run_text(run)
    assert distance(found, honest) < 0.5, "of weights of about 1"
    norms = [e.update.norms or (0.0, 0.0) for e in events if isinstance(e, Arrived)]
    assert len(norms) == 9
    assert max(parameters for parameters, _ in norms) > 1e37
    assert [e.scaled for e in events if isinstance(e, Reduced)] == [1, 1, 1]


@pytest.mark.long
def test_a_claim_of_four_billion_examples_does_not_decide_the_mean(tmp_path):
    """The offer and the update agree on the number, so neither can be refused."""
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    lie = {"act": lying(-1.0, boasts=True), "offer": boasting_offer, "rounds": 3}
    honest = asyncio.run(story(folders[0], rounds=3))[-1]
    run, _, _, capped = asyncio.run(story(folders[1], **lie))
    assert run.phase == pb.Run.DONE, run.reason
    assert max(m.examples for m in run.members) == MOST_EXAMPLES
    free = pb.Robustness(norm_bound="off", max_examples=2**40)
    decided = asyncio.run(story(folders[2], robustness=free, **lie))[-1]
    assert distance(capped, honest) < 0.9 * distance(decided, honest)


@pytest.mark.long
def test_a_power_cut_does_not_take_the_state_that_a_run_returns_to(tmp_path):
    """Its file was never synced: a start writes it again from its row."""
    home, limits = make_home(tmp_path), pb.Robustness(norm_bound="off")

    async def interrupted():
        async with asyncio.timeout(DEADLINE_S), running(home) as cloud:
            await registered(cloud, tmp_path)
            devices = await devices_of(cloud, tmp_path, NAMES)
            devices[2].act = lying(1e4, {3})
            async with living(devices):
                request = start_request(
                    rounds=3 + PATIENCE + 2, robustness=limits, cohort={"devices": len(NAMES)}
                )
                run_id = (await cloud.federation.begin(request, by="operator")).id
                while (await cloud.federation.run(run_id)).round < 3 + PATIENCE:
                    await cloud.federation.moved.wait()
            live = cloud.federation.live.get(run_id)
            assert live is not None
            return devices, live.projection.state, cloud.ports["port"]

    async def both():
        devices, state, port = await interrupted()
        (home.blobs / state.good).write_bytes(b"torn")
        async with asyncio.timeout(DEADLINE_S), running(home, port=port) as cloud, living(devices):
            return state, await ended(cloud, state.run)

    state, run = asyncio.run(both())
    assert state.good not in {"", state.shared}
    assert run.phase == pb.Run.DONE, run.reason
    assert [r.number for r in run.rounds if r.returned] == [3 + PATIENCE]


@pytest.mark.long
def test_a_run_that_is_spoilt_returns_by_itself_and_says_so(tmp_path, caplog):
    """Without a norm bound, a device replaces the model in round 3; then its change is honest."""
    limits = pb.Robustness(norm_bound="off")
    run, events, last, found = asyncio.run(
        story(tmp_path, lying(1e4, {3}), rounds=3 + PATIENCE + 2, robustness=limits)
    )
    assert run.phase == pb.Run.DONE, run.reason
    assert "no norm bound: one device can replace the model" in headline(run)
    returned = {r.number: r.returned for r in run.rounds if r.returned}
    assert list(returned) == [3 + PATIENCE]
    assert "above" in returned[3 + PATIENCE]
    assert "returned to the last good state" in run_text(run)
    assert any("returned to its last good state" in r.message for r in caplog.records)
    reduced = [e.number for e in events if isinstance(e, Reduced)]
    assert reduced == [n for n in range(1, 3 + PATIENCE + 3) if n != 3 + PATIENCE]
    after = [r.loss for r in run.rounds if r.number > 3 + PATIENCE and not r.evaluates]
    assert max(after) < 5, "it learns on from the state before"
    assert all(np.isfinite(x).all() for x in found.values() if x.dtype.kind == "f")
    assert (last.state.phase, last.state.good) == (Phase.DONE, "")


@pytest.mark.long
def test_states_that_a_run_may_return_to_are_kept_as_long_and_no_longer(tmp_path):
    """Of all states only the first, and the last one with its optimizer's, are left at the end."""

    async def states():
        async with asyncio.timeout(DEADLINE_S), running(make_home(tmp_path)) as cloud:
            await registered(cloud, tmp_path)
            before = {p.name for p in cloud.blobs.folder.iterdir()}
            devices = await devices_of(cloud, tmp_path, NAMES)
            async with living(devices):
                request = start_request(
                    rounds=6, algorithm="fedadam", cohort={"devices": len(NAMES)}
                )
                made = await cloud.federation.begin(request, by="operator")
                run = await ended(cloud, made.id)
                needed = await cloud.database.read(journal.referenced)
            await cloud.federation.stop()
            version = await cloud.registry.version(run.result)
            record = (await cloud.database.read(lambda c: journal.find(c, run.id)))[0][0]
            left = {p.name for p in cloud.blobs.folder.iterdir() if p.is_file()} - before
            return left, needed, version.blob.hex(), record

    left, needed, result, record = asyncio.run(states())
    assert {name.hex() for name in needed} <= left
    assert left == {name.hex() for name in needed} | {result}
    assert record.slots in needed


def spec(**fields):
    return pb.Spec(model="tiny", **fields)


def test_limits_are_filled_in_and_checked_before_the_run():
    plain = with_defaults(spec())
    assert robustness_of(plain) == Robustness()
    assert journal.plan_of(plain).returns == 3
    trimmed = pb.Robustness(aggregator="trimmed-mean", numbers={"trim": 0.4}, returns=0)
    made = with_defaults(spec(robustness=trimmed, cohort=pb.Cohort(devices=4)))
    assert dict(made.robustness.numbers) == {"trim": 0.4}
    assert journal.plan_of(made).returns == 0
    assert with_defaults(made) == made
    for limits, words in (
        (pb.Robustness(norm_bound="yes"), "norm bound"),
        (pb.Robustness(max_examples=2**50), "largest weight"),
        (pb.Robustness(aggregator="mode"), "no aggregator 'mode'"),
        (pb.Robustness(aggregator="krum"), "needs at least 5 updates in each round; .* have 2"),
        (pb.Robustness(aggregator="median", numbers={"trim": 0.2}), "has no number 'trim'"),
        (pb.Robustness(aggregator="krum", numbers={"byzantine": 0.5}), "whole number"),
    ):
        with pytest.raises(InvalidInput, match=words):
            with_defaults(spec(robustness=limits))


def test_the_quorum_is_what_an_aggregator_must_do_with():
    krum = pb.Robustness(aggregator="krum")
    with_defaults(spec(robustness=krum, cohort=pb.Cohort(devices=6, quorum=0.8)))
    with pytest.raises(InvalidInput, match="may have 4"):
        with_defaults(spec(robustness=krum, cohort=pb.Cohort(devices=6, quorum=0.6)))


def test_a_strategy_of_flower_has_bounds_and_neither_aggregator_nor_returns():
    fedavg = pb.Flower(strategy="fedavg")
    made = with_defaults(spec(flower=fedavg))
    assert (made.robustness.norm_bound, made.robustness.returns) == ("adaptive", 0)
    assert with_defaults(made) == made
    for limits in (pb.Robustness(aggregator="median"), pb.Robustness(returns=2)):
        with pytest.raises(InvalidInput, match="the strategy 'fedavg' replaces"):
            with_defaults(spec(flower=fedavg, robustness=limits))


def test_a_run_of_an_earlier_release_goes_on_without_limits():
    stored = with_defaults(spec())
    stored.ClearField("robustness")
    assert robustness_of(stored) == UNLIMITED
    assert journal.plan_of(stored).returns == 0
