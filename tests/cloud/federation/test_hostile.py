"""Contributions that cannot count: refused with a word and a reason, while the run goes on.

One run with an honest device and hostile ones, each of which has an idea of its own for the first
round. Those that are refused rest in the second round and are honest from then on.
"""

import asyncio
import hashlib
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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

from triplane.cloud.federation.update_store import BELATED, UPLOADS, UpdateStore
from triplane.cloud.identity import servicers
from triplane.cloud.server import running
from triplane.proto import federation_pb2 as pb
from triplane.proto.errors import Conflict, InvalidInput
from triplane.proto.status import remote_errors
from triplane.proto.transfer import upload
from triplane.proto.transfer_pb2 import DownloadRequest
from triplane.proto.transfer_pb2_grpc import TransferStub
from triplane.unified_ir.federated.core import learn
from triplane.unified_ir.federated.core.files import INLINE_BYTES, like_of
from triplane.unified_ir.federated.core.run import RunMember, RunState
from triplane.unified_ir.federated.core.run_plan import RunPlan
from triplane.unified_ir.federated.core.vector import VectorLayout, encode_vector
from triplane.unified_ir.files import container

DEADLINE_S = 90.0
OTHER_RUN = "f" * 16


def honest(device, task):
    return learn.learn(device.plan(task), work_of(task, device.name), device.shard).change


def told(device, task, data, **figures):
    """Uploads `data` and says that it is the update."""
    update = device.sent(data, **{"examples": device.shard.examples} | figures)
    return contribution(task, update=update)


def contribution(task, **outcome):
    return pb.Contribution(run=task.run, round=task.round, lease=task.lease, **outcome)


def wrong_shape(device, task):
    change = honest(device, task)
    name = min(change)
    change[name] = np.zeros((*change[name].shape, 1), np.float32)
    return told(device, task, update_bytes(task, change))


def wrong_dtype(device, task):
    change = honest(device, task)
    name = min(change)
    change[name] = change[name].astype(np.float16)
    return told(device, task, update_bytes(task, change))


def not_a_number(device, task):
    change = honest(device, task)
    change[max(change)].flat[0] = np.nan
    return told(device, task, update_bytes(task, change))


def missing_tensor(device, task):
    change = honest(device, task)
    change.pop(min(change))
    return told(device, task, update_bytes(task, change))


def other_runs(device, task):
    return told(device, task, update_bytes(task, honest(device, task), run=OTHER_RUN))


def of_another_lease(device, task):
    return told(device, task, update_bytes(task, honest(device, task), lease="0" * 32))


def of_another_base(device, task):
    update = told(device, task, update_bytes(task, honest(device, task)))
    update.base = task.base + 1
    return update


def personal_tensor(device, task):
    change = honest(device, task)
    roles = dict.fromkeys(change, "parameter") | {min(change): "personal"}
    part = container.tensor_part("change.safetensors", change, roles)
    facts = {
        "compression": "", "lease": task.lease.hex(), "round": str(task.round), "run": task.run,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "update"
        container.write(path, "update", [part], properties=facts)
        return told(device, task, path.read_bytes())


def garbage(device, task):
    return told(device, task, b"PK\x03\x04" + bytes(range(256)))


def truncated(device, task):
    return told(device, task, update_bytes(task, honest(device, task))[:-7])


def compressed_unasked(device, task):
    asked = pb.Task()
    asked.CopyFrom(task)
    asked.learn.compression = "int8"
    return told(device, task, update_bytes(asked, honest(device, task)))


def oversized(device, task):
    with tempfile.NamedTemporaryFile() as file:
        file.truncate(64 << 20)
        with pytest.raises(InvalidInput, match="at most"):
            upload(device.channel, Path(file.name))
    blob = pb.Blob(sha256=bytes(32), size=64 << 20)
    return contribution(task, update=pb.Update(blob=blob, examples=1, loss=0.5, seconds=0.1))


def models_blob(device, task):
    """Names a file of the cloud's own, which it never sent."""
    return contribution(task, update=pb.Update(blob=task.state, examples=1, loss=0.5, seconds=0.1))


def too_many_examples(device, task):
    return told(device, task, update_bytes(task, honest(device, task)), examples=10**9)


def infinite_loss(device, task):
    return told(device, task, update_bytes(task, honest(device, task)), loss=float("inf"))


def a_score(device, task):
    return contribution(task, score=pb.Score(samples=1, before=0.5, after=0.5))


def many_files(device, task):
    for n in range(UPLOADS):
        device.sent(bytes([n]) * 99, examples=1)
    with pytest.raises(InvalidInput, match="limit"):
        device.sent(b"one more", examples=1)
    return contribution(task, declined="I tried\x1b[2J")


def inline(task, data, sha256=None, size=None):
    """An update that comes with its contribution."""
    blob = pb.Blob(sha256=sha256 or hashlib.sha256(data).digest(), size=size or len(data))
    update = pb.Update(blob=blob, examples=1, loss=0.5, seconds=0.1, inline=data)
    return contribution(task, update=update)


def inline_under_another_name(device, task):
    return inline(task, update_bytes(task, honest(device, task)), sha256=bytes(32))


def inline_of_another_size(device, task):
    return inline(task, update_bytes(task, honest(device, task)), size=7)


def inline_garbage(_device, task):
    return inline(task, b"PK\x03\x04" + bytes(range(256)))


def inline_too_long(_device, task):
    return inline(task, bytes(INLINE_BYTES + 1))


def inline_of_another_run(device, task):
    return inline(task, update_bytes(task, honest(device, task), run=OTHER_RUN))


def vector(device, task, change=None, layout=None, data=None, lease=b"", sha256=None, size=None):
    """An update that comes as a vector."""
    change = honest(device, task) if change is None else change
    of_change = VectorLayout.of(like_of(change))
    lease = (lease or task.lease).hex()
    data = encode_vector(change, of_change, lease) if data is None else data
    named = pb.Blob(sha256=sha256 or hashlib.sha256(data).digest(), size=size or len(data))
    update = pb.Update(
        blob=named, examples=1, loss=0.5, seconds=0.1,
        vector=pb.UpdateVector(data=data, layout=layout or of_change.digest),
    )  # fmt: skip
    return contribution(task, update=update)


def vector_of_another_layout(device, task):
    change = honest(device, task)
    name = min(change)
    change[f"{name}x"] = change.pop(name)
    return vector(device, task, change)


def vector_with_a_personal_tensor(device, task):
    return vector(device, task, {**honest(device, task), "head": np.zeros(3, np.float32)})


def vector_cut_short(device, task):
    layout = VectorLayout.of(like_of(honest(device, task))).digest
    return vector(device, task, layout=layout, data=bytes(8))


def vector_of_nothing(device, task):
    layout = VectorLayout.of(like_of(honest(device, task))).digest
    return vector(device, task, layout=layout, data=b"")


def vector_file(device, task, data):
    """A vector that is uploaded."""
    layout = VectorLayout.of(like_of(honest(device, task))).digest
    update = device.sent(data, examples=1)
    update.vector.layout = layout
    return contribution(task, update=update)


def vector_in_a_short_file(device, task):
    return vector_file(device, task, bytes(12))


def vector_in_a_long_file(device, task):
    change = honest(device, task)
    layout = VectorLayout.of(like_of(change))
    return vector_file(device, task, encode_vector(change, layout, task.lease.hex()) + b"0")


def vector_of_another_lease(device, task):
    return vector(device, task, lease=bytes(16))


def vector_not_a_number(device, task):
    change = honest(device, task)
    change[max(change)].flat[0] = np.nan
    return vector(device, task, change)


def vector_under_another_name(device, task):
    return vector(device, task, sha256=bytes(32))


def vector_of_another_size(device, task):
    return vector(device, task, size=7)


def vector_too_long(device, task):
    return vector(device, task, data=bytes(INLINE_BYTES + 1))


def vector_without_a_layout(device, task):
    update = vector(device, task)
    update.update.vector.layout = b""
    return update


# fmt: off
HOSTILE = (
    (wrong_shape,        "shape"),
    (wrong_dtype,        "shape"),
    (not_a_number,       "nonfinite"),
    (missing_tensor,     "names"),
    (other_runs,         "foreign"),
    (of_another_lease,   "foreign"),
    (of_another_base,    "base"),
    (personal_tensor,    "personal"),
    (garbage,            "damaged"),
    (truncated,          "damaged"),
    (compressed_unasked, "compression"),
    (oversized,          "missing"),
    (models_blob,        "missing"),
    (too_many_examples,  "figures"),
    (infinite_loss,      "figures"),
    (a_score,            "kind"),
    (many_files,         ""),
    (inline_under_another_name, "damaged"),
    (inline_of_another_size,    "damaged"),
    (inline_garbage,     "damaged"),
    (inline_too_long,    "oversized"),
    (inline_of_another_run, "foreign"),
    (vector_of_another_layout,      "names"),
    (vector_with_a_personal_tensor, "names"),
    (vector_cut_short,          "shape"),
    (vector_of_nothing,         "missing"),
    (vector_in_a_short_file,    "shape"),
    (vector_in_a_long_file,     "shape"),
    (vector_of_another_lease,   "foreign"),
    (vector_not_a_number,       "nonfinite"),
    (vector_under_another_name, "damaged"),
    (vector_of_another_size,    "damaged"),
    (vector_too_long,           "oversized"),
    (vector_without_a_layout,   "names"),
)
# fmt: on
ROUNDS = 3


def acting(act):
    async def misbehave(device, task):
        if device.kept:
            return await device.contribute(await device.learnt(task))
        return await device.contribute(Kept(task, await asyncio.to_thread(act, device, task)))

    return misbehave


async def repeat(device, task):
    """Learns honestly and sends each update twice."""
    kept = await device.learnt(task)
    await device.contribute(kept)
    await device.contribute(kept)


async def replay(device, task):
    """Learns honestly, then sends in the second round what it sent in the first."""
    if task.round == 1:
        return await device.contribute(await device.learnt(task))
    # Within its message: the cloud may be removing the file of the first round just now.
    return await device.contribute(Kept(task, inline(task, device.kept[0].data)))


async def overrate(device, task):
    """Learns honestly and claims an impossible score."""
    if task.WhichOneof("work") == "learn":
        return await device.contribute(await device.learnt(task))
    bad = pb.Score(samples=10**6, before=2.0, after=-1.0)
    return await device.contribute(Kept(task, contribution(task, score=bad)))


LATER = {"repeat": repeat, "replay": replay, "overrate": overrate}
HONEST = 1 + len(LATER)  # devices whose first contribution counts


async def story(folder):
    async with asyncio.timeout(DEADLINE_S), running(make_home(folder)) as cloud:
        await registered(cloud, folder)
        acts = {f"h{k:02}": acting(act) for k, (act, _) in enumerate(HOSTILE)} | LATER
        devices = await devices_of(cloud, folder, ("ann", *acts))
        for device in devices[1:]:
            device.act = acts[device.name]
        every = len(devices)
        # The cloud's threads are of the same pool: devices that wait for it must leave it some.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2 * every))
        cohort = {"devices": every, "quorum": 1 / every}
        async with living(devices):
            request = start_request(rounds=ROUNDS, cohort=cohort)
            made = await cloud.federation.begin(request, by="operator")
            run = await ended(cloud, made.id)
            strangers = await asyncio.to_thread(uninvited, devices[1])
        left = [p.name for p in cloud.federation.updates.folder.folder.iterdir() if p.is_file()]
        return run, {device.name: device for device in devices}, strangers, left


def uninvited(device):
    """What a device without a lease is told."""
    with pytest.raises(Conflict, match="no open lease") as written:
        device.sent(b"no lease" * 10, examples=1)
    stub = TransferStub(device.channel)
    request = DownloadRequest(sha256=device.kept[0].task.plan.sha256)
    with pytest.raises(InvalidInput, match="open tasks only") as read, remote_errors():
        list(stub.Download(request))
    return written.value, read.value


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(servicers, "ENROLMENTS_PER_S", 2 * (HONEST + len(HOSTILE)))
        return asyncio.run(story(tmp_path_factory.mktemp("hostile")))


def test_a_run_with_a_hostile_device_is_done(outcome):
    run, _, _, _ = outcome
    assert run.phase == pb.Run.DONE, run.reason
    assert run.result == "tiny@2"


def test_the_round_counts_the_honest_ones(outcome):
    run, _, _, _ = outcome
    first = run.rounds[0]
    assert (first.asked, first.counted, first.refused) == (
        HONEST + len(HOSTILE), HONEST, len(HOSTILE),
    )  # fmt: skip


@pytest.mark.parametrize("number", range(len(HOSTILE)), ids=lambda n: HOSTILE[n][0].__name__)
def test_the_contribution_is_refused_with_a_reason(outcome, number):
    device = outcome[1][f"h{number:02}"]
    settled = device.settled(device.kept[0].task.lease)
    assert not settled.counted
    assert settled.reason
    assert settled.reason.isprintable()


def test_a_device_whose_contribution_was_refused_rests_and_one_that_declined_does_not(outcome):
    run, devices, _, _ = outcome
    second = next(r for r in run.rounds if r.number == 2)
    declines = {f"h{k:02}" for k, (_, kind) in enumerate(HOSTILE) if not kind}
    assert second.asked == HONEST + len(declines)
    for name, device in devices.items():
        if name.startswith("h"):
            assert (2 in {kept.task.round for kept in device.kept}) == (name in declines)


def test_refusals_are_counted_by_their_word(outcome):
    run, _, _, _ = outcome
    expected: dict[str, int] = {}
    for _, kind in HOSTILE:
        if kind:
            expected[kind] = expected.get(kind, 0) + 1
    expected["foreign"] += 1  # the replay
    expected["figures"] += 1  # the impossible score
    assert {r.kind: r.count for r in run.refusals.reasons} == expected
    assert all(r.newest for r in run.refusals.reasons)


def test_people_see_why_the_newest_contribution_of_each_device_did_not_count(outcome):
    run, devices, _, _ = outcome
    said = {member.device: member.reason for member in run.members}
    assert not said["ann"]
    assert said["replay"]
    for name in ("h00", "replay"):
        assert said[name] == devices[name].settled(devices[name].kept[-1].task.lease).reason


def test_the_same_update_twice_counts_once(outcome):
    run, devices, _, _ = outcome
    member = next(m for m in run.members if m.device == "repeat")
    learned = {k.task.lease for k in devices["repeat"].kept if k.told.HasField("update")}
    assert len(learned) == ROUNDS
    assert all(devices["repeat"].settled(lease).counted for lease in learned)
    assert member.counted >= ROUNDS


def test_an_update_replayed_in_another_round_is_refused(outcome):
    replayed = outcome[1]["replay"].kept[1]
    assert replayed.task.round == 2
    settled = outcome[1]["replay"].settled(replayed.task.lease)
    assert not settled.counted
    assert "lease" in settled.reason


def test_an_impossible_score_is_refused_and_shown_nowhere(outcome):
    run, _, _, _ = outcome
    member = next(m for m in run.members if m.device == "overrate")
    assert not member.HasField("score")
    assert run.rounds[-1].evaluates
    assert run.rounds[-1].refused >= 1


def test_without_a_lease_a_device_neither_writes_nor_reads(outcome):
    _, _, (written, read), _ = outcome
    assert "'h00'" in str(written)
    assert "open tasks" in str(read)


def test_nothing_of_a_closed_round_stays_in_the_spool(outcome):
    _, _, _, left = outcome
    assert left == []


def test_leases_that_a_device_invents_fill_no_journal():
    member = RunMember(device="mallory", connected=True, examples=9)
    plan = RunPlan(rounds=1, devices=1, asked=1, quorum=1, deadline_s=1.0, patience_s=1.0)
    state = RunState(plan=plan, run=OTHER_RUN, shared="", members={"mallory": member})
    told = pb.Contribution(run=OTHER_RUN, lease=bytes(16), declined="no")
    run: Any = SimpleNamespace(projection=SimpleNamespace(state=state))
    spool: Any = None
    make = asyncio.run(UpdateStore.judge(spool, run, "mallory", told))
    assert make(state, 1.0) is not None
    for late in (BELATED, BELATED + 1000):
        often = replace(state, members={"mallory": replace(member, dropped=late)})
        assert make(often, 1.0) is None
    assert make(replace(state, members={}), 1.0) is None
