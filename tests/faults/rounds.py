"""Runs whose processes are killed, and how they are judged."""

import asyncio

import numpy as np
from tests.cloud.federation.given import living, shard
from tests.faults.lab import LAB, NAMES, REAL, instant, strike

from triplane.cloud.federation import journal
from triplane.cloud.federation.run_projection import follow
from triplane.cloud.federation.spec import hyper_of, robustness_of
from triplane.proto import federation_pb2 as pb
from triplane.proto.blobs import digest_of
from triplane.unified_ir.federated.algorithms import algorithm
from triplane.unified_ir.federated.algorithms.aggregators import reduce_round
from triplane.unified_ir.federated.core import learn
from triplane.unified_ir.federated.core.draws import Draws
from triplane.unified_ir.federated.core.files import read_state, write_state
from triplane.unified_ir.federated.core.limits import RoundUpdate
from triplane.unified_ir.federated.core.run import Arrived, Outcome, Phase, Reduced, Restarted
from triplane.unified_ir.runtime import Plan

KILLS_OF_CLOUD, KILLS_OF_ALL = 16, 36
ROUNDS = 30
DEADLINE_S = 240.0
AWAY = 0.25  # share of kills after which devices stay away for longer than patience
EXACT = {
    "model": "tiny@1", "rounds": ROUNDS, "algorithm": "fedadam", "evaluate_every": 10,
    "cohort": {"devices": len(NAMES), "deadline_s": 600.0, "patience_s": 120.0},
}  # fmt: skip
ROUGH = {
    "model": "tiny@1", "population": LAB, "rounds": ROUNDS, "algorithm": "fedadam",
    "cohort": {"devices": len(REAL), "quorum": 0.3, "deadline_s": 60.0, "patience_s": 0.5},
}  # fmt: skip


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
    check_states(lab, [calm, *rough])
    return rough


def check_states(lab, runs):
    """What runs reference is there, and the states that they published before are there no more.

    A kill between a commit and the removals that follow it leaves the state of one round.
    """
    there, needed, published = {x.name for x in lab.home.blobs.iterdir()}, set(), set()
    restarts = 0
    for run in runs:
        entry, projection, events = lab.journaled(run.id)
        needed |= {sha256.hex() for sha256 in journal.references(entry, projection)}
        published |= {event.shared for event in events if isinstance(event, Reduced)}
        restarts += sum(isinstance(event, Restarted) for event in events)
    assert needed <= there
    assert len((published - needed) & there) <= restarts


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


def replayed(lab, run_id):
    """How many rounds led to states that follow from counted updates alone, learnt again here.

    A round after which the run returns to an earlier state is one of them.
    """
    entry, last, events = lab.journaled(run_id)
    folder, prepared = lab.home.blobs, entry.prepared
    assert prepared is not None
    plan = Plan.load(folder / prepared.plan)
    state = read_state(folder / prepared.state, plan=plan.digest)
    slots: dict[str, np.ndarray] = {}
    states = {prepared.state: state}
    projection, reduced = journal.first_projection(entry), 0
    for event in events:
        before = projection.state
        if isinstance(event, Reduced) and before.phase is Phase.REDUCING:
            # The run may have returned to an earlier state, and begun its optimizer again there.
            slots = {} if before.fresh_optimizer else slots
            state, slots = reduced_again(plan, states[before.shared], slots, projection, entry)
            write_state(lab.folder / "again", state, prepared.roles, plan=plan.digest)
            assert digest_of(lab.folder / "again").hex() == event.shared
            states[event.shared] = state
            reduced += 1
        projection, _ = follow(projection, event)
    assert projection == last
    return reduced + projection.state.watch.returns


def reduced_again(plan, state, slots, projection, entry):
    """The next state and slots of a round's updates within the limits, learnt once more."""
    spec, found = entry.spec, projection.state.round
    updates = [RoundUpdate(*again(plan, state, found, x, spec)) for x in counted(projection)]
    done = reduce_round(
        state, slots, updates, robustness=robustness_of(spec),
        draws=Draws(spec.seed, found.number, "", "buckets"), weighting=entry.prepared.weighting,
        server=algorithm(spec.algorithm).server, hyper=hyper_of(spec),
    )  # fmt: skip
    return done.state, done.slots


def counted(projection):
    return [x for x in projection.state.round.leases if x.outcome is Outcome.COUNTED]


def again(plan, state, found, lease, spec):
    """What the device of a lease learnt, learnt once more."""
    s = spec.sampling
    work = learn.Work(
        run="", round=found.number, device=lease.device, seed=spec.seed, steps=s.steps,
        batch_size=s.batch_size, support=s.support, query=s.query,
    )  # fmt: skip
    plan.assign(state)
    names = REAL if lease.device in REAL else NAMES
    made = learn.learn(plan, work, shard(names.index(lease.device)))
    assert made.examples == lease.update.examples
    return made.examples, lambda: made.change
