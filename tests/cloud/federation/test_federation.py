"""Runs as people steer them and devices meet them, on the real service."""

import asyncio
import errno
import itertools
import secrets

import pytest
from tests.cloud.federation.given import (
    POPULATION,
    Kept,
    devices_of,
    ended,
    living,
    make_home,
    registered,
    spec,
    start_request,
)
from tests.support.deadlines import within

from triplane.cloud.federation import journal, results
from triplane.cloud.federation.spec import with_defaults
from triplane.cloud.server import running
from triplane.proto import federation_pb2 as pb
from triplane.proto.blobs import BlobFolder
from triplane.proto.disk import NoRoom, OsDisk, refusal
from triplane.proto.errors import Conflict, InvalidInput, NotFound, Unavailable
from triplane.unified_ir.federated.core import files
from triplane.unified_ir.federated.core.run import NEWEST_RULES, Restarted


async def until(cloud, run_id, holds):
    while True:
        moved = cloud.federation.moved
        run = await cloud.federation.run(run_id)
        if holds(run):
            return run
        await moved.wait()


async def begun(cloud, **fields):
    return (await cloud.federation.begin(start_request(**fields), by="operator")).id


@pytest.mark.slow
def test_patience_counts_from_when_the_plan_is_there(tmp_path):
    """A child makes it, which takes longer than starting Python."""

    async def story():
        async with running(make_home(tmp_path)) as cloud:
            await registered(cloud, tmp_path)
            run_id = await begun(cloud)
            await until(cloud, run_id, lambda run: run.phase == pb.Run.GATHERING)
            return cloud.federation.live.get(run_id)

    live = within(story())
    assert live.projection.state.since_s - live.record.started_s > 0.1
    assert live.projection.state.rules == NEWEST_RULES


async def never(_device, _task):
    """Takes its work and is silent."""


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model": "no model"}, "model"),
        ({"population": "no name!"}, "population"),
        ({"algorithm": "magic"}, "fedavg, fedprox"),
        ({"algorithm": "maml+sgd"}, r"or add \+adam"),
        ({"algorithm": "fedadam+adam"}, r"no algorithm 'fedadam\+adam'"),
        ({"compression": "zip"}, "int8"),
        ({"keep": 0.5}, "top-k"),
        ({"rounds": 10**9}, "rounds"),
        ({"privacy": ["noise"]}, "noise"),
        ({"privacy": ["secure-aggregation"]}, "secure-aggregation"),
        ({"release": "now"}, "release"),
        ({"cohort": {"quorum": 1.5}}, "quorum"),
        ({"cohort": {"devices": 10**6}}, "devices"),
        ({"cohort": {"deadline_s": float("nan")}}, "deadline_s"),
        ({"cohort": {"over_selection": -0.1}}, "over_selection"),
        ({"hyperparameters": pb.Hyperparameters(inner_steps=99)}, "inner_steps"),
        ({"hyperparameters": pb.Hyperparameters(lr=-1.0)}, "lr"),
        *(
            ({"hyperparameters": {name: value}}, f"{name} is a float32")
            for name in ("lr", "meta_lr", "proximal", "server_lr", "floor")
            for value in (1e300, 1e-300)
        ),
        ({"sampling": pb.Sampling(steps=2**31)}, "steps"),
        ({"alias": "latest"}, "alias"),
    ],
)
def test_a_spec_out_of_range_is_refused_by_name(fields, words):
    fields = {"sampling": pb.Sampling(steps=1)} | fields
    sampling = fields.pop("sampling")
    asked = spec(**fields)
    asked.sampling.CopyFrom(sampling)
    with pytest.raises(InvalidInput, match=words):
        with_defaults(asked)


def test_every_zero_becomes_a_default_that_can_be_asked_for_again():
    made = with_defaults(pb.Spec(model="tiny"))
    assert with_defaults(made) == made
    assert (made.algorithm, made.population, made.rounds) == ("fedavg", "default", 50)
    assert made.cohort.devices == 2
    assert with_defaults(pb.Spec(model="tiny", algorithm="maml")).sampling.steps == 5
    assert with_defaults(pb.Spec(model="tiny", algorithm="fedadam")).hyperparameters.server_lr < 1
    assert with_defaults(pb.Spec(model="tiny", algorithm="maml+adam")).hyperparameters.beta1 == 0.9


@pytest.mark.slow
def test_the_same_key_begins_one_run_and_another_request_is_refused(tmp_path):
    async def story():
        async with running(make_home(tmp_path)) as cloud:
            await registered(cloud, tmp_path)
            key = secrets.token_bytes(16)
            first = await cloud.federation.begin(start_request(key), by="operator")
            again = await cloud.federation.begin(start_request(key), by="operator")
            with pytest.raises(Conflict):
                await cloud.federation.begin(start_request(key, rounds=3), by="operator")
            with pytest.raises(NotFound):
                await begun(cloud, model="nobody")
            with pytest.raises(NotFound):
                await cloud.federation.run("f" * 16)
            listed = await cloud.federation.runs()
            return first, again, listed

    first, again, listed = within(story())
    assert first.id == again.id
    assert [run.id for run in listed] == [first.id]
    assert listed[0].spec.model == "tiny@1"


@pytest.mark.slow
def test_a_model_without_a_loss_fails_its_run_with_the_reason(tmp_path):
    from tests.cloud.registry.models import model_bytes

    from triplane.cloud.registry import Push

    async def story():
        async with running(make_home(tmp_path)) as cloud:
            blob = cloud.blobs.put(model_bytes(tmp_path))
            push = Push(model="bare", blob=blob, key=b"1" * 16)
            await cloud.registry.push(push, by="operator")
            run = await ended(cloud, await begun(cloud, model="bare"))
            with pytest.raises(Conflict, match="over"):
                await cloud.federation.resume(run.id, reason="", by="operator")
            return run

    run = within(story())
    assert run.phase == pb.Run.FAILED
    assert "loss" in run.reason


@pytest.mark.slow
def test_over_selection_counts_the_fastest_and_tells_the_last_it_was_late(tmp_path):
    async def story():
        async with running(make_home(tmp_path)) as cloud:
            await registered(cloud, tmp_path)
            devices = await devices_of(cloud, tmp_path, ("ann", "bob", "cy"))
            *fast, slow = devices
            held: list[pb.Task] = []
            asked = asyncio.Event()

            async def keep(device, task):
                if task.WhichOneof("work") == "evaluate":
                    await device.contribute(await device.learnt(task))
                else:
                    held.append(task)
                    asked.set()

            async def after_it_was_asked(device, task):
                await asked.wait()
                await device._worked(task)

            slow.act = keep
            for device in fast:
                device.act = after_it_was_asked
            async with living(devices):
                cohort = {"devices": 2, "over_selection": 0.5}
                run_id = await begun(cloud, rounds=1, cohort=cohort)
                run = await ended(cloud, run_id)
                kept = pb.Contribution(run=run.id, round=1, lease=held[0].lease, declined="late")
                await slow.contribute(Kept(held[0], kept))
            return run, slow.settled(held[0].lease)

    run, settled = within(story())
    assert run.phase == pb.Run.DONE, run.reason
    assert (run.rounds[0].asked, run.rounds[0].counted, run.rounds[0].late) == (3, 2, 1)
    assert not settled.counted
    assert "faster" in settled.reason


@pytest.mark.slow
def test_silent_device_costs_one_deadline_and_the_quorum_goes_on_without_it(tmp_path):
    async def story():
        async with running(make_home(tmp_path)) as cloud:
            await registered(cloud, tmp_path)
            devices = await devices_of(cloud, tmp_path, ("ann", "bob"))
            devices[1].act = never
            async with living(devices):
                cohort = {"quorum": 0.5, "deadline_s": 1.0}
                return await ended(cloud, await begun(cloud, rounds=2, cohort=cohort))

    run = within(story())
    assert run.phase == pb.Run.DONE, run.reason
    assert [(r.asked, r.counted, r.lost) for r in run.rounds] == [(2, 1, 1), (1, 1, 0), (1, 1, 0)]


@pytest.mark.slow
def test_a_round_without_a_quorum_is_given_up_and_tried_again(tmp_path):
    async def story():
        async with running(make_home(tmp_path)) as cloud:
            await registered(cloud, tmp_path)
            devices = await devices_of(cloud, tmp_path, ("ann", "bob"))
            tries: list[pb.Task] = []

            async def second_time(device, task):
                tries.append(task)
                if len(tries) > 1:
                    await device.contribute(await device.learnt(task))

            devices[1].act = second_time
            async with living(devices):
                cohort = {"quorum": 1.0, "deadline_s": 1.0}
                return await ended(cloud, await begun(cloud, rounds=1, cohort=cohort)), tries

    run, tries = within(story())
    assert run.phase == pb.Run.DONE, run.reason
    assert [bool(r.given_up) for r in run.rounds] == [True, False, False]
    assert tries[0].lease != tries[1].lease


@pytest.mark.slow
def test_a_stopped_run_ends_open_work_and_resumes_where_it_was(tmp_path):
    async def story():
        async with running(make_home(tmp_path)) as cloud:
            await registered(cloud, tmp_path)
            devices = await devices_of(cloud, tmp_path, ("ann", "bob"))
            devices[1].act = never
            async with living(devices):
                run_id = await begun(cloud, rounds=2)
                await devices[1].until(lambda work: work.tasks)
                stopped = await cloud.federation.halt(run_id, reason="lunch", by="operator")
                await devices[1].until(lambda work: not work.tasks)
                devices[1].act = None
                await cloud.federation.resume(run_id, reason="", by="operator")
                return stopped, await ended(cloud, run_id)

    stopped, run = within(story())
    assert (stopped.phase, stopped.reason) == (pb.Run.STOPPED, "lunch")
    assert run.phase == pb.Run.DONE, run.reason
    assert [r.counted for r in run.rounds] == [2, 2, 2]


@pytest.mark.long
def test_two_runs_of_one_population_both_end_and_another_population_is_not_asked(tmp_path):
    async def story():
        async with running(make_home(tmp_path)) as cloud:
            await registered(cloud, tmp_path)
            devices = await devices_of(cloud, tmp_path, ("ann", "bob"))
            async with living(devices):
                first, second = await begun(cloud), await begun(cloud, seed=8)
                other = await begun(cloud, population="elsewhere")
                runs = [await ended(cloud, first), await ended(cloud, second)]
                waiting = await until(
                    cloud, other, lambda r: r.phase == pb.Run.GATHERING and r.reason
                )
                return runs, waiting

    runs, waiting = within(story())
    assert [run.phase for run in runs] == [pb.Run.DONE] * 2
    assert not waiting.members
    assert waiting.reason == "0 of 2 devices are connected"


@pytest.mark.slow
def test_what_a_device_says_out_of_its_limits_ends_its_stream_and_nothing_else(tmp_path):
    async def story():
        async with running(make_home(tmp_path)) as cloud:
            await registered(cloud, tmp_path)
            refused = []
            for message in (
                pb.Offer(population="no name!", examples=1),
                pb.Offer(population=POPULATION, examples=1 << 40),
                pb.Offer(population=POPULATION, examples=1, software="x" * 1000),
                pb.Contribution(run="r", lease=b"short", declined="no"),
                pb.Contribution(run="r" * 100, lease=b"l" * 16, declined="no"),
                pb.Contribution(run="r", lease=b"l" * 16),
                pb.Work(),
            ):
                with pytest.raises(InvalidInput) as error:
                    await cloud.federation.devices.take("mallory", message)
                refused.append(str(error.value))
            stray = pb.Contribution(run="f" * 16, lease=b"l" * 16, declined="no")
            await cloud.federation.devices.take("mallory", stray)
            return refused, cloud.federation.devices.work_of("mallory")

    refused, work = within(story())
    assert len(set(refused)) == len(refused) - 1
    assert [(s.run, s.counted) for s in work.settled] == [("f" * 16, False)]


@pytest.mark.slow
def test_a_result_that_cannot_be_registered_stops_the_run_until_it_is_resumed(
    tmp_path, monkeypatch
):
    def refuse(*_args):
        raise Conflict("the shelf is full")

    async def story():
        async with running(make_home(tmp_path)) as cloud:
            await registered(cloud, tmp_path)
            devices = await devices_of(cloud, tmp_path, ("ann", "bob"))
            async with living(devices):
                with monkeypatch.context() as broken:
                    broken.setattr(cloud.registry, "insert", refuse)
                    stopped = await ended(cloud, await begun(cloud))
                await cloud.federation.resume(stopped.id, reason="", by="operator")
                return stopped, await until(cloud, stopped.id, lambda r: r.phase == pb.Run.DONE)

    stopped, run = within(story())
    assert stopped.phase == pb.Run.STOPPED
    assert "the shelf is full" in stopped.reason
    assert not stopped.result
    assert run.result == "tiny@2"


@pytest.mark.slow
def test_a_run_stopped_while_it_is_prepared_is_prepared_when_resumed(tmp_path):
    async def story():
        async with running(make_home(tmp_path)) as cloud:
            await registered(cloud, tmp_path)
            run_id = await begun(cloud)
            stopped = await cloud.federation.halt(run_id, reason="too soon", by="operator")
            devices = await devices_of(cloud, tmp_path, ("ann", "bob"))
            async with living(devices):
                await cloud.federation.resume(run_id, reason="", by="operator")
                return stopped, await ended(cloud, run_id)

    stopped, run = within(story())
    assert (stopped.phase, stopped.reason) == (pb.Run.STOPPED, "too soon")
    assert run.phase == pb.Run.DONE, run.reason


def limited(cloud, pages):
    """Let the database's file have so many pages at most, and no more than it has for 0."""

    def work(connection):
        has = connection.exec_driver_sql("PRAGMA page_count").scalar()
        connection.exec_driver_sql(f"PRAGMA max_page_count={pages or has}")

    return cloud.database.write(work)


@pytest.mark.slow
def test_a_run_waits_while_the_database_is_full_says_so_and_goes_on(tmp_path):
    async def story():
        async with running(make_home(tmp_path)) as cloud:
            await registered(cloud, tmp_path)
            async with living(await devices_of(cloud, tmp_path, ("ann", "bob"))):
                run_id = await begun(cloud, rounds=40)
                await until(cloud, run_id, lambda run: run.round >= 3)
                await limited(cloud, 0)
                full = await until(cloud, run_id, lambda run: "no room" in run.reason)
                await limited(cloud, 1 << 20)
                return full, await ended(cloud, run_id)

    full, run = within(story())
    assert full.phase not in {pb.Run.STOPPED, pb.Run.FAILED}
    assert full.reason.startswith("waits, and goes on by itself: the database has no room")
    assert run.phase == pb.Run.DONE, run.reason
    assert [r.counted for r in run.rounds] == [2] * 41


@pytest.mark.slow
def test_a_run_whose_next_state_finds_no_room_waits_for_it(tmp_path, monkeypatch):
    """The disk of blobs is full while it reduces, not that of the database."""
    kept = files.encode_state
    tries = []

    def full(*rest, **options):
        tries.append(rest)
        if len(tries) == 2:
            raise refusal(OSError(errno.ENOSPC, "No space left on device"), "the disk is full")
        return kept(*rest, **options)

    monkeypatch.setattr(results, "encode_state", full)

    async def story():
        async with running(make_home(tmp_path)) as cloud:
            await registered(cloud, tmp_path)
            async with living(await devices_of(cloud, tmp_path, ("ann", "bob"))):
                run_id = await begun(cloud)
                told = await until(
                    cloud, run_id, lambda r: "full" in r.reason and r.phase == pb.Run.REDUCING
                )
                return told, await ended(cloud, run_id)

    told, run = within(story())
    assert told.reason.startswith("waits, and goes on by itself")
    assert run.phase == pb.Run.DONE, run.reason


@pytest.mark.slow
def test_a_plan_that_finds_no_room_waits_for_it_and_the_run_begins(tmp_path, monkeypatch):
    kept, tries = BlobFolder.put_file, []

    def full(folder, source):
        tries.append(source)
        if source.name == "run.plan" and len(tries) == 1:
            raise refusal(OSError(errno.ENOSPC, "No space left on device"), "the disk is full")
        return kept(folder, source)

    async def story():
        async with running(make_home(tmp_path)) as cloud:
            await registered(cloud, tmp_path)
            monkeypatch.setattr(BlobFolder, "put_file", full)
            run_id = await begun(cloud)
            told = await until(cloud, run_id, lambda run: "full" in run.reason)
            return told, await until(cloud, run_id, lambda run: run.phase == pb.Run.GATHERING)

    told, run = within(story())
    assert told.phase == pb.Run.PREPARING
    assert "full" not in run.reason


@pytest.mark.slow
def test_devices_are_told_whether_a_run_asks_their_population(tmp_path):
    def told(asked):
        return lambda w: w.HasField("population_asked") and w.population_asked is asked

    async def story():
        async with running(make_home(tmp_path)) as cloud:
            await registered(cloud, tmp_path)
            devices = await devices_of(cloud, tmp_path, ("ann", "bob"))
            assert not cloud.federation.devices.greeting("eve").HasField("population_asked")
            async with living(devices):
                for device in devices:
                    await device.until(told(asked=False))
                run_id = await begun(cloud)
                for device in devices:
                    await device.until(told(asked=True))
                await ended(cloud, run_id)
                for device in devices:
                    await device.until(told(asked=False))
            return [work.population_asked for work in devices[0].heard]

    heard = within(story())
    assert [a for a, _ in itertools.groupby(heard)] == [False, True, False]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("blobs", marks=pytest.mark.long), "database"])
def test_a_cloud_that_starts_on_a_full_disk_serves_reads_and_its_run_goes_on_later(
    tmp_path, monkeypatch, kind
):
    home, fills = make_home(tmp_path), list[bool]()
    append, create = journal.append, OsDisk.create

    def appended(connection, run, events, revision):
        if fills and any(isinstance(event, Restarted) for event in events):
            raise NoRoom("the database has no room")
        append(connection, run, events, revision)

    def created(disk, path):
        if fills and path.name.startswith(results.UNFINISHED):
            raise OSError(errno.ENOSPC, "No space left on device")
        return create(disk, path)

    if kind == "blobs":
        monkeypatch.setattr(OsDisk, "create", created)
    else:
        monkeypatch.setattr(journal, "append", appended)

    async def story():
        async with running(home) as cloud:
            await registered(cloud, tmp_path)
            devices = await devices_of(cloud, tmp_path, ("ann", "bob"))
            async with living(devices):
                run_id = await begun(cloud, rounds=200)
                await until(cloud, run_id, lambda run: run.round >= 2)
            small = await cloud.database.read(journal.small_states)
            ports = {"port": cloud.port, "enrol_port": cloud.enrol_port}
        if kind == "blobs":
            assert small
            for sha256 in small:  # as a power cut takes them
                (home.blobs / sha256.hex()).unlink()
        fills.append(True)
        async with running(home, **ports) as cloud:
            waits = await cloud.federation.run(run_id)
            listed = (await cloud.federation.runs())[0]
            version = await cloud.registry.version("tiny@1")
            with pytest.raises(
                Unavailable, match=r"has not resumed run .* make room on the cloud's disk"
            ):
                await cloud.federation.halt(run_id, reason="", by="operator")
            with pytest.raises(Unavailable, match="has not resumed run"):
                cloud.federation.devices.greeting(
                    "ann"
                )  # nor is a device told that its leases are over
            async with living(devices):
                fills.clear()
                goes_on = await until(cloud, run_id, lambda run: run.round > waits.round + 2)
        return waits, listed, version, goes_on

    waits, listed, version, goes_on = within(story())
    for run in (waits, listed):
        assert run.reason.startswith("waits, and goes on by itself: ")
        assert "No space" in run.reason or "no room" in run.reason
    assert str(version) == "tiny@1"
    assert "waits" not in goes_on.reason
    assert {m.device for m in goes_on.members if m.connected} == {"ann", "bob"}


@pytest.mark.slow
def test_a_device_that_cannot_work_is_shown_with_its_reason_until_it_can(tmp_path):
    def waits(run):
        return {member.device: member.waits for member in run.members}

    async def story():
        async with running(make_home(tmp_path)) as cloud:
            await registered(cloud, tmp_path)
            federation, offer = cloud.federation, pb.Offer(population=POPULATION, examples=4)
            run_id = await begun(cloud)
            for name in ("ann", "bob"):
                federation.devices.greeting(name)
                await federation.devices.take(name, offer)
            await until(cloud, run_id, lambda run: len(run.members) == 2)
            full = pb.Offer(population=POPULATION, examples=4, waits="no room \x1b[31m")
            await federation.devices.take("ann", full)
            told = await until(cloud, run_id, lambda run: any(waits(run).values()))
            revision = told.revision
            await federation.devices.take("ann", offer)
            after = await until(cloud, run_id, lambda run: not any(waits(run).values()))
            return waits(told), after.revision == revision

    told, unwritten = within(story())
    assert told == {"ann": "no room ?[31m", "bob": ""}
    assert unwritten, "what people are shown is no event"
