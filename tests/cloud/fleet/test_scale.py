"""The benchmark of the fleet at a size that fits the suite; docs/evidence/scale.md has more."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "fleet.py"
NODES = 30
LIMIT_S = 240
NODE_BYTES = 1 << 20
"""More than twice what was measured here, where few nodes share the first growth of the cloud."""


@pytest.mark.slow
@pytest.mark.long
def test_thirty_nodes_of_which_a_third_comes_late_converge_and_outlive_a_kill():
    done = subprocess.run(
        [sys.executable, BENCHMARK, str(NODES), "--idle", "0.1"],
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["nodes"], found["away"], found["state"]) == (NODES, 9, "DONE")
    assert found["committed"] == found["connected"] == NODES
    assert found["bytes_per_node"] < NODE_BYTES
