"""Federated runs whose cloud and devices are killed at random and journaled instants, for real.

Where every device reports, the model must be the undisturbed run's, bit for bit. Where devices are
killed too, rounds go on without some of them, and every state must follow from what was counted.
"""

import asyncio
import random

import numpy as np
import pytest
from tests.cloud.federation.given import living, shard
from tests.faults.lab import LAB, NAMES, REAL, Lab, Tally, instant, rejoined_s, strike
from tests.faults.nursery import Nursery

from triplane.cloud.federation import journal
from triplane.cloud.federation.run_projection import follow
from triplane.cloud.federation.spec import hyper_of
from triplane.proto import federation_pb2 as pb
from triplane.proto.transfer import digest_of
from triplane.unified_ir.federated.core import learn
from triplane.unified_ir.federated.core.files import read_state, write_state
from triplane.unified_ir.federated.core.reduce import reduce
from triplane.unified_ir.federated.core.run import Arrived, Outcome, Phase, Reduced
from triplane.unified_ir.runtime import Plan

KILLS_OF_CLOUD, KILLS_OF_ALL = 16, 36
ROUNDS = 30
DEADLINE_S = 240.0
REJOIN_S = 5.0
AWAY = 0.25  # share of kills after which devices stay away for longer than patience

pytestmark = [pytest.mark.slow, pytest.mark.long]

EXACT = {
    "model": "tiny@1", "rounds": ROUNDS, "algorithm": "fedadam", "evaluate_every": 10,
    "cohort": {"devices": len(NAMES), "deadline_s": 600.0, "patience_s": 120.0},
}  # fmt: skip
ROUGH = {
    "model": "tiny@1", "population": LAB, "rounds": ROUNDS, "algorithm": "fedadam",
    "cohort": {"devices": len(REAL), "quorum": 0.3, "deadline_s": 60.0, "patience_s": 0.5},
}  # fmt: skip


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    with Nursery() as nursery:
        made = Lab(tmp_path_factory.mktemp("lab"), nursery)
        asyncio.run(made.furnish())
        with made.started():
            yield made


async def only_the_cloud(lab, kills, rng, tally):
    """Runs until the cloud was killed so often: an undisturbed one, then the others."""
    async with living(lab.devices):
        runs = [await lab.ended(await lab.begin(**EXACT))]
        while tally.killed < kills:
            run_id = await lab.begin(**EXACT)
            goes_on = True
            while goes_on and tally.killed < kills:
                goes_on = await asyncio.to_thread(instant, lab, run_id, rng, tally)
                await strike({"cloud": lab.cloud}, tally)
            runs.append(await lab.ended(run_id))
    return runs


def test_a_cloud_killed_at_any_instant_ends_with_the_same_model(lab):
    tally = Tally()
    check_exact(lab, KILLS_OF_CLOUD, random.Random(4), tally)
    assert tally.killed >= KILLS_OF_CLOUD
    assert tally.instants["journaled"] > KILLS_OF_CLOUD // 4, tally


def check_exact(lab, kills, rng, tally):
    async def story():
        async with asyncio.timeout(DEADLINE_S * max(1, kills // KILLS_OF_CLOUD)):
            runs = await only_the_cloud(lab, kills, rng, tally)
            return runs, [await lab.digest(run) for run in runs]

    (calm, *rough), digests = asyncio.run(story())
    for run in (calm, *rough):
        assert run.phase == pb.Run.DONE, run.reason
        assert all(r.counted == len(NAMES) for r in run.rounds)
        assert [(r.loss, r.bytes_up) for r in run.rounds] == [
            (r.loss, r.bytes_up) for r in calm.rounds
        ]
        assert not run.refusals.reasons
    assert set(digests) == {digests[0]}
    check_acknowledged(lab, rough)
    return rough


def check_acknowledged(lab, runs):
    """Every acknowledged update is in the journal with the bytes that were sent."""
    for run in runs:
        _, _, events = lab.journaled(run.id)
        journaled = {(e.lease, e.update.blob) for e in events if isinstance(e, Arrived)}
        sent = {
            (kept.told.lease.hex(), kept.told.update.blob.sha256.hex())
            for device in lab.devices
            for kept in device.kept
            if kept.acknowledged and kept.told.run == run.id and kept.told.HasField("update")
        }
        assert len(sent) == ROUNDS * len(NAMES)
        assert sent <= journaled


async def all_of_them(lab, kills, rng, tally):
    """Runs until processes were killed so often, one to all at one instant."""
    runs: list[pb.Run] = []
    with lab.real_devices() as devices:
        everybody = {**devices, "cloud": lab.cloud}
        while tally.killed < kills:
            run_id = await lab.begin(**ROUGH)
            goes_on = True
            while goes_on and tally.killed < kills:
                goes_on = await asyncio.to_thread(instant, lab, run_id, rng, tally)
                away = rng.random() < AWAY
                names = sorted(devices if away else everybody)
                names = rng.sample(names, rng.randint(1, len(names)))
                pause_s = rng.uniform(0.5, 1.0) if away else 0.0
                await strike({name: everybody[name] for name in names}, tally, pause_s)
            runs.append(await lab.ended(run_id))
    return runs


def test_a_run_whose_devices_and_cloud_are_killed_is_the_replay_of_what_counted(lab):
    tally = Tally()
    check_replays(lab, KILLS_OF_ALL, random.Random(5), tally)
    assert KILLS_OF_CLOUD + tally.killed >= 50
    assert tally.at_once > 1


def check_replays(lab, kills, rng, tally):
    async def story():
        async with asyncio.timeout(DEADLINE_S * max(1, kills // KILLS_OF_ALL)):
            return await all_of_them(lab, kills, rng, tally)

    runs = asyncio.run(story())
    for run in runs:
        assert run.phase == pb.Run.DONE, run.reason
        assert replayed(lab, run.id) == run.spec.rounds
        assert not run.refusals.reasons
    assert any(r.counted < len(REAL) for run in runs for r in run.rounds), "no kill was felt"
    return runs


def test_a_killed_device_has_its_lease_again_at_once(lab):
    """Started by its command, as after a power cut: measured to the journaled event."""
    fields = ROUGH | {"rounds": 20, "cohort": {"devices": 1, "quorum": 1.0, "patience_s": 60.0}}
    rng, tally = random.Random(6), Tally()

    async def story():
        async with asyncio.timeout(DEADLINE_S):
            run_id = await lab.begin(**fields)
            for _ in range(2):
                assert await asyncio.to_thread(instant, lab, run_id, rng, tally)
                await strike({"dora": dora}, tally)
            return await lab.ended(run_id)

    dora = lab.cold().device("dora")
    try:
        run = asyncio.run(story())
    finally:
        dora.stop()
    assert run.phase == pb.Run.DONE, run.reason
    assert all((r.counted, r.lost) == (1, 0) for r in run.rounds)
    _, _, events = lab.journaled(run.id)
    found = rejoined_s(tally, events)
    assert found, "the last start is timed, the first where the second kill left it the time"
    assert max(found) < REJOIN_S


def replayed(lab, run_id):
    """How many states of the journal follow from its counted updates alone, learnt again here."""
    entry, last, events = lab.journaled(run_id)
    folder, prepared = lab.home.blobs, entry.prepared
    assert prepared is not None
    plan = Plan.load(folder / prepared.plan)
    state = read_state(folder / prepared.state, plan=plan.digest)
    slots: dict[str, np.ndarray] = {}
    book, reduced = journal.first_book(entry), 0
    for event in events:
        if isinstance(event, Reduced) and book.state.phase is Phase.REDUCING:
            updates = [again(plan, state, book.state.round, x, entry.spec) for x in counted(book)]
            state, slots = reduce(
                state, slots, updates, weighting=prepared.weighting,
                server=prepared.server, hyper=hyper_of(entry.spec),
            )  # fmt: skip
            write_state(lab.folder / "again", state, prepared.roles, plan=plan.digest)
            assert digest_of(lab.folder / "again").hex() == event.shared
            reduced += 1
        book, _ = follow(book, event)
    assert book == last
    return reduced


def counted(book):
    return [x for x in book.state.round.leases if x.outcome is Outcome.COUNTED]


def again(plan, state, found, lease, spec):
    """What the device of a lease learnt, learnt once more."""
    s = spec.sampling
    work = learn.Work(
        run="", round=found.number, device=lease.device, seed=spec.seed, steps=s.steps,
        batch_size=s.batch_size, support=s.support, query=s.query,
    )  # fmt: skip
    plan.assign(state)
    made = learn.learn(plan, work, shard(REAL.index(lease.device)))
    assert made.examples == lease.update.examples
    return made.examples, lambda: made.change
