"""What a contribution does to the device: nothing until the cloud says that it counted."""

import asyncio
import errno
import hashlib
import logging
import threading
from dataclasses import asdict

import numpy as np
import pytest
from tests.device.devices import save_shard
from tests.device.stage import RUN, client_at, lease, serving, staged
from tests.federated.core import plans
from tests.support.deadlines import within

from triplane.device import FederatedClient
from triplane.device.client import Graphs
from triplane.device.home import DeviceHome
from triplane.device.memory import KIND, PERSONAL, REMAINDER, UPDATE, Memory, check_base
from triplane.device.task_runner import TaskRunner
from triplane.proto import federation_pb2 as pb
from triplane.proto.disk import OsDisk
from triplane.unified_ir.federated.core.compress import LEVELS
from triplane.unified_ir.federated.core.files import INLINE_BYTES, like_of, most_bytes, read_update
from triplane.unified_ir.federated.core.vector import VectorLayout, decode_vector
from triplane.unified_ir.files import container
from triplane.unified_ir.runtime import Limits

SHARD = plans.shard(held_out=6)
INT8 = pb.Learn(compression="int8")


def memory(folder):
    home = DeviceHome(folder / "ann")
    return Memory(home.personal, home.pending)


def settlement(number, *, counted):
    return pb.Settlement(run=RUN, lease=lease(number), counted=counted, reason="for a test")


async def learnt(stage, number, *settled, **changes):
    stage.tell(stage.task(number, learn=INT8, **changes), settled=settled)
    return await stage.contribution(lease(number))


def change_of(stage, told):
    like = like_of({n: plans.state()[n] for n in ("w", "bias")})
    return read_update(
        stage.blobs.find(told.update.blob.sha256),
        like,
        run=RUN,
        lease=told.lease.hex(),
        max_bytes=most_bytes(like),
        compression="int8",
        buffers={"bias"},
    )


def story_of(folder, tell):
    """Run `tell(stage)` with a device at work; what it returns."""

    async def story():
        async with (
            staged(folder / "stage") as stage,
            serving(client_at(stage, folder / "ann", SHARD)),
        ):
            await stage.offer()
            return await tell(stage)

    return within(story())


@pytest.mark.parametrize(("counted", "steps"), [(True, [3, 3]), (False, [])])
def test_personal_state_changes_only_with_an_update_that_counted(tmp_path, counted, steps):
    """`head` counts the steps that this device took; three belong to the update."""

    async def tell(stage):
        await learnt(stage, 1)
        assert memory(tmp_path).personal(RUN).tensors == {}
        assert [p.facts.lease for p in memory(tmp_path).pending()] == [lease(1).hex()]
        await stage.heeded(pb.Work(settled=[settlement(1, counted=counted)]))
        await learnt(stage, 2)

    story_of(tmp_path, tell)
    assert list(memory(tmp_path).personal(RUN).tensors.get("head", [])) == steps


@pytest.mark.parametrize(("included", "steps"), [(lease(1), [3, 3]), (b"", [])])
def test_personal_state_of_an_abandoned_round_is_taken_back(tmp_path, included, steps):
    """The update counted, but the state of the next task was made without it."""

    async def tell(stage):
        await learnt(stage, 1)
        await stage.heeded(pb.Work(settled=[settlement(1, counted=True)]))
        await learnt(stage, 2, included=included)

    story_of(tmp_path, tell)
    assert list(memory(tmp_path).personal(RUN).tensors.get("head", [])) == steps


def test_the_remainder_of_what_counted_is_in_the_next_update(tmp_path):
    """The three tasks learn the same change: they differ in their lease only."""

    async def tell(stage):
        first = change_of(stage, await learnt(stage, 1))
        alone = change_of(stage, await learnt(stage, 2, settlement(1, counted=False)))
        await stage.heeded(pb.Work(settled=[settlement(2, counted=True)]))
        third = await learnt(stage, 3)
        lost = memory(tmp_path).personal(RUN).remainder
        return first, alone, change_of(stage, third), lost

    first, alone, after, lost = story_of(tmp_path, tell)
    assert {n: x.tobytes() for n, x in first.items()} == {n: x.tobytes() for n, x in alone.items()}
    level = 1.01 * np.abs(alone["w"]).max() / LEVELS
    np.testing.assert_allclose(after["w"], alone["w"] + 2 * lost["w"], atol=level)
    assert lost["w"].any()


def held_after_settling(monkeypatch, marker):
    """Events: a document that asks for work on the lease `marker` was settled; go on now."""
    original, settled, go_on = TaskRunner.settle, threading.Event(), threading.Event()

    def settle(desk, work_set):
        original(desk, work_set)
        if marker.hex() in work_set.leases:
            settled.set()
            go_on.wait(60)

    monkeypatch.setattr(TaskRunner, "settle", settle)
    return settled, go_on


@pytest.mark.parametrize("compression", ["int8", ""])
def test_a_document_that_comes_while_another_is_settled_loses_no_counted_update(
    tmp_path, monkeypatch, compression
):
    """It counts update 1 and asks for update 2 of the same run, which goes to the same file."""
    learn = pb.Learn(compression=compression)
    settled, newer = held_after_settling(monkeypatch, lease(9))

    async def tell(stage):
        first = stage.task(1, learn=learn)
        stage.tell(first)
        await stage.contribution(lease(1))
        stage.tell(first, stage.task(9, run="f" * 16, round=2**32 - 1))
        assert await asyncio.to_thread(settled.wait, 60)
        counted = settlement(1, counted=True)
        await stage.heeded(pb.Work(tasks=[stage.task(2, round=2, learn=learn)], settled=[counted]))
        newer.set()
        await stage.contribution(lease(2))
        stage.tell(stage.task(3, round=3, learn=learn), settled=[settlement(2, counted=True)])
        await stage.contribution(lease(3))
        return memory(tmp_path).personal(RUN)

    kept = story_of(tmp_path, tell)
    assert list(kept.tensors["head"]) == [6, 6], "two updates of three steps counted"
    assert bool(compression) == any(x.any() for x in kept.remainder.values())


def test_a_task_that_is_withdrawn_while_its_document_is_settled_is_not_begun(
    tmp_path, monkeypatch, caplog
):
    caplog.set_level(logging.INFO, "triplane.device.client")
    settled, newer = held_after_settling(monkeypatch, lease(1))

    async def tell(stage):
        stage.tell(stage.task(1))
        assert await asyncio.to_thread(settled.wait, 60)
        await stage.heeded(pb.Work(tasks=[stage.task(2, round=2)]))
        newer.set()
        return await stage.contribution(lease(2))

    assert story_of(tmp_path, tell).WhichOneof("outcome") == "update"
    assert [r.round for r in caplog.records if r.msg == "task begun"] == [2]


def held_before_learning(monkeypatch):
    """Events: a task is about to learn; go on now."""
    original, begun, go_on = TaskRunner.do, threading.Event(), threading.Event()

    def do(runner, task, stop, wanted=()):
        begun.set()
        go_on.wait(60)
        return original(runner, task, stop, wanted)

    monkeypatch.setattr(TaskRunner, "do", do)
    return begun, go_on


@pytest.mark.parametrize("instant", ["settling", "learning"])
def test_a_task_that_is_withdrawn_and_asked_for_again_is_done(tmp_path, monkeypatch, instant):
    """A cloud leaves a task out of documents that are full, and sends it later."""
    held = held_after_settling(monkeypatch, lease(1)) if instant == "settling" else None
    begun, go_on = held or held_before_learning(monkeypatch)

    async def tell(stage):
        task = stage.task(1)
        stage.tell(task)
        assert await asyncio.to_thread(begun.wait, 60)
        await stage.heeded(pb.Work())
        await stage.heeded(pb.Work(tasks=[task]))
        go_on.set()
        return await stage.contribution(lease(1))

    assert story_of(tmp_path, tell).WhichOneof("outcome") == "update"


def test_a_device_that_no_run_asks_says_so_once_with_its_population(tmp_path, caplog):
    """A mistyped population is a common reason."""
    caplog.set_level(logging.INFO, "triplane.device.client")

    async def tell(stage):
        for _ in range(3):
            await stage.heeded(pb.Work())

    story_of(tmp_path, tell)
    (said,) = (r for r in caplog.records if r.msg.startswith("no work"))
    assert said.population == "labs"


def test_a_second_task_of_a_run_never_overwrites_an_update_that_was_not_settled(tmp_path):
    """No honest cloud has two leases of a device open in one run."""

    async def tell(stage):
        first = stage.task(1, learn=INT8)
        stage.tell(first)
        await stage.contribution(lease(1))
        stage.tell(first, stage.task(2, round=2, learn=INT8))
        return await stage.contribution(lease(2))

    told = story_of(tmp_path, tell)
    assert f"the update of round 1 of run {RUN} waits until the cloud settles it" in told.declined
    assert [p.facts.lease for p in memory(tmp_path).pending()] == [lease(1).hex()]


def test_an_update_that_waits_is_sent_again_byte_for_byte_by_the_next_process(tmp_path):
    """The cloud forgets everything too: a new epoch, and no bytes of the update."""

    async def story():
        async with staged(tmp_path / "stage") as stage:
            port = stage.port
            async with serving(client_at(stage, tmp_path / "ann", SHARD)):
                await stage.offer()
                task = stage.task(1, learn=INT8)
                stage.tell(task)
                first = await stage.contribution(lease(1))
        stage.blobs.remove(first.update.blob.sha256)
        async with (
            staged(tmp_path / "stage", port) as stage,
            serving(client_at(stage, tmp_path / "ann", SHARD)),
        ):
            await stage.offer()
            stage.tell(task)
            again = await stage.contribution(lease(1))
            return first, again, stage.blobs.has(again.update.blob.sha256)

    first, again, arrived = within(story())
    assert again == first
    assert arrived


def test_an_update_is_not_sent_for_a_lease_that_names_another_state_now(tmp_path):
    """Learned by one process from one state; the next one is asked for it with another."""

    async def story():
        async with staged(tmp_path / "stage") as stage:
            async with serving(client_at(stage, tmp_path / "ann", SHARD)):
                await stage.offer()
                first = await learnt(stage, 1, base=4)
            stage.heard.clear()
            digest = stage.plan()[1]
            changed = {"state": stage.state(digest, w=np.ones((2, 1), np.float32))}
            async with serving(client_at(stage, tmp_path / "ann", SHARD)):
                await stage.offer()
                return first, await learnt(stage, 1, base=4, **changed)

    first, second = within(story())
    assert (first.WhichOneof("outcome"), first.base) == ("update", 4)
    assert "was learned from the state" in second.declined
    assert second.base == 4


def test_an_update_of_an_earlier_release_does_not_say_from_which_state_it_was_learned(tmp_path):
    kept, path = memory(tmp_path), tmp_path / "ann" / "pending" / f"{RUN}.update"
    path.parent.mkdir(parents=True)
    facts = {
        "run": RUN, "round": 1, "lease": lease(1).hex(), "examples": 4, "loss": 0.5, "seconds": 0.1,
    }  # fmt: skip
    parts = [container.part(UPDATE, b"bytes")]
    parts += [container.tensor_part(name, {}) for name in (PERSONAL, REMAINDER)]
    properties = {name: str(value) for name, value in facts.items()}
    container.write(path, KIND, parts, properties=properties)
    assert [asdict(x.facts) for x in kept.pending()] == [{**facts, "base": ""}]
    check_base(kept.pending()[0].facts, bytes(32))


def test_a_device_offers_itself_again_to_a_cloud_that_restarted(tmp_path):
    async def story():
        async with staged(tmp_path / "stage") as stage:
            port, client = stage.port, client_at(stage, tmp_path / "ann", SHARD)
            working = serving(client)
            await working.__aenter__()
            first = await stage.offer()
        try:
            async with staged(tmp_path / "stage", port) as stage:
                return first, await stage.offer()
        finally:
            await working.__aexit__(None, None, None)

    first, again = within(story())
    assert first == again
    assert (again.population, again.examples, again.held_out) == ("labs", 20, 6)


def test_an_update_whose_lease_is_over_is_forgotten(tmp_path):
    async def tell(stage):
        await learnt(stage, 1)
        await stage.heeded(pb.Work())
        await learnt(stage, 2)
        return [p.facts.lease for p in memory(tmp_path).pending()]

    assert story_of(tmp_path, tell) == [lease(2).hex()]


def test_the_same_settlement_again_changes_nothing(tmp_path):
    async def tell(stage):
        await learnt(stage, 1)
        for _ in range(3):
            await stage.heeded(pb.Work(settled=[settlement(1, counted=True)]))
        await learnt(stage, 2, settlement(1, counted=True))
        return memory(tmp_path).personal(RUN).tensors["head"].tolist()

    assert story_of(tmp_path, tell) == [3, 3]


def test_work_that_nobody_wants_any_more_ends_and_the_next_begins(tmp_path):
    """Years of steps are given up at once."""
    long = pb.Sampling(steps=1_000_000, batch_size=16)

    async def tell(stage):
        stage.tell(stage.task(1, sampling=long))
        await until_begun(tmp_path)
        return await learnt(stage, 2), stage.heard

    told, heard = story_of(tmp_path, tell)
    assert told.WhichOneof("outcome") == "update"
    assert not any(isinstance(m, pb.Contribution) and m.lease == lease(1) for m in heard)


async def until_begun(folder):
    """The model file appears when the first task has its plan and state."""
    while not (folder / "ann/personal/model").exists():
        await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=0.01)


def test_a_device_stops_soon_though_the_cloud_is_away(tmp_path):
    """Its cloud went while it had work, so it is somewhere between two tries."""

    async def story():
        async with staged(tmp_path / "stage") as stage:
            client = client_at(stage, tmp_path / "ann", SHARD)
            working = asyncio.create_task(client.serve())
            await stage.offer()
            stage.tell(stage.task(1))
            await stage.contribution(lease(1))
            stage.tell(stage.task(2, round=2))
        began = asyncio.get_running_loop().time()
        client.stop()
        await working
        return asyncio.get_running_loop().time() - began

    assert within(story()) < 10


def test_a_restart_does_not_refill_the_limits_of_a_plan(tmp_path):
    """A plan of 7 steps allows two tasks of 3."""
    said: list[str] = []

    async def tell(stage):
        plan, digest = stage.plan(limits=Limits(max_steps=7))
        number = len(said)
        told = await learnt(stage, number, plan=plan, state=stage.state(digest))
        said.append(told.WhichOneof("outcome"))
        return told

    for _ in range(3):
        last = story_of(tmp_path, tell)
    assert said == ["update", "update", "declined"]
    assert "the plan allows 7 steps and took 7" in last.declined


def test_work_ends_with_its_deadline_and_the_cloud_reads_why(tmp_path):
    long = pb.Sampling(steps=1_000_000, batch_size=16)

    async def tell(stage):
        stage.tell(stage.task(1, sampling=long, deadline_s=0.5), stage.task(2))
        return await stage.contribution(lease(1)), await stage.contribution(lease(2))

    late, told = story_of(tmp_path, tell)
    assert late.declined.startswith("the task was not done by its deadline")
    assert told.WhichOneof("outcome") == "update"


def test_the_better_model_is_kept_and_a_worse_one_never_replaces_it(tmp_path):
    """`adapt` of this plan leads away from the answer, so the shared state wins."""
    right = np.array([[1.0], [-2.0]], np.float32)

    async def tell(stage):
        plan, digest = stage.plan()
        asked = {"plan": plan, "evaluate": pb.Evaluate(steps=3)}
        stage.tell(stage.task(1, state=stage.state(digest, w=right), **asked))
        return await stage.contribution(lease(1))

    told = story_of(tmp_path, tell)
    assert told.score.samples == 6
    assert told.score.before == 1.0
    assert told.score.after < 1.0
    client = FederatedClient(tmp_path / "ann", SHARD)
    choice = client.choice()
    assert choice is not None
    assert (choice.chosen, choice.accuracy) == ("shared", 1.0)
    found = client.predict(SHARD.held_out["x"])["p"]
    np.testing.assert_allclose(found, SHARD.held_out["y"], atol=1e-5)


def test_a_measured_model_is_not_dropped_for_the_unmeasured_one_of_another_run(tmp_path):
    right = np.array([[1.0], [-2.0]], np.float32)

    async def tell(stage):
        plan, digest = stage.plan()
        asked = {"plan": plan, "evaluate": pb.Evaluate(steps=3)}
        stage.tell(stage.task(1, state=stage.state(digest, w=right), **asked))
        await stage.contribution(lease(1))
        other, digest = stage.plan(lr=0.3)
        stage.tell(stage.task(2, run="f" * 16, plan=other, state=stage.state(digest)))
        await stage.contribution(lease(2))
        return plan.sha256.hex()

    measured = story_of(tmp_path, tell)
    choice = FederatedClient(tmp_path / "ann", SHARD).choice()
    assert choice is not None
    assert (choice.plan, choice.accuracy) == (measured, 1.0)


def test_an_idle_device_writes_the_last_state_of_rounds_that_followed_fast(tmp_path, monkeypatch):
    for name, seconds in (("client.IDLE_S", 0.05), ("model.WAIT_S", 0.0), ("model.WRITE_S", 99.0)):
        monkeypatch.setattr(f"triplane.device.{name}", seconds)

    async def story():
        async with staged(tmp_path / "stage") as stage:
            client = client_at(stage, tmp_path / "ann", plans.shard(held_out=0))
            async with serving(client):
                await stage.offer()
                plan, digest = stage.plan()
                for number in (1, 2, 3):
                    w = np.full((2, 1), number, np.float32)
                    more = {"plan": plan, "state": stage.state(digest, w=w), "round": number}
                    stage.tell(
                        stage.task(number, **more), settled=[settlement(number - 1, counted=True)]
                    )
                    await stage.contribution(lease(number))
                    assert client.choice().round == 1
                stage.tell(settled=[settlement(3, counted=True)])
                while client.choice().round == 1:  # noqa: ASYNC110 -- written by a thread
                    await asyncio.sleep(0.01)
                return client.choice().round

    assert within(story()) == 3


@pytest.mark.parametrize("graphs", [Graphs.IN_PROCESS, Graphs.CHILD])
def test_a_device_that_stops_serves_the_last_state_of_rounds_that_followed_fast(
    tmp_path, monkeypatch, graphs
):
    monkeypatch.setattr("triplane.device.client.IDLE_S", 99.0)

    async def story():
        async with staged(tmp_path / "stage") as stage:
            shard = plans.shard(held_out=0)
            save_shard(tmp_path / "x.npz", shard)
            source = shard if graphs is Graphs.IN_PROCESS else tmp_path / "x.npz"
            client = client_at(stage, tmp_path / "ann", source, graphs=graphs)
            async with serving(client):
                await stage.offer()
                plan, digest = stage.plan()
                for number in (1, 2):
                    w = np.full((2, 1), number, np.float32)
                    more = {"plan": plan, "state": stage.state(digest, w=w), "round": number}
                    stage.tell(
                        stage.task(number, **more), settled=[settlement(number - 1, counted=True)]
                    )
                    await stage.contribution(lease(number))
                await stage.heeded(pb.Work(settled=[settlement(2, counted=True)]))
            return client.choice().round

    assert within(story()) == 2


def test_a_small_state_and_update_ride_in_messages_and_stay_the_same_after_a_restart(tmp_path):
    """No file of either comes or goes; the next process sends the very bytes again."""

    async def story():
        async with staged(tmp_path / "stage") as stage:
            plan, digest = stage.plan()
            state = stage.state(digest)
            data = stage.blobs.find(state.sha256).read_bytes()
            stage.blobs.remove(state.sha256)
            task = stage.task(
                1, plan=plan, state=state, inline_state=data, inline_bytes=INLINE_BYTES
            )
            stage.blobs.remove(state.sha256)
            there = set(stage.blobs.folder.iterdir())
            told = []
            for _ in range(2):
                async with serving(client_at(stage, tmp_path / "ann", SHARD)):
                    await stage.offer()
                    stage.heard.clear()
                    stage.tell(task)
                    told.append(await stage.contribution(lease(1)))
            assert set(stage.blobs.folder.iterdir()) == there
            return told

    first, again = within(story())
    assert first == again
    update = first.update
    assert hashlib.sha256(update.inline).digest() == update.blob.sha256
    assert len(update.inline) == update.blob.size
    change = read_update(
        tmp_path / "update", like_of({n: plans.state()[n] for n in ("w", "bias")}), run=RUN,
        lease=lease(1).hex(), max_bytes=INLINE_BYTES, buffers={"bias"}, data=update.inline,
    )  # fmt: skip
    assert change["w"].any()


@pytest.mark.parametrize(
    ("inline_bytes", "takes_vector"),
    [(0, True), (4, True), (INLINE_BYTES, False), (INLINE_BYTES, True)],
)
def test_a_device_whose_updates_imply_nothing_makes_nothing_durable_and_learns_them_again(
    tmp_path, monkeypatch, inline_bytes, takes_vector
):
    """Beyond the first task, which brings the plan and the first model. Then the process ends."""
    home, synced = tmp_path / "ann", []
    for name, path_of in (("sync", lambda file: file.name), ("sync_folder", str)):
        real = getattr(OsDisk, name)

        def noted(self, what, real=real, path_of=path_of):
            synced.append(path_of(what))
            real(self, what)

        monkeypatch.setattr(OsDisk, name, noted)

    def task_of(stage, number):
        roles = {**plans.ROLES, "head": "buffer"}
        plan, digest = stage.plan(roles=roles)
        w = np.full((2, 1), number, np.float32)
        state = stage.state(digest, roles, w=w, head=np.zeros(2, np.float32))
        more = {"round": number, "learn": pb.Learn(), "inline_bytes": inline_bytes}
        more["takes_vector"] = takes_vector
        return stage.task(number, plan=plan, state=state, **more)

    async def learnt_again(stage, number, *settled):
        async with serving(client_at(stage, home, SHARD)):
            await stage.offer()
            stage.heard.clear()
            stage.tell(task_of(stage, number), settled=settled)
            return await stage.contribution(lease(number))

    async def story():
        async with staged(tmp_path / "stage") as stage:
            async with serving(client_at(stage, home, SHARD)):
                await stage.offer()
                stage.tell(task_of(stage, 1))
                await stage.contribution(lease(1))
                synced.clear()
                stage.tell(task_of(stage, 2), settled=[settlement(1, counted=True)])
                second = await stage.contribution(lease(2))
                found = [path for path in synced if path.startswith(str(home))]
            assert memory(tmp_path).pending() == ()
            again = await learnt_again(stage, 2, settlement(1, counted=True))
            return second.update, again.update, found

    second, again, found = within(story())
    assert not found
    assert second.blob.size > 0
    assert second.HasField("vector") == takes_vector
    assert bool(second.vector.data or second.inline) == (inline_bytes == INLINE_BYTES)
    for name in ("blob", "inline", "vector", "loss"):
        assert getattr(again, name) == getattr(second, name)


def test_a_device_sends_a_file_once_its_cloud_takes_no_vectors_any_more(tmp_path):
    """The cloud was replaced by an earlier release; the update stands for the same change."""

    async def story():
        async with staged(tmp_path / "stage") as stage:
            roles = {**plans.ROLES, "head": "buffer"}
            plan, digest = stage.plan(roles=roles)
            state = stage.state(digest, roles, head=np.zeros(2, np.float32))
            told = []
            async with serving(client_at(stage, tmp_path / "ann", SHARD)) as client:
                await stage.offer()
                for takes in (True, False):
                    task = stage.task(
                        1, plan=plan, state=state, learn=pb.Learn(), inline_bytes=INLINE_BYTES,
                        takes_vector=takes,
                    )  # fmt: skip
                    client._working._done.clear()  # as if it could not send the first one
                    stage.heard.clear()
                    stage.tell(task)
                    told.append((await stage.contribution(lease(1))).update)
                    while not client._working._done:  # noqa: ASYNC110 -- until it is acknowledged
                        await asyncio.sleep(0)
            return told

    vector, file = within(story())
    like = like_of({**{n: plans.state()[n] for n in ("w", "bias")}, "head": np.zeros(2, "f4")})
    layout = VectorLayout.of(like)
    assert vector.vector.layout == layout.digest
    assert not file.HasField("vector")
    change = read_update(
        tmp_path / "update", like, run=RUN, lease=lease(1).hex(), max_bytes=INLINE_BYTES,
        buffers={"bias", "head"}, data=file.inline,
    )  # fmt: skip
    found = decode_vector(vector.vector.data, layout.digest, layout, lease(1).hex())
    for name, x in change.items():
        assert found[name].tobytes() == x.tobytes()


def test_what_counted_takes_effect_though_a_later_lease_was_lost_meanwhile(tmp_path):
    """The device was away when its update counted and when its next lease ended."""

    async def tell(stage):
        await learnt(stage, 1)
        lost = [settlement(1, counted=True), settlement(2, counted=False)]
        await learnt(stage, 3, *lost)
        return memory(tmp_path).personal(RUN).tensors["head"].tolist()

    assert story_of(tmp_path, tell) == [3, 3]


def offers(stage):
    return [m for m in stage.heard if isinstance(m, pb.Offer)]


def test_a_device_that_waits_for_its_disk_says_so_and_that_it_goes_on(tmp_path, monkeypatch):
    """The update with its personal tensors cannot be written until there is room."""
    home, has_room, real = tmp_path / "ann", threading.Event(), OsDisk.sync

    def full(self, file):
        if not has_room.is_set() and file.name.startswith(str(home / "pending")):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(self, file)

    async def tell(stage):
        monkeypatch.setattr(OsDisk, "sync", full)
        stage.tell(stage.task(1, learn=INT8))
        waits = await stage._until(lambda m: isinstance(m, pb.Offer) and bool(m.waits))
        has_room.set()
        await stage.contribution(lease(1))
        await stage._until(lambda _: not offers(stage)[-1].waits)
        return waits, offers(stage)[-1]

    waits, again = story_of(tmp_path, tell)
    assert "No space left on device" in waits.waits
    assert (waits.population, waits.examples) == (again.population, again.examples) == ("labs", 20)
