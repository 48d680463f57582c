"""A device runs a plan only as it was signed, and in rounds that are large enough."""

from dataclasses import replace

import numpy as np
import pytest
from tests.device.stage import client_at, lease, serving, staged
from tests.federated.core import plans
from tests.support.deadlines import within

from triplane.device.home import DeviceHome, DeviceSettings
from triplane.proto import federation_pb2 as pb
from triplane.proto.errors import InvalidInput, NotFound
from triplane.proto.plan_statement import Least, PlanRule
from triplane.proto.signed.trust import Trust
from triplane.proto.signed_fields import AUTO
from triplane.unified_ir.federated.core.files import write_state

SHARD = plans.shard(held_out=6)
SEEN = {"seen": np.zeros((20, 2), np.float32)}


def long(*values):
    """A case that the fast suite can do without."""
    return pytest.param(*values, marks=pytest.mark.long)


SHARED = ("*w", "bias")
"""Patterns of what an honest plan of `tests.federated.core.plans` shares."""


def answer(folder, task_of, *, settings=None, before=lambda _: None):
    """What a device says of the one task that `task_of` makes on a stage."""

    async def story():
        async with staged(folder / "stage") as stage:
            before(stage)
            client = client_at(stage, folder / "ann", SHARD)
            if settings:
                home = DeviceHome(folder / "ann")
                home.save_settings(replace(client.settings, **settings))
                client = client_at(stage, folder / "ann", SHARD)
            async with serving(client):
                await stage.offer()
                stage.tell(task_of(stage))
                return await stage.contribution(lease(1))

    return within(story())


def with_plan(role=None, *, changes=(), plan=(), **task):
    """A task whose plan the role has signed, with these changes of the statement."""

    def task_of(stage):
        blob, digest = stage.plan(sign=False, **dict(plan))
        if role is not None:
            stage.signer.sign(stage.folder / "made.plan", role, **dict(changes))
        return stage.task(plan=blob, state=stage.state(digest), **task)

    return task_of


def test_a_plan_that_nobody_signed_is_declined(tmp_path):
    said = answer(tmp_path, with_plan())
    assert "does not run plan" in said.declined
    assert "is not listed by the role auto" in said.declined


def test_a_signed_plan_runs(tmp_path):
    assert answer(tmp_path, with_plan("plans")).WhichOneof("outcome") == "update"


def test_a_plan_within_the_policy_runs_with_the_clouds_signature(tmp_path):
    def allow(stage):
        stage.signer.allow(tiny=PlanRule(("fed*",), SHARED))

    said = answer(tmp_path, with_plan(AUTO), before=allow)
    assert said.WhichOneof("outcome") == "update", said.declined


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        (None, "has no rule for model 'tiny'"),
        long(PlanRule(("maml",), SHARED), "the algorithm fedavg is not one of maml"),
        long(PlanRule(("fedavg",), ("w",)), "tensors leave a device that no pattern allows: bias"),
        long(
            PlanRule(("fedavg",), SHARED, Least(devices=3)), "at least 3 devices in a round, got 1"
        ),
    ],
)
def test_a_plan_outside_of_the_policy_is_declined_whatever_the_clouds_key_signs(
    tmp_path, monkeypatch, rule, reason
):
    def steal(stage):
        stage.signer.allow(**({"tiny": rule} if rule else {"other": PlanRule(("*",), ("*",))}))
        monkeypatch.setattr(type(stage.signer.repository), "plan_policy", lambda _: Everything())

    said = answer(tmp_path, with_plan(AUTO), before=steal)
    assert "the policy for plans forbids auto/" in said.declined
    assert reason in said.declined


class Everything:
    """The policy of a cloud whose key was stolen."""

    def refusal(self, _):
        return ""


def storing_task(stage, tensors, role="plans"):
    plan, digest = stage.plan(
        sign=False,
        entries={"local_update": plans.storing("seen")},
        state=SEEN,
        roles={"seen": "buffer"},
    )
    stage.signer.sign(stage.folder / "made.plan", role, tensors=tensors)
    path = stage.folder / "zeros.state"
    write_state(path, SEEN, {"seen": "buffer"}, plan=digest)
    sampling = pb.Sampling(steps=1, batch_size=20)
    return stage.task(plan=plan, state=stage.put(path), sampling=sampling)


def test_a_plan_whose_buffer_stores_x_is_declined_unless_its_signature_names_the_buffer(tmp_path):
    said = answer(tmp_path, lambda stage: storing_task(stage, ("w",)))
    assert "shares tensors that were not signed as leaving a device: seen" in said.declined


def test_a_policy_of_parameters_leaves_no_buffer_to_the_clouds_key(tmp_path, monkeypatch):
    def steal(stage):
        stage.signer.allow(tiny=PlanRule(("*",), SHARED))
        monkeypatch.setattr(type(stage.signer.repository), "plan_policy", lambda _: Everything())

    said = answer(tmp_path, lambda stage: storing_task(stage, ("seen",), AUTO), before=steal)
    assert "lets tensors leave a device that no pattern allows: seen" in said.declined


@pytest.mark.parametrize(
    ("least", "task", "reason"),
    [
        (Least(devices=3), {"cohort": 2}, "at least 3 devices in a round, got 2"),
        (Least(devices=2), {}, "at least 2 devices in a round, got 1"),
        (Least(batch=5), {}, "at least 5 samples in a step, got 4"),
        (Least(steps=4), {}, "at least 4 steps in a task, got 3"),
    ],
)
def test_a_round_below_the_signed_size_is_declined(tmp_path, least, task, reason):
    said = answer(tmp_path, with_plan("plans", changes={"least": least}, **task))
    assert reason in said.declined


def test_a_batch_counts_the_samples_that_the_device_has(tmp_path):
    sampling = pb.Sampling(steps=3, batch_size=1000)
    said = answer(
        tmp_path, with_plan("plans", changes={"least": Least(batch=21)}, sampling=sampling)
    )
    assert "at least 21 samples in a step, got 20" in said.declined


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"least_devices": 10}, "at least 10 devices in a round, got 5"),
        long({"least_batch": 8}, "at least 8 samples in a step, got 4"),
        long({"least_steps": 5}, "at least 5 steps in a task, got 3"),
        ({"algorithms": ("maml", "reptile")}, "allows the algorithms maml, reptile"),
    ],
)
def test_the_owner_may_ask_for_more_than_was_signed(tmp_path, settings, reason):
    said = answer(tmp_path, with_plan("plans", cohort=5), settings=settings)
    assert reason in said.declined
    assert "device.json" in said.declined


def test_the_owner_may_ask_for_a_signature_of_people(tmp_path):
    def allow(stage):
        stage.signer.allow(tiny=PlanRule(("*",), ("*",)))

    said = answer(tmp_path, with_plan(AUTO), before=allow, settings={"plans_by_people": True})
    assert "is not listed by the role plans" in said.declined


@pytest.mark.parametrize("least", [0, -1, 1_000_001])
def test_sizes_that_make_no_sense_are_refused_in_the_settings(least):
    with pytest.raises(InvalidInput, match="least batch is 1 to 1000000"):
        DeviceSettings(least_batch=least)


def test_other_bytes_under_a_signed_digest_are_declined(tmp_path):
    def task_of(stage):
        blob, digest = stage.plan(sign=False)
        path = stage.folder / "made.plan"
        target = stage.signer.sign(path)
        assert target.sha256 == blob.sha256
        longer = stage.folder / "longer.plan"
        longer.write_bytes(path.read_bytes() + bytes(64))
        return stage.task(plan=stage.put(longer), state=stage.state(digest))

    said = answer(tmp_path, task_of)
    assert said.WhichOneof("outcome") == "declined"


def fetched_from(files):
    def fetch(name):
        if name not in files:
            raise NotFound(name)
        return files[name]

    return fetch


def test_metadata_older_than_what_the_device_saw_is_refused(tmp_path):
    """A cloud that goes back to metadata in which a withdrawn plan is still listed."""
    home = DeviceHome(tmp_path / "ann")
    home.make()

    async def story():
        async with staged(tmp_path / "stage") as stage:
            stage.signer.trusted_by(home.path)
            _, digest = stage.plan()
            repository = stage.signer.repository
            old = {name: repository.get(name) for name in ("timestamp.json", "2.snapshot.json")}
            stage.plan(lr=0.3)
            first = Trust(home.trust, repository.get, machine="device")
            assert first.refresh().is_fresh
            assert first.plan(digest, by_people=True).statement.digest == digest
            again = Trust(home.trust, fetched_from(old), machine="device")
            (refusal,) = again.refresh().refusals
            return refusal

    refusal = within(story())
    assert refusal.kind == "rollback"


def test_a_device_of_an_earlier_release_says_how_to_get_its_root(tmp_path):
    def task_of(stage):
        (tmp_path / "ann" / "trust" / "bootstrap.json").unlink()
        return with_plan("plans")(stage)

    said = answer(tmp_path, task_of)
    assert "no root of trust" in said.declined
    assert "triplane device enrol TOKEN" in said.declined


def test_a_device_says_which_metadata_it_has_seen(tmp_path):
    """As a node does: the numbers of a cloud that was restored from a backup would go back."""

    async def story():
        async with staged(tmp_path / "stage") as stage:
            client = client_at(stage, tmp_path / "ann", SHARD)
            async with serving(client):
                first = await stage.offer()
                stage.tell(stage.task())
                await stage.contribution(lease(1))
            stage.heard.clear()
            async with serving(client_at(stage, tmp_path / "ann", SHARD)):
                return first, await stage.offer(), stage.signer.repository

    first, second, repository = within(story())
    assert dict(first.metadata_versions) == {}
    seen = dict(second.metadata_versions)
    assert seen == repository.versions()
    assert not repository.is_behind(seen, second.metadata_sha256)
    assert repository.is_behind(seen, bytes(32))
