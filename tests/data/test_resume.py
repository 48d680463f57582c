"""A run that is killed anywhere, and goes on with another number of workers, sees the same samples.

The child trains on augmented, filtered and shuffled records and saves each step; it is killed by
SIGKILL at random steps. The weights at the end are those of a run that nobody killed.
"""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from triplane.unified_ir import data

CHILD = Path(__file__).with_name("resume_child.py")
SAMPLES = 330
READING = [("0", "threads"), ("1", "threads"), ("2", "threads"), ("4", "threads"),
           ("2", "processes")]  # fmt: skip


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    path = tmp_path_factory.mktemp("records") / "digits.tpr"
    data.digits().take(SAMPLES).write(path)
    return path


def child(records, folder, reading):
    return subprocess.Popen(
        [sys.executable, CHILD, records, folder, *reading], stdout=subprocess.PIPE, text=True
    )


def finished(records, folder, reading):
    """Return the digest at the end of a run that nobody kills, and its last step."""
    process = child(records, folder, reading)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    *steps, digest = out.split("\n")[:-1]
    return digest, int(steps[-1]) if steps else 0


def killed(records, folder, reading, after):
    """Kill a run after so many of its steps; return whether it was still running."""
    with child(records, folder, reading) as process:
        assert process.stdout is not None
        for number, line in enumerate(process.stdout, 1):
            if line.startswith("digest"):
                return False
            if number == after:
                break
        process.kill()
    return True


def exchanged(records, folder, kills, seed):
    """Kill `kills` runs, each with another kind of reading; return the digest at the end."""
    draw = random.Random(seed)
    steps = 75
    for k in range(kills):
        # A share of what is left, so that all kills fall within the run.
        after = draw.randint(1, max(1, 2 * steps // kills - 1))
        if not killed(records, folder, READING[k % len(READING)], after):
            break
    return finished(records, folder, READING[kills % len(READING)])[0]


@pytest.mark.slow
def test_a_kill_and_other_workers_end_in_the_same_weights(records, tmp_path):
    whole, last = finished(records, tmp_path / "whole", READING[0])
    assert last >= 75
    assert exchanged(records, tmp_path / "killed", 1, seed=1) == whole


@pytest.mark.long
@pytest.mark.parametrize("seed", [2, 3])
def test_fifty_kills_and_other_workers_end_in_the_same_weights(records, tmp_path, seed):
    whole, _ = finished(records, tmp_path / "whole", READING[2])
    assert exchanged(records, tmp_path / "killed", 25, seed) == whole
