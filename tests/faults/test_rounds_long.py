"""`make deep SUITE=rounds`: hundreds of kills, thousands of power cuts, and their evidence."""

import asyncio
import os
import platform
import random
import statistics
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest
from tests.faults import device_power, spool_power
from tests.faults.cuts import cuts, made
from tests.faults.harm import check_harmed, check_restored
from tests.faults.lab import Lab, Tally, rejoined_s
from tests.faults.masked_rounds import check_masked
from tests.faults.rounds import check_exact, check_replays

SEED = 2026
ROOT = Path(__file__).parents[2]
EVIDENCE = ROOT / "docs" / "evidence" / "rounds-killed.md"
KILLS = int(os.environ.get("TRIPLANE_KILLS", "200"))
HARM = int(os.environ.get("TRIPLANE_HARM", "150"))
RESTORES = int(os.environ.get("TRIPLANE_RESTORES", "10"))
CUTS = int(os.environ.get("TRIPLANE_CUTS", "1000"))  # of a cloud, and twice of a device
OUTCOMES = 5  # of each
ALONE = 6  # of so many kills, one in an exact run, where the cloud alone is killed

pytestmark = pytest.mark.deep


def test_hundreds_of_kills_and_thousands_of_cuts_lose_nothing(tmp_path, quick_folder):
    """Processes are started by their commands here, not forked."""
    began_s = time.time()
    rows = [*killed(tmp_path / "killed"), *harmed(tmp_path / "harmed"), *cut(quick_folder)]
    EVIDENCE.write_text(page(rows, began_s))


def killed(folder):
    rng, alone, everybody, masked = random.Random(SEED), Tally(), Tally(), Tally()
    folder.mkdir()
    lab = Lab(folder)
    asyncio.run(lab.furnish())
    with lab.started():
        exact = check_exact(lab, KILLS // ALONE, rng, alone)
        rough = check_replays(lab, KILLS - KILLS // ALONE, rng, everybody)
        hidden = check_masked(lab, KILLS // ALONE, rng, masked)
        back_s = [s for run in rough for s in rejoined_s(everybody, lab.journaled(run.id)[2])]
    kills = alone.kills + everybody.kills + masked.kills
    instants = alone.instants + everybody.instants + masked.instants
    yield from ((f"kill -9 of {name}", count) for name, count in sorted(kills.items()))
    yield from ((f"at a {name} instant", count) for name, count in sorted(instants.items()))
    after = alone.after + everybody.after + masked.after
    yield from ((f"right after {kind} was journaled", count) for kind, count in after.most_common())
    yield "processes killed at one instant, at most", everybody.at_once
    yield "runs whose cloud alone was killed; all with the undisturbed run's model", len(exact)
    yield "masked runs whose cloud was killed; no device was lost or asked twice", len(hidden)
    rounds = sum(r.counted > 0 for run in rough for r in run.rounds)
    yield "runs whose devices were killed too; all equal to their replay", len(rough)
    yield "their rounds, evaluations included", rounds
    yield "contributions that were refused", 0
    yield "starts of devices whose way back was timed", len(back_s)
    median_s, longest_s = statistics.median(back_s), max(back_s)
    yield "from start to journaled return, median, longest", f"{median_s:.2f} s, {longest_s:.2f} s"


def harmed(folder):
    rng, tally, harm = random.Random(SEED), Tally(), Counter[str]()
    folder.mkdir()
    lab = Lab(folder)
    asyncio.run(lab.furnish())
    with lab.started():
        runs = check_harmed(lab, HARM, rng, tally, harm)
        restored = check_restored(lab, RESTORES, rng, tally)
    yield from (
        (f"kill -9 of {name}, among other harm", n) for name, n in sorted(tally.kills.items())
    )
    yield from sorted(harm.items())
    yield "runs with such harm, compressed updates and remainders on devices; all ended", len(runs)
    yield "runs whose cloud was restored from a backup; all equal to their replay", len(restored)


def cut(folder):
    alone = {"roles": device_power.NOTHING_PERSONAL, "compression": ""}
    for what, module, points, options in (
        ("device", device_power, CUTS, {}),
        ("device that keeps no update", device_power, CUTS, alone),
        ("cloud", spool_power, CUTS // 2, {}),
        ("cloud whose updates come in messages", spool_power, CUTS // 2, {"inline": True}),
        ("cloud whose updates come as vectors", spool_power, CUTS // 2, {"vector": True}),
    ):
        place = made(folder / what)
        play = module.stories(place, **options)
        operations, count, kills = cuts(
            place, play, points=points // OUTCOMES, seed=SEED, outcomes=OUTCOMES
        )
        yield f"power cuts of a {what}, over its {operations} disk operations", count
        yield f"kills of the {what} before a cut", kills
    yield "acknowledged updates lost, sent in two forms, or journaled without their bytes", 0


def page(rows, began_s):
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    head = (
        "# Rounds that are killed\n\n"
        f"`make deep SUITE=rounds`, {time.strftime('%Y-%m-%d', time.gmtime(began_s))}, "
        f"seed {SEED}, commit {commit}, {platform.machine()}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}; {(time.time() - began_s) / 60:.0f} minutes.\n\n"
    )
    return f"{head}| what | |\n|---|---|\n" + "".join(f"| {n} | {x} |\n" for n, x in rows)
