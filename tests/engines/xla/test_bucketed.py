"""Gradient buckets on virtual devices, which JAX fixes when it starts, and a measured topology."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from triplane.proto.errors import Corrupt, InvalidInput
from triplane.unified_ir.engines.xla import ready_times
from triplane.unified_ir.engines.xla.bucket_choice import BucketChoices
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


def measured(monkeypatch, seconds, agreed=lambda _, value: value):
    """Measure 101 gradients by a clock on which run k of a program takes seconds(number, k)."""
    now, ran = [0.0], []

    def run_up_to(number):
        def run():
            ran.append(number)
            now[0] += seconds(number, ran.count(number) - 1)

        return run

    def timed(run):
        start = now[0]
        run()
        return now[0] - start

    monkeypatch.setattr(ready_times, "_seconds", timed)
    times = ready_times.measured_times([float(k) for k in range(101)], run_up_to, agreed)
    return times, ran


def test_the_median_of_runs_in_turns_counts_without_the_first_that_compiles(monkeypatch):
    noise = (50, 1, 3, 2, 9, 2)
    times, ran = measured(monkeypatch, lambda number, k: noise[k] * 1e-4 * (number + 1))
    assert times.numbers == (0, 25, 50, 75, 100)
    assert times.runs == 5
    assert times.seconds == pytest.approx([2e-4 * (n + 1) for n in times.numbers])
    assert ran == [*times.numbers] * 6


def test_long_steps_run_less_often(monkeypatch):
    assert measured(monkeypatch, lambda *_: 2.0)[0].runs == 3
    assert measured(monkeypatch, lambda *_: 100.0)[0].runs == 1


def test_the_first_process_says_how_often_and_how_long(monkeypatch):
    first = {"runs": 2, "times": [1.0, 2.0, 3.0, 4.0, 5.0]}
    times, ran = measured(monkeypatch, lambda *_: 0.0, lambda what, _: first[what])
    assert (times.runs, times.seconds) == (2, (1.0, 2.0, 3.0, 4.0, 5.0))
    assert len(ran) == 5 * (1 + 2)


KEY = "0123456789abcdef"


def test_choices_of_buckets_are_kept():
    choices, ends = BucketChoices(), np.array([2, 5])
    assert str(choices) == "none"
    assert choices.load({KEY: ends})
    assert not choices.load({KEY: ends})
    assert choices.load({KEY: np.array([5])})
    assert not choices.load({})
    assert [(k, v.tolist()) for k, v in choices.state().items()] == [(KEY, [5])]


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ({"x" * 16: np.array([2])}, "choice of buckets 'xxxx"),
        ({KEY: np.array([2.0])}, r"is float64\(1,\)"),
        ({KEY: np.array([[2]])}, r"is int64\(1, 1\)"),
        ({KEY: np.array([], np.int64)}, r"is int64\(0,\)"),
        ({KEY: np.array([2, 2])}, r"do not follow each other: \[2, 2\]"),
        ({KEY: np.array([0, 2])}, r"do not follow each other: \[0, 2\]"),
        # Differences of these wrap around to positive numbers.
        ({KEY: np.array([2**62, 100 - 2**63, 6])}, r"do not follow each other: \[4611686"),
        ({f"{k:016x}": np.array([1]) for k in range(1025)}, "has 1025 choices"),
    ],
)
def test_a_damaged_choice_is_refused(state, why):
    with pytest.raises(Corrupt, match=why):
        BucketChoices().load(state)


def test_other_buckets_are_the_way_out_of_a_damaged_choice():
    damaged = {KEY: np.array([2.0])}
    with pytest.raises(Corrupt, match="or with other buckets, such as one"):
        XlaEngine(mesh={"data": 1}, buckets="auto").load_state_dict(damaged)
    XlaEngine(mesh={"data": 1}, buckets="one").load_state_dict(damaged)
