"""Harm other than kills that is done to a federated run."""

import asyncio
import shutil

import psutil
from tests.faults.lab import REAL, instant, moment, strike
from tests.faults.rounds import ROUGH, replayed

from triplane.proto import federation_pb2 as pb

FAULTS = 24
DEADLINE_S = 300.0
LONGEST_HOLD_S = 2.0
CARRIED = ROUGH | {"compression": "top-k", "keep": 0.2}


def process_of(process):
    return psutil.Process(process.pid if hasattr(process, "pid") else process.child.pid)


async def hold(victims, seconds):
    """These processes stand still for so long."""
    found = [process_of(process) for process in victims]
    try:
        for process in found:
            process.suspend()
        await moment(seconds)
    finally:
        for process in found:
            process.resume()


def files_of(home):
    """What a device keeps of its runs."""
    kept = [*(home / "pending").rglob("*"), *(home / "personal").rglob("*")]
    return sorted(path for path in kept if path.is_file())


def damage(home, rng):
    """Damage one file that a device keeps; the kind of damage, "" where it keeps none."""
    files = files_of(home)
    if not files:
        return ""
    path, kind = rng.choice(files), rng.choice(["flip", "truncate", "empty", "remove"])
    data = bytearray(path.read_bytes())
    if kind == "remove" or not data:
        path.unlink()
        return "remove"
    if kind == "flip":
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data[: {"truncate": len(data) // 2, "empty": 0}.get(kind, len(data))])
    return kind


async def harmed(lab, faults, rng, tally, harm):
    """Runs until so many faults struck: their ends."""
    runs = []
    with lab.real_devices() as devices:
        everybody = {**devices, "cloud": lab.cloud}
        while tally.killed + harm.total() < faults:
            run_id = await lab.begin(**CARRIED)
            goes_on = True
            while goes_on and tally.killed + harm.total() < faults:
                goes_on = await asyncio.to_thread(instant, lab, run_id, rng, tally)
                names = rng.sample(sorted(everybody), rng.randint(1, len(everybody)))
                chance = rng.random()
                if chance < 0.3:
                    await hold([everybody[name] for name in names], rng.uniform(0, LONGEST_HOLD_S))
                    harm.update(f"{name} held" for name in names)
                elif chance < 0.7:
                    name = rng.choice(REAL)
                    devices[name].kill()
                    kind = damage(lab.folder / name, rng)
                    harm.update([f"file of a device: {kind}"] if kind else [])
                    devices[name].start()
                else:
                    await strike({name: everybody[name] for name in names}, tally)
            runs.append(await lab.ended(run_id))
    return runs


def check_harmed(lab, faults, rng, tally, harm):
    async def story():
        async with asyncio.timeout(DEADLINE_S * max(1, faults // FAULTS)):
            return await harmed(lab, faults, rng, tally, harm)

    runs = asyncio.run(story())
    for run in runs:
        assert run.phase == pb.Run.DONE, run.reason
        assert sum(r.counted > 0 for r in run.rounds) >= run.spec.rounds  # evaluations too
        assert not run.refusals.reasons
    return runs


async def restored(lab, times, rng, tally):
    """Runs whose cloud goes back to a copy of its home while they go on."""
    runs, copy = [], lab.folder / "backup"
    with lab.real_devices():
        for _ in range(times):
            run_id = await lab.begin(**ROUGH)
            await asyncio.to_thread(instant, lab, run_id, rng, tally)
            lab.cloud.stop()
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(lab.home.path, copy, symlinks=True)
            lab.cloud.start()
            for _ in range(rng.randint(1, 4)):
                await asyncio.to_thread(instant, lab, run_id, rng, tally)
            lab.cloud.kill()
            shutil.rmtree(lab.home.path)
            shutil.copytree(copy, lab.home.path, symlinks=True)
            lab.cloud.start()
            runs.append(await lab.ended(run_id))
    return runs


def check_restored(lab, times, rng, tally):
    async def story():
        async with asyncio.timeout(DEADLINE_S * times):
            return await restored(lab, times, rng, tally)

    runs = asyncio.run(story())
    for run in runs:
        assert run.phase == pb.Run.DONE, run.reason
        assert replayed(lab, run.id) == run.spec.rounds
    return runs
