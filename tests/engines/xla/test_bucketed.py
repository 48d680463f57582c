"""Gradient buckets on virtual devices, which JAX fixes when it starts, and a measured topology."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.engines.xla.engine import XlaEngine
from triplane.unified_ir.engines.xla.measure import link_cost
from triplane.unified_ir.passes.sharding import read_topology

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = Path(__file__).parent / "bucketed_training.py"


def run(*argv):
    env = {**os.environ, "JAX_NUM_CPU_DEVICES": "8", "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *argv], env=env, capture_output=True, text=True,
                          check=False)  # fmt: skip


@pytest.mark.long
def test_training_in_buckets_equals_training_on_one_device():
    ran = run(SCRIPT)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == "all held"


@pytest.mark.long
def test_what_is_measured_is_read_back(tmp_path):
    file = tmp_path / "machine.json"
    main = (
        "import sys; from triplane.unified_ir.cli import shell; sys.exit(shell.run(sys.argv[1:]))"
    )
    ran = run("-c", main, "plan", "--measure", file)
    assert ran.returncode == 0, ran.stderr
    assert "measured on 8 x CPU" in ran.stdout
    assert "links between hosts and racks are not measured" in ran.stdout
    record = json.loads(file.read_text())
    assert "between" not in record
    topology = read_topology(file)
    assert topology.devices_per_host == 8
    assert topology.json()["measured"] == record["measured"]
    assert "measured on 8 x CPU" in topology.source
    assert topology.source.endswith("assumed: between")


def test_latency_and_bandwidth_are_fitted():
    drawn = np.random.default_rng(0)
    samples = []
    for size in (1 << 10, 1 << 14, 1 << 18, 1 << 22):
        for what, rounds, share in (("all-reduce", 2, 2 * 5 / 6), ("all-gather", 1, 5)):
            exact = rounds * 3 * 7e-6 + share * size / 3e9
            samples.append((what, size, exact * drawn.uniform(0.99, 1.01)))
    cost = link_cost(6, samples)
    assert cost.latency_s == pytest.approx(7e-6, rel=0.03)
    assert cost.bytes_per_s == pytest.approx(3e9, rel=0.03)


def test_times_that_fall_with_the_bytes_are_refused():
    with pytest.raises(InvalidInput, match="fit no latency and bandwidth above 0"):
        link_cost(4, [("all-reduce", 1000, 1e-3), ("all-reduce", 100000, 1e-6)])


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "a mesh with the one axis 'data' such as data=4; the mesh is not given"),
        ({"mesh": {"data": 1, "model": 1}}, "a mesh with the one axis 'data'"),
        ({"mesh": {"data": 1}, "shard": {"*": ("data",)}}, "a mesh with the axis 'data' alone"),
        ({"parallel": "auto"}, "a mesh with the axis 'data' alone"),
        ({"mesh": {"data": 1}, "buckets": "many"}, "buckets is 'auto', 'one', or the bytes"),
    ],
)
def test_options_that_contradict_are_refused(options, why):
    with pytest.raises(InvalidInput, match=why):
        XlaEngine(**{"buckets": "auto", **options})
