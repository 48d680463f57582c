"""Private runs whose processes are killed: what is charged, and that noise meets one sum only."""

import asyncio
import json

import numpy as np
from tests.cloud.federation.given import living
from tests.cloud.federation.masked import masked_request
from tests.faults.lab import LAB, NAMES, REAL, instant, strike
from tests.faults.rounds import DEADLINE_S, again, counted

from triplane.cloud.federation import journal
from triplane.cloud.federation.private_runs import privacy_of
from triplane.cloud.federation.run_projection import follow
from triplane.proto import federation_pb2 as pb
from triplane.unified_ir.federated.core.files import read_state
from triplane.unified_ir.federated.core.masked_step import MaskedStep
from triplane.unified_ir.federated.core.run import Arrived, Masked, Reduced
from triplane.unified_ir.federated.privacy.release import RoundNoise, entries_of, release, shapes_of
from triplane.unified_ir.runtime import Plan

ROUNDS = 30
MASKED_ROUNDS = 8
CLIP = 0.5
ALONE = {
    "model": "tiny@1", "rounds": ROUNDS,
    "cohort": {"devices": len(NAMES), "deadline_s": 600.0, "patience_s": 120.0},
}  # fmt: skip
BANDED = {
    "model": "tiny@1", "rounds": ROUNDS,
    "cohort": {"devices": 1, "deadline_s": 600.0, "patience_s": 120.0},
}  # fmt: skip
EVERYBODY = {
    "model": "tiny@1", "population": LAB, "rounds": ROUNDS,
    "cohort": {"devices": len(REAL), "quorum": 0.3, "deadline_s": 60.0, "patience_s": 0.5},
}  # fmt: skip


def noise(*, bands=1):
    return pb.Noise(
        clip=CLIP, multiplier=5.0, epsilon=50.0, separation=bands, correlated=bands > 1
    )  # fmt: skip


def masked():
    """A masked run of all real devices, which add the noise themselves."""
    own = pb.Noise(clip=CLIP, multiplier=5.0, epsilon=50.0, placement="distributed")
    return masked_request(
        len(REAL), norm=CLIP, model="tiny@1", population=LAB, rounds=MASKED_ROUNDS, noise=own,
        phase_s=120.0, cohort={"deadline_s": 600.0, "patience_s": 120.0},
    )  # fmt: skip


def check_masked(lab, kills, rng, tally, *, devices_die):
    """Kill the cloud, or anybody, in masked runs whose devices add noise.

    Three devices of three tolerate no loss, so a round that a killed device left ends the run.
    """

    async def story():
        runs: list[pb.Run] = []
        async with asyncio.timeout(DEADLINE_S * (1 + kills // 10)):
            with lab.real_devices() as devices:
                everybody = {**devices, "cloud": lab.cloud} if devices_die else {"cloud": lab.cloud}
                while tally.killed < kills or not runs:
                    run_id = await lab.start(masked())
                    goes_on = True
                    while goes_on and tally.killed < kills:
                        goes_on = await asyncio.to_thread(instant, lab, run_id, rng, tally)
                        name = rng.choice(sorted(everybody))
                        await strike({name: everybody[name]}, tally)
                    runs.append(await lab.ended(run_id))
        return runs

    runs = asyncio.run(story())
    for run in runs:
        if not devices_die:
            check_charged(lab, run, MASKED_ROUNDS)
        check_masked_charges(lab, run, exactly=not devices_die)
    return runs


def check_masked_charges(lab, run, *, exactly):
    """Each masked update that came was charged once; a round charges the run once."""
    _, last, events = lab.journaled(run.id)
    charged = [e.charged for e in events if isinstance(e, Reduced)]
    assert charged == list(range(1, len(charged) + 1))
    assert last.state.budget.rounds == len(charged)
    for name in REAL:
        sent = {
            e.lease
            for e in events
            if isinstance(e, Masked) and e.device == name and e.answer.step is MaskedStep.INPUTS
        }
        path = lab.folder / name / "privacy.json"
        runs = json.loads(path.read_bytes())["runs"] if path.exists() else {}
        uses = runs.get(run.id, {"concentrated": 0})["concentrated"] * 25
        assert abs(uses - round(uses)) < 1e-9
        assert round(uses) >= len(sent)
        if exactly:
            assert round(uses) == len(sent) == MASKED_ROUNDS


def check_cloud_alone(lab, kills, rng, tally):
    """Kill the cloud so often, in runs with independent and with correlated noise in turn."""
    plays = (
        {**ALONE, "noise": noise()},
        {**BANDED, "noise": noise(bands=3)},
    )

    async def story():
        runs: list[pb.Run] = []
        async with asyncio.timeout(DEADLINE_S * (1 + kills // 10)), living(lab.devices):
            while tally.killed < kills or len(runs) < len(plays):
                run_id = await lab.begin(**plays[len(runs) % len(plays)])
                goes_on = True
                while goes_on and tally.killed < kills * (len(runs) + 1) / len(plays):
                    goes_on = await asyncio.to_thread(instant, lab, run_id, rng, tally)
                    await strike({"cloud": lab.cloud}, tally)
                runs.append(await lab.ended(run_id))
        return runs

    runs = asyncio.run(story())
    for run in runs:
        check_charged(lab, run)
        check_one_state_each(lab, run)
        if not run.spec.noise.correlated:
            check_noise(lab, run)
    return runs


def check_everybody(lab, kills, rng, tally):
    """Kill devices, too; their accounts charge every update that arrived, and none twice."""

    async def story():
        runs: list[pb.Run] = []
        async with asyncio.timeout(DEADLINE_S * (1 + kills // 10)):
            with lab.real_devices() as devices:
                everybody = {**devices, "cloud": lab.cloud}
                while tally.killed < kills or not runs:
                    run_id = await lab.begin(**EVERYBODY, noise=noise())
                    goes_on = True
                    while goes_on and tally.killed < kills:
                        goes_on = await asyncio.to_thread(instant, lab, run_id, rng, tally)
                        names = rng.sample(sorted(everybody), rng.randint(1, len(everybody)))
                        await strike({name: everybody[name] for name in names}, tally)
                    runs.append(await lab.ended(run_id))
        return runs

    runs = asyncio.run(story())
    for run in runs:
        check_charged(lab, run)
        check_accounts(lab, run)
    return runs


def check_charged(lab, run, rounds=ROUNDS):
    assert run.phase == pb.Run.DONE, run.reason
    _, last, events = lab.journaled(run.id)
    reduced = [e for e in events if isinstance(e, Reduced)]
    assert [(e.number, e.charged) for e in reduced] == [(n, n) for n in range(1, rounds + 1)]
    budget = last.state.budget
    assert budget.rounds == rounds
    assert run.epsilon_spent == budget.spent <= 50.0
    assert not (lab.home.federation / "noise" / run.id).exists()


def check_one_state_each(lab, run):
    """Every device saw one state in each round, however often the cloud was killed."""
    states: dict[int, set[bytes]] = {}
    for device in lab.devices:
        for kept in device.kept:
            if kept.task.run == run.id and kept.task.WhichOneof("work") == "learn":
                states.setdefault(kept.task.round, set()).add(kept.task.state.sha256)
    assert len(states) == ROUNDS
    assert all(len(found) == 1 for found in states.values())
    assert len(set.union(*states.values())) == ROUNDS


def check_noise(lab, run):
    """The next states less the clipped sums are noise of the stated deviation, other each round."""
    entry, _, events = lab.journaled(run.id)
    folder, prepared, privacy = lab.home.blobs, entry.prepared, privacy_of(entry.spec)
    assert privacy is not None
    plan = Plan.load(folder / prepared.plan)
    state = read_state(folder / prepared.state, plan=plan.digest)
    kept = journal_states(lab, run)
    projection, residuals = journal.first_projection(entry), []
    shapes, devices = shapes_of(state), len(NAMES)
    none = RoundNoise(np.zeros(entries_of(shapes), np.int64))
    for event in events:
        if isinstance(event, Reduced) and event.number in kept:
            before, after = kept.get(event.number - 1, state), kept[event.number]
            updates = [
                again(plan, before, projection.state.round, x, entry.spec)[1]
                for x in counted(projection)
            ]
            mean = release(
                shapes, updates, privacy=privacy, clip=CLIP, devices=devices, noise=none
            ).mean
            parts = [(after[n] - before[n] - mean[n]).ravel() for n in shapes]
            residuals.append(np.concatenate(parts))
        projection, _ = follow(projection, event)
    assert len(residuals) >= ROUNDS - 1
    found = np.std(np.stack(residuals)) * devices
    std = privacy.central(CLIP, entries_of(shapes), devices).std
    assert 0.9 < found / std < 1.1
    assert len({r.round(5).tobytes() for r in residuals}) == len(residuals)


def journal_states(lab, run):
    """The states that devices were given, by the round that published them."""
    entry, _, _ = lab.journaled(run.id)
    states = {}
    for device in lab.devices:
        for kept in device.kept:
            task = kept.task
            if task.run == run.id and task.WhichOneof("work") == "learn" and task.round > 1:
                path = device.blobs.find(task.state.sha256)
                states[task.round - 1] = read_state(path, plan=entry.prepared.plan_digest)
    return states


def check_accounts(lab, run):
    _, _, events = lab.journaled(run.id)
    for number, name in enumerate(REAL):
        stored = json.loads((lab.folder / name / "privacy.json").read_bytes())
        uses = stored["runs"][run.id]["gaussian"] * run.spec.noise.multiplier**2
        leases = {e.lease for e in events if isinstance(e, Arrived) and e.device == name}
        assert abs(uses - round(uses)) < 1e-9, (number, uses)
        assert round(uses) >= len(leases) > 0, "an update that arrived and was not charged"
