"""A device runs a plan only as it was signed, and in rounds that are large enough."""

import time
from dataclasses import replace

import grpc
import numpy as np
import pytest
from tests.device.stage import client_at, lease, serving, staged
from tests.federated.core import plans
from tests.support.deadlines import within
from tests.support.plan_signatures import PlanSigner

from triplane.cloud.trust.keys import KeyFolder
from triplane.cloud.trust.rotating import rotate
from triplane.cloud.trust.signing import Signer
from triplane.device import FederatedClient
from triplane.device.home import DeviceHome, DeviceSettings
from triplane.device.signed_plans import verified_here
from triplane.proto import federation_pb2 as pb
from triplane.proto.errors import InvalidInput, NotFound, Unavailable
from triplane.proto.plan_statement import MAX_LEAST, Least, PlanRule
from triplane.proto.signed.refusal import AttemptRefused
from triplane.proto.signed.trust import LATEST_TIME, Trust
from triplane.proto.signed_fields import AUTO
from triplane.unified_ir.federated.core.files import write_state
from triplane.unified_ir.federated.core.learn import Shard
from triplane.unified_ir.runtime import write_plan

SHARD = plans.shard(held_out=6)
SEEN = {"seen": np.zeros((20, 2), np.float32)}


def long(*values):
    """A case that the fast suite can do without."""
    return pytest.param(*values, marks=pytest.mark.long)


SHARED = ("*w", "bias")
"""Patterns of what an honest plan of `tests.federated.core.plans` shares."""


def answer(folder, task_of, *, settings=None, before=lambda _: None, shard=SHARD, **options):
    """What a device says of the one task that `task_of` makes on a stage."""

    async def story():
        async with staged(folder / "stage") as stage:
            before(stage)
            client = client_at(stage, folder / "ann", shard, **options)
            if settings:
                home = DeviceHome(folder / "ann")
                home.save_settings(replace(client.settings, **settings))
                client = client_at(stage, folder / "ann", shard, **options)
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


@pytest.mark.parametrize(
    ("signed", "owner", "reason"),
    [
        (Least(held_out=5), {}, "at least 5 held-out samples in a score, got 4"),
        (Least(devices=3), {}, "at least 3 devices in a round, got 2"),
        (Least(), {"least_held_out": 6}, "at least 6 held-out samples in a score, got 4"),
        (Least(), {"scores": False}, "the owner of this device shares no scores"),
        (Least(batch=9, steps=9, held_out=4), {"least_held_out": 4}, ""),
    ],
)
def test_scores_are_bound_by_signature_and_owner(tmp_path, signed, owner, reason):
    task = with_plan("plans", changes={"least": signed}, cohort=2, evaluate=pb.Evaluate(steps=1))
    said = answer(tmp_path, task, settings=owner, shard=plans.shard(held_out=4))
    assert reason in said.declined
    assert bool(reason) == (said.WhichOneof("outcome") == "declined")


@pytest.mark.parametrize(
    ("held_out", "owner", "offered"),
    [(4, {}, 4), (1, {}, 0), (4, {"least_held_out": 5}, 0), (4, {"scores": False}, 0)],
)
def test_a_device_that_may_not_score_offers_no_held_out_samples(tmp_path, held_out, owner, offered):
    client = FederatedClient(tmp_path / "ann", plans.shard(held_out=held_out))
    client.settings = replace(client.settings, **owner)
    assert client._offer().held_out == offered


def test_a_batch_counts_the_samples_that_the_device_has(tmp_path):
    sampling = pb.Sampling(steps=3, batch_size=1000)
    said = answer(
        tmp_path, with_plan("plans", changes={"least": Least(batch=21)}, sampling=sampling)
    )
    assert "at least 21 samples in a step, got 20" in said.declined


@pytest.mark.parametrize("inputs", [("support.x",), ()])
def test_the_smaller_part_of_an_episode_counts_as_its_samples(tmp_path, inputs):
    """The meta-gradient of one query sample tells as much as the gradient of a batch of one."""
    learning = plans.local_update("query.x", "query.y", more=inputs)
    entries = {**plans.spec(episodes=True).entries, "local_update": learning}
    sampling = pb.Sampling(steps=3, batch_size=30, support=5000, query=1)
    task = with_plan(
        "plans", changes={"least": Least(batch=2)}, plan={"entries": entries}, sampling=sampling
    )
    assert "at least 2 samples in a step, got 1" in answer(tmp_path, task).declined


@pytest.mark.long
def test_a_batch_may_be_larger_than_any_least_batch(tmp_path):
    sampling = pb.Sampling(steps=1, batch_size=1 << 24)
    n = MAX_LEAST + 1
    many = Shard(
        {"x": np.zeros((n, 2), np.float32), "y": np.zeros((n, 1), np.float32)}, SHARD.held_out
    )
    said = answer(tmp_path, with_plan("plans", sampling=sampling), shard=many)
    assert said.WhichOneof("outcome") == "update", said.declined


def test_a_task_for_the_owners_app_is_declined_in_a_round_of_too_few_devices(tmp_path):
    def task_of(stage):
        message = stage.folder / "message"
        message.write_bytes(b"whatever")
        task = with_plan("plans", cohort=2, flower=stage.put(message))
        return task(stage)

    said = answer(tmp_path, task_of, settings={"least_devices": 3}, app=object())
    assert "at least 3 devices in a round, got 2" in said.declined


@pytest.mark.long
def test_a_task_for_the_owners_app_is_declined_if_updates_must_be_masked(tmp_path):
    def task_of(stage):
        message = stage.folder / "message"
        message.write_bytes(b"whatever")
        return with_plan("plans", flower=stage.put(message))(stage)

    said = answer(tmp_path, task_of, settings={"masked_only": True}, app=object())
    assert "demand masking, and updates are in the clear" in said.declined


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


@pytest.mark.long
def test_the_policy_holds_while_people_have_not_signed_with_their_new_keys(tmp_path):
    """The new keys of the role plans are with other people, who have yet to sign their list."""
    signer = PlanSigner(tmp_path / "signed")
    signer.trusted_by(tmp_path)
    signer.allow(tiny=PlanRule(("*",), ("*",)))
    digests = [write_plan(tmp_path / f"{lr}.plan", plans.spec(lr=lr)) for lr in (0.1, 0.2)]
    signer.sign(tmp_path / "0.1.plan")
    signer.sign(tmp_path / "0.2.plan", AUTO)
    new = KeyFolder(tmp_path / "alex").make("alex")
    rotate(signer.repository, "plans", [new.public_key], signer.keys)
    trust = Trust(tmp_path / "trust", signer.repository.get, machine="device")
    assert trust.refresh().is_fresh
    assert trust.plan(digests[1], by_people=False).path.startswith("auto/")
    for digest, by_people in ((digests[0], False), (digests[1], True)):
        with pytest.raises(AttemptRefused) as refused:
            trust.plan(digest, by_people=by_people)
        assert refused.value.kind == "signature"


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


def test_a_failed_link_is_not_reported_as_a_refusal(tmp_path):
    """A clock that is behind is corrected when the network is back, and the device tries again."""
    home = DeviceHome(tmp_path)
    home.make()
    PlanSigner(tmp_path / "signed").trusted_by(tmp_path)
    (home.trust / LATEST_TIME).write_text(f"{time.time() + 3600:.3f}\n")
    with grpc.insecure_channel("127.0.0.1:1") as channel:
        verify = verified_here(home, lambda: channel, DeviceSettings())
        with pytest.raises(Unavailable):
            verify("ab" * 32)


def test_an_update_is_not_sent_again_once_its_plan_is_withdrawn(tmp_path):
    """The device was killed before the cloud had settled the update, which is on its disk."""

    async def story():
        async with staged(tmp_path / "stage") as stage:
            task = stage.task(learn=pb.Learn(compression="int8"))
            async with serving(client_at(stage, tmp_path / "ann", SHARD)):
                await stage.offer()
                stage.tell(task)
                first = await stage.contribution(lease(1))
            stage.heard.clear()
            Signer(stage.signer.repository, stage.signer.keys, "plans").sign(None, {})
            async with serving(client_at(stage, tmp_path / "ann", SHARD)):
                await stage.offer()
                stage.tell(task)
                return first, await stage.contribution(lease(1))

    first, again = within(story())
    assert first.WhichOneof("outcome") == "update"
    assert "is not listed" in again.declined
