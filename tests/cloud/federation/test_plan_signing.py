"""A run begins when its plan is signed, and only then."""

import asyncio
import threading

import pytest
from tests.cloud.federation import given
from tests.cloud.federation.masked import masked_request
from tests.support.deadlines import within
from tests.support.plan_signatures import PlanSigner

from triplane.cloud.cli.runs import headline
from triplane.cloud.federation.plan_signing import least_of, sign_plan, unsign_plans
from triplane.cloud.home import initialize
from triplane.cloud.registry import encoding
from triplane.cloud.server import running
from triplane.cloud.trust.repository import target_file
from triplane.cloud.trust.rosters import change_roster
from triplane.cloud.trust.signing import Signer, sign_plan_policy
from triplane.proto import federation_pb2 as pb
from triplane.proto.errors import Conflict, Corrupt, InvalidInput, NotFound
from triplane.proto.plan_statement import (
    Least,
    LeastMasking,
    PlanPolicy,
    PlanRule,
    PlanStatement,
)
from triplane.proto.targets import plan_target

ALL = PlanRule(("*",), ("*",))


class Source:
    """A cloud in this process, as a signer uses it."""

    def __init__(self, cloud):
        self._cloud, self._loop = cloud, asyncio.get_running_loop()
        repository = cloud.repository
        self.get, self.pending, self.submit = repository.get, repository.pending, repository.submit

    def version(self, reference):
        asked = self._cloud.registry.version(reference)
        return encoding.version(asyncio.run_coroutine_threadsafe(asked, self._loop).result(10))

    def blob(self, sha256, _size):
        return self._cloud.blobs.find(sha256)


def story_of(folder, story, **init):
    """`story` with a cloud that has tiny@1 and no policy, and a run of it that has begun."""
    home = initialize(folder / "home", offline_keys=folder / "keys", **init).home

    async def whole():
        async with running(home) as cloud:
            await given.registered(cloud, folder)
            run = await cloud.federation.begin(given.start_request(), by="operator")
            return await story(cloud, run.id)

    return within(whole())


async def until(cloud, run_id, holds):
    while True:
        moved = cloud.federation.moved
        run = await cloud.federation.run(run_id)
        if holds(run):
            return run
        await moved.wait()


def waits(run):
    return "waits for a signature" in run.reason


def gathers(run):
    return run.phase == pb.Run.GATHERING


def failed(run):
    return run.phase == pb.Run.FAILED


async def signed(cloud, run_id, folder, **options):
    spec = (await cloud.federation.run(run_id)).spec
    options = {"least": least_of(spec), **options}
    return await asyncio.to_thread(sign_plan, Source(cloud), spec, folder / "keys", **options)


@pytest.mark.long
def test_a_run_waits_for_the_signature_of_a_person(tmp_path):
    async def story(cloud, run_id):
        run = await until(cloud, run_id, waits)
        assert run.phase == pb.Run.PREPARING
        assert "it has no rule for model 'tiny' (listed: none)" in run.reason
        assert f"triplane federate sign {run_id} --keys DIR" in run.reason
        assert "triplane cloud policy set-plans tiny --keys DIR" in run.reason
        result = await signed(cloud, run_id, tmp_path)
        run = await until(cloud, run_id, gathers)
        assert run.reason == ""
        statement = result.targets[0].statement
        assert statement.tensors == ("0.bias", "0.weight", "2.bias", "2.weight")
        assert statement.least == Least(devices=2, batch=2, steps=3)
        assert statement.algorithm == "fedavg"
        version = cloud.repository.versions()["plans"]
        again = await signed(cloud, run_id, tmp_path)
        assert again.targets == result.targets
        assert cloud.repository.versions()["plans"] == version

    story_of(tmp_path, story)


@pytest.mark.slow
def test_a_policy_lets_the_clouds_key_sign(tmp_path):
    async def story(cloud, run_id):
        await until(cloud, run_id, waits)
        rule = PlanRule(("fed*",), ("*.weight",))
        await asyncio.to_thread(sign_policy, cloud, tmp_path, rule)
        run = await until(cloud, run_id, lambda run: "no pattern allows" in run.reason)
        assert "0.bias, 2.bias" in run.reason
        await asyncio.to_thread(sign_policy, cloud, tmp_path, ALL)
        await until(cloud, run_id, gathers)
        (path,) = [t.path for t in cloud.repository._chain.plans.values()]
        assert path.startswith("auto/")

    story_of(tmp_path, story)


def sign_policy(cloud, folder, rule):
    sign_plan_policy(cloud.repository, PlanPolicy({"tiny": rule}), folder / "keys")


@pytest.mark.long
def test_a_plan_whose_signature_was_withdrawn_waits_for_a_new_one(tmp_path):
    async def story(cloud, run_id):
        await until(cloud, run_id, waits)
        source, keys = Source(cloud), tmp_path / "keys"
        result = await signed(cloud, run_id, tmp_path)
        await asyncio.to_thread(change_roster, source, lambda _: frozenset({bytes(32)}), keys)
        (statement,) = [target.statement for target in result.targets]

        def unsign(digest):
            return unsign_plans(source, lambda plan: plan.digest == digest, keys)

        with pytest.raises(NotFound, match=f"signed: {statement.digest[:12]} of tiny@1"):
            await asyncio.to_thread(unsign, "0" * 64)
        done = await asyncio.to_thread(unsign, statement.digest)
        assert (done.submitted.published, done.plans) == (True, (statement,))
        assert cloud.repository.find_plan(statement.digest) is None
        assert cloud.repository.roster() is not None
        with pytest.raises(NotFound, match="signed: none"):
            await asyncio.to_thread(unsign, statement.digest)
        run = await cloud.federation.begin(given.start_request(key=b"again" + bytes(11)), by="x")
        await until(cloud, run.id, waits)

    story_of(tmp_path, story)


@pytest.mark.long
def test_a_full_list_of_plans_names_the_way_to_make_room(tmp_path):
    signer = PlanSigner(tmp_path)
    tensors = tuple(f"layer{n:03}.{'x' * 30}" for n in range(200))
    targets = {}
    for n in range(520):
        statement = PlanStatement(
            model="tiny", version=1, model_digest="0" * 64, digest=f"{n:064x}", algorithm="fedavg",
            hyperparameters={"lr": 0.1}, tensors=tensors, least=Least(),
        )  # fmt: skip
        target = plan_target("plans", statement, length=1, sha256=bytes(32))
        targets[target.path] = target_file(target)
    with pytest.raises(InvalidInput, match=r"the list of plans .* triplane federate unsign RUN"):
        Signer(signer.repository, signer.keys, "plans").sign(None, targets)


@pytest.mark.long
def test_a_run_that_is_smaller_than_its_signed_plan_fails_with_the_reason(tmp_path):
    async def story(cloud, run_id):
        await until(cloud, run_id, waits)
        await signed(cloud, run_id, tmp_path, least=Least(devices=5))
        run = await until(cloud, run_id, failed)
        assert "at least 5 devices in a round, got 2" in run.reason

    story_of(tmp_path, story)


@pytest.mark.long
def test_a_waiting_run_can_be_stopped_and_goes_on_after_a_signature(tmp_path):
    async def story(cloud, run_id):
        await until(cloud, run_id, waits)
        stopped = await cloud.federation.halt(run_id, reason="a holiday", by="operator")
        assert (stopped.phase, stopped.reason) == (pb.Run.STOPPED, "a holiday")
        await signed(cloud, run_id, tmp_path)
        await cloud.federation.resume(run_id, reason="", by="operator")
        await until(cloud, run_id, gathers)

    story_of(tmp_path, story)


@pytest.mark.long
def test_a_signer_refuses_a_plan_of_another_model_file_than_the_reviewed_one(tmp_path):
    async def story(cloud, run_id):
        with pytest.raises(Corrupt, match="as you expect"):
            await signed(cloud, run_id, tmp_path, model_digest=bytes(32))

    story_of(tmp_path, story)


@pytest.mark.long
def test_a_masked_run_waits_for_the_roster_that_its_signature_demands(tmp_path):
    async def story(cloud, plain_id):
        request = masked_request(3, scores="")
        masked = await cloud.federation.begin(request, by="operator")
        await until(cloud, masked.id, waits)
        with pytest.raises(InvalidInput, match="this run is not masked"):
            await signed(cloud, plain_id, tmp_path, roster=True)
        result = await signed(cloud, masked.id, tmp_path, roster=True)
        assert result.targets[0].statement.masking == LeastMasking(0.0, 1e-6, roster=True)
        await until(cloud, masked.id, lambda run: "waits for a roster of devices" in run.reason)
        await asyncio.to_thread(
            change_roster, Source(cloud), lambda _: frozenset({bytes(32)}), tmp_path / "keys"
        )
        await until(cloud, masked.id, gathers)

    story_of(tmp_path, story)


@pytest.mark.long
def test_a_run_says_first_whether_a_roster_protects_from_invented_devices(tmp_path):
    async def story(cloud, run_id):
        text = "no roster: nothing protects from a cloud that invents devices"
        run = await until(cloud, run_id, waits)
        assert (run.roster, text in headline(run)) == (0, True)
        done = await asyncio.to_thread(
            change_roster, Source(cloud), lambda _: frozenset({bytes(32)}), tmp_path / "keys"
        )
        run = await cloud.federation.run(run_id)
        assert (run.roster, text in headline(run)) == (done.roster.version, False)

    story_of(tmp_path, story)


@pytest.mark.long
def test_a_plan_is_not_signed_beside_a_roster_that_nobody_checked_here(tmp_path):
    async def story(cloud, run_id):
        await until(cloud, run_id, waits)
        folders = [tmp_path / "alex" / "keys", tmp_path / "kim" / "keys"]
        for n, folder in enumerate(folders, 1):
            folder.mkdir(parents=True)
            for file in (f"plans-{n}.pem", "root.json"):
                (folder / file).write_bytes((tmp_path / "keys" / file).read_bytes())
        await asyncio.to_thread(
            change_roster, Source(cloud), lambda _: frozenset({bytes(32)}), folders[0]
        )
        with pytest.raises(Conflict, match="a roster of devices waits for signatures"):
            await signed(cloud, run_id, tmp_path / "kim")
        both = await signed(cloud, run_id, tmp_path / "alex")  # who has checked the roster
        assert not both.submitted.published

    story_of(tmp_path, story, keys={"plans": 2}, thresholds={"plans": 2})


@pytest.mark.long
def test_a_run_waits_for_as_many_people_as_the_role_needs(tmp_path):
    """Both sign with the same options; the second makes the waiting plan again."""

    async def story(cloud, run_id):
        await until(cloud, run_id, waits)
        for name in ("alex", "kim"):
            (tmp_path / name).mkdir()
        keys = tmp_path / "keys"
        for n, name in enumerate(("alex", "kim"), 1):
            (tmp_path / name / "keys").mkdir()
            for file in (f"plans-{n}.pem", "root.json"):
                (tmp_path / name / "keys" / file).write_bytes((keys / file).read_bytes())
        first = await signed(cloud, run_id, tmp_path / "alex")
        assert (first.submitted.published, first.submitted.signatures) == (False, 1)
        with pytest.raises(Corrupt, match="must use the same options"):
            await signed(cloud, run_id, tmp_path / "kim", least=Least())
        second = await signed(cloud, run_id, tmp_path / "kim")
        assert second.submitted.published
        await until(cloud, run_id, gathers)

    story_of(tmp_path, story, keys={"plans": 2}, thresholds={"plans": 2})


@pytest.mark.long
def test_a_folder_without_the_key_signs_nothing(tmp_path):
    async def story(cloud, run_id):
        (tmp_path / "keys" / "plans.pem").unlink()
        with pytest.raises(NotFound, match="no key of the role plans"):
            await signed(cloud, run_id, tmp_path)

    story_of(tmp_path, story)


@pytest.mark.slow
def test_a_cloud_raises_its_numbers_for_a_device_that_saw_higher_ones(tmp_path, monkeypatch):
    """It was restored from a backup; any other device refuses what is older than it has seen."""

    async def story():
        async with running(given.make_home(tmp_path)) as cloud:
            repository, raised = cloud.repository, threading.Event()
            before, overtake = repository.versions(), repository.overtake

            def overtaking(numbers):
                is_done = overtake(numbers)
                raised.set()
                return is_done

            monkeypatch.setattr(repository, "overtake", overtaking)
            seen = {"timestamp": before["timestamp"] + 5, "odd": 3}
            (device,) = await given.devices_of(cloud, tmp_path, ("ann",))
            device.offer = lambda: pb.Offer(
                population=given.POPULATION, examples=1, metadata_versions=seen
            )
            async with device.live():
                assert await asyncio.to_thread(raised.wait, 30)
                return repository.versions()["timestamp"] - before["timestamp"]

    assert within(story()) == 6
