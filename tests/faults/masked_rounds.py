"""Masked runs whose cloud is killed in every step, and how they are judged."""

import asyncio

from tests.cloud.federation.given import living
from tests.cloud.federation.masked import MaskedDevice, masked_request
from tests.faults.lab import NAMES, instant, strike

from triplane.cloud.federation import journal
from triplane.cloud.federation.run_projection import follow
from triplane.proto import federation_pb2 as pb
from triplane.unified_ir.federated.core.masked_step import STEPS
from triplane.unified_ir.federated.core.run import Masked

KILLS = 12
ROUNDS = 8
EVERY = 2
ANSWERED = ROUNDS + ROUNDS // EVERY
"""Rounds of a run, those that evaluate included."""
DEADLINE_S = 240.0


def masked(lab):
    """The lab's own devices as ones that take part in masked rounds."""
    return [MaskedDevice(d.identity, d.shard, d.folder) for d in lab.devices]


async def killed_runs(lab, devices, kills, rng, tally):
    runs: list[pb.Run] = []
    async with living(devices):
        while tally.killed < kills:
            request = masked_request(
                len(NAMES), model="tiny@1", rounds=ROUNDS, phase_s=120.0, norm="adaptive:8",
                scores="masked", evaluate_every=EVERY,
                cohort={"deadline_s": 600.0, "patience_s": 120.0},
            )  # fmt: skip
            run_id = await lab.start(request)
            goes_on = True
            while goes_on and tally.killed < kills:
                goes_on = await asyncio.to_thread(instant, lab, run_id, rng, tally)
                await strike({"cloud": lab.cloud}, tally)
            runs.append(await lab.ended(run_id))
    return runs


def check_masked(lab, kills, rng, tally):
    """No kill costs a round, and no device masks an update for a state twice."""

    async def story():
        async with asyncio.timeout(DEADLINE_S * max(1, kills // KILLS)):
            return await killed_runs(lab, devices, kills, rng, tally)

    devices = masked(lab)
    runs = asyncio.run(story())
    for run in runs:
        assert run.phase == pb.Run.DONE, run.reason
        assert not run.refusals.reasons
        assert [r.counted for r in run.rounds] == [len(NAMES)] * ANSWERED
        check_journal(lab, run, devices)
    return runs


def check_journal(lab, run, devices):
    """Every acknowledged answer is journaled, once for each step, and the journal gives the run."""
    entry, last, events = lab.journaled(run.id)
    projection = journal.first_projection(entry)
    for event in events:
        projection, _ = follow(projection, event)
    assert projection == last
    bounds = {r.number: r.norm_bound for r in run.rounds if not r.evaluates}
    assert len({*bounds.values()}) > 3, "they follow the updates"
    told = {
        (k.task.round, k.task.masking.encoding.norm)
        for d in devices
        for k in d.kept
        if k.task.run == run.id and k.told.HasField("masked") and k.task.HasField("learn")
    }
    assert told == {*bounds.items()}
    taken = [(e.lease, e.answer.step, e.answer.blob) for e in events if isinstance(e, Masked)]
    assert len(taken) == len(set(taken)) == ANSWERED * len(STEPS) * len(NAMES)
    leases = {lease for lease, _, _ in taken}
    for device in devices:
        sent = [k for k in device.kept if k.told.run == run.id and k.told.HasField("masked")]
        assert all(kept.acknowledged for kept in sent)
        assert {kept.told.lease.hex() for kept in sent} <= leases
        assert len(sent) == ANSWERED * len(STEPS), "a device answers each step once"
