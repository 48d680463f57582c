"""A cloud that was taken over: each trick is refused by name, and the device lives on and works."""

import json

import numpy as np
import pytest
from tests.device.stage import client_at, lease, serving, staged
from tests.federated.core import plans
from tests.support.deadlines import within

from triplane.proto import federation_pb2 as pb
from triplane.unified_ir.federated.core.files import write_state
from triplane.unified_ir.federated.core.learn import Shard

SHARD = plans.shard(held_out=6)


def sampling(**changes):
    return pb.Sampling(**{"steps": 3, "batch_size": 4, "support": 4, "query": 3, **changes})


def other_plan(stage):
    _, digest = stage.plan(lr=0.3)
    return {"state": stage.state(digest)}


def forged_blob(stage):
    """Bytes under a name that is not their digest."""
    made = stage.state(stage.plan()[1])
    stage.blobs.path(bytes(32)).write_bytes(bytes(made.size))
    return {"state": blob(size=made.size)}


def other_size(stage):
    made = stage.state(stage.plan()[1])
    return {"state": blob(made.sha256, made.size - 1)}


def noise_as_plan(stage):
    path = stage.folder / "noise"
    path.write_bytes(b"noise" * 100)
    return {"plan": stage.put(path)}


def state_as_plan(stage):
    return {"plan": stage.state(stage.plan()[1])}


def plan_as_state(stage):
    return {"state": stage.plan()[0]}


def partial_state(stage):
    path = stage.folder / "partial"
    write_state(path, {"w": plans.state()["w"]}, plans.ROLES, plan=stage.plan()[1])
    return {"state": stage.put(path)}


def nan_state(stage):
    return {"state": stage.state(stage.plan()[1], w=np.full((2, 1), np.nan, np.float32))}


def demands_noise(stage):
    return {"plan": stage.plan(privacy=("noise",))[0]}


def demands_masking(stage):
    return {"plan": stage.plan(privacy=("masking",))[0]}


def demanding(stage):
    plan, digest = stage.plan(compression=("int8",))
    return {"plan": plan, "state": stage.state(digest)}


def wild(stage):
    plan, digest = stage.plan(lr=1e30)
    return {"plan": plan, "state": stage.state(digest), "sampling": sampling(steps=9)}


def blob(sha256=bytes(32), size=9):
    return pb.Blob(sha256=sha256, size=size)


# What a task says, and the reason a device gives.
SAID = {
    "too many steps": ({"sampling": sampling(steps=2**31)}, "1 to 1000000 steps, got 2147"),
    "no step": ({"sampling": sampling(steps=0)}, "learning must take 1 to 1000000 steps, got 0"),
    "absurd batch": ({"sampling": sampling(batch_size=2**31)}, "batch_size is 0 to 16777216"),
    "absurd support": ({"sampling": sampling(support=2**31)}, "support is 0 to 16777216"),
    "endless deadline": ({"deadline_s": float("inf")}, "deadline_s is 0 to"),
    "no deadline": ({"deadline_s": float("nan")}, "deadline_s is 0 to"),
    "absurd round": ({"round": 2**32 - 1}, "round is 0 to"),
    "huge plan": (
        {"plan": blob(size=2**40)},
        "1 to 1073741824 bytes on this device, got 1099",
    ),
    "empty state": ({"state": blob(size=0)}, "a state has 1 to"),
    "nameless plan": ({"plan": blob(b"x")}, "32 bytes of SHA-256, got 1"),
    "unknown packing": ({"learn": pb.Learn(compression="zip")}, "'', 'int8', 'top-k', got 'zip'"),
    "absurd keep": ({"learn": pb.Learn(compression="top-k", keep=7)}, "in (0, 1], got 7.0"),
    "work for an app": ({"flower": blob()}, "this device has no ClientApp"),
    "huge message": ({"flower": blob(size=2**40)}, "a message has 1 to 1073741824 bytes"),
    "other inline state": ({"inline_state": b"x"}, "is not the one that it names"),
    "long inline state": ({"inline_state": bytes(65537)}, "at most 65536 bytes, got 65537"),
    "endless adapting": ({"evaluate": pb.Evaluate(steps=2**31)}, "adaptation is 0 to 1000000"),
}
# What a file is, and the reason.
MADE = {
    "forged state": (forged_blob, "the bytes received have the digest"),
    "other size": (other_size, "the other side says the blob has"),
    "noise as plan": (noise_as_plan, "not a file of Triplane, or the header of its"),
    "state as plan": (state_as_plan, "is a state file, not a plan"),
    "plan as state": (plan_as_state, "is a plan file, not a state"),
    "state of another plan": (other_plan, "the state is of plan"),
    "partial state": (partial_state, "all shared state; it differs in ['bias']"),
    "state of nothing": (nan_state, "'w' of the state holds numbers that are not finite"),
    "demands noise": (demands_noise, "this plan demands noise, which this version does not offer"),
    "demands masking": (demands_masking, "this plan demands masking, which this version does"),
    "other compression": (demanding, "demands an update by int8, the task asks for none"),
    "wild rate": (wild, "a smaller rate is needed"),
}
TRICKS = {name: (lambda _, told=told: told, why) for name, (told, why) in SAID.items()} | MADE


@pytest.mark.slow
def test_every_trick_is_declined_with_its_reason_and_honest_work_still_done(tmp_path):
    """One device meets them all, one after the other."""

    async def story():
        said = {}
        async with (
            staged(tmp_path / "stage") as stage,
            serving(client_at(stage, tmp_path / "ann", SHARD)),
        ):
            await stage.offer()
            for number, (name, (changes, _)) in enumerate(TRICKS.items()):
                stage.tell(stage.task(number, **changes(stage)))
                said[name] = (await stage.contribution(lease(number))).declined
            stage.tell(stage.task(1000))
            return said, await stage.contribution(lease(1000))

    said, honest = within(story())
    for name, (_, reason) in TRICKS.items():
        assert reason in said[name], (name, said[name])
    assert honest.WhichOneof("outcome") == "update"
    assert honest.update.examples == 20


DOCUMENTS = {
    "too many tasks": pb.Work(tasks=[pb.Task()] * 65),
    "too many settlements": pb.Work(settled=[pb.Settlement()] * 65),
    "a task without a lease": pb.Work(tasks=[pb.Task(run="x")]),
    "a run as a path": pb.Work(tasks=[pb.Task(run="../../../etc/pw", lease=bytes(16))]),
    "a settlement as a path": pb.Work(settled=[pb.Settlement(run="/" * 16, lease=bytes(16))]),
}


def test_documents_that_are_wrong_as_a_whole_change_nothing(tmp_path, caplog):
    async def story():
        async with (
            staged(tmp_path / "stage") as stage,
            serving(client_at(stage, tmp_path / "ann", SHARD)),
        ):
            await stage.offer()
            for document in DOCUMENTS.values():
                await stage.heeded(document)
            stage.tell(stage.task(1))
            return await stage.contribution(lease(1)), stage.heard

    honest, heard = within(story())
    assert honest.WhichOneof("outcome") == "update"
    assert sum(isinstance(m, pb.Contribution) for m in heard) == 1
    reasons = [r.reason for r in caplog.records if r.message == "work document refused"]
    assert len(reasons) == len(DOCUMENTS)
    assert {p.name for p in tmp_path.iterdir()} == {"stage", "ann"}


def test_one_wrong_task_does_not_keep_the_others_from_being_done(tmp_path):
    async def story():
        async with (
            staged(tmp_path / "stage") as stage,
            serving(client_at(stage, tmp_path / "ann", SHARD)),
        ):
            await stage.offer()
            stage.tell(stage.task(1, round=2**32 - 1), stage.task(2))
            return await stage.contribution(lease(1)), await stage.contribution(lease(2))

    wrong, honest = within(story())
    assert wrong.WhichOneof("outcome") == "declined"
    assert honest.WhichOneof("outcome") == "update"


def test_no_personal_tensor_ever_leaves_and_no_sample_does(tmp_path):
    secret = np.float32(123456.789)
    shard = Shard({"x": SHARD.train["x"], "y": SHARD.train["y"]}, SHARD.held_out)

    async def story():
        async with (
            staged(tmp_path / "stage") as stage,
            serving(client_at(stage, tmp_path / "ann", shard)),
        ):
            await stage.offer()
            stage.tell(stage.task(1))
            told = await stage.contribution(lease(1))
            return stage.blobs.find(told.update.blob.sha256).read_bytes()

    sent = within(story())
    assert b"head" not in sent
    assert secret.tobytes() not in sent
    assert not any(row.tobytes() in sent for row in shard.train["x"])


def limited(stage, home, max_disk_bytes):
    """A client whose owner lets plans and states take so many bytes."""
    client_at(stage, home, SHARD)
    (home / "device.json").write_text(json.dumps({"max_disk_bytes": max_disk_bytes}))
    return client_at(stage, home, SHARD)


def test_plans_and_states_that_nothing_names_are_dropped_from_the_disk(tmp_path):
    async def story():
        async with (
            staged(tmp_path / "stage") as stage,
            serving(limited(stage, tmp_path / "ann", 40_000)),
        ):
            await stage.offer()
            for number in range(6):
                plan, digest = stage.plan(lr=0.1 + number / 100)
                stage.tell(stage.task(number, plan=plan, state=stage.state(digest)))
                told = await stage.contribution(lease(number))
                assert told.WhichOneof("outcome") == "update", told
            return [p.stat().st_size for p in (tmp_path / "ann/plans").iterdir() if p.is_file()]

    sizes = within(story())
    assert sum(sizes) <= 40_000
    assert len(sizes) <= 4


def test_more_than_the_owner_allows_is_not_fetched(tmp_path):
    async def story():
        async with (
            staged(tmp_path / "stage") as stage,
            serving(limited(stage, tmp_path / "ann", 1000)),
        ):
            await stage.offer()
            stage.tell(stage.task(1))
            return (await stage.contribution(lease(1))).declined

    assert "at most 1000 bytes here (max_disk_bytes in device.json); 0 are in use" in within(
        story()
    )
