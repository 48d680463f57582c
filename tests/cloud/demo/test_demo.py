"""The demo: the whole story holds, and nothing outlives it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from triplane.cloud.demo.processes import COMMAND

pytestmark = pytest.mark.slow


@pytest.fixture
def short() -> Iterator[Path]:
    """For temporary files: a node's socket path has 107 characters at most."""
    with tempfile.TemporaryDirectory(prefix="demo") as made:
        yield Path(made)


def demo(short: Path, *args: str) -> subprocess.Popen[str]:
    """The real command in a session of its own, with its temporary files below `short`."""
    return subprocess.Popen(
        [*COMMAND, "demo", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(short)},
        start_new_session=True,
    )


@pytest.mark.long
def test_the_demo_measures_every_step_and_leaves_no_file(short: Path) -> None:
    with demo(short, "--rounds", "50", "--json") as process:
        out, told = process.communicate(timeout=400)
    assert process.returncode == 0, told
    facts = json.loads(out)
    assert facts["held_out_accuracy"] >= 0.97
    assert facts["served_accuracy"] == pytest.approx(facts["held_out_accuracy"])
    assert facts["ascend_loss_difference"] < 0.01
    assert facts["refusal"]["family"] == "Corrupt"
    assert facts["camera_before"] < 0.5
    assert facts["camera_after"] > 0.85
    assert facts["conversion"]["accuracy"]["drop_points"] <= 1.0
    assert facts["node_accuracy"] == pytest.approx([facts["held_out_accuracy"]] * 2, abs=0.03)
    assert "below the policy's floor" in facts["refused_reason"]
    assert facts["refused_exit_code"] == 4
    assert facts["held"] == {"camera-a": "digits@1", "camera-b": "digits@1"}
    assert facts["held_accuracy"] == facts["node_accuracy"]
    assert facts["healed"]
    assert facts["killed_at"] != "committed"
    assert facts["healed_accuracy"] >= 0.95
    assert set(facts["learned_accuracy"]) == {"fedavg", "maml"}
    assert len(facts["learned_gain_points"]) == 2  # one draw; test_margins.py
    assert facts["killed_devices_at"] >= 25
    assert facts["least_sum"] >= 3  # all else is masked
    assert all(after >= before for before, after in zip(
        facts["live_before"], facts["live_after"], strict=True
    ))  # fmt: skip
    assert list(short.iterdir()) == []


FLEET_IS_UP = pytest.param("   dashboard", signal.SIGINT, marks=pytest.mark.long)
OTHERS = [
    pytest.param(step, number, marks=pytest.mark.deep)
    for step, number in [
        ("1  Train", signal.SIGTERM),
        ("4  Serve", signal.SIGINT),
        ("4  Serve", signal.SIGTERM),
        ("7  A bad version", signal.SIGINT),
        ("7  A bad version", signal.SIGTERM),
        ("9  Learn", signal.SIGINT),
    ]
]


@pytest.mark.parametrize(
    ("step", "number"),
    [("1  Train", signal.SIGINT), FLEET_IS_UP, *OTHERS],
)
def test_an_interrupted_demo_leaves_nothing_running(
    short: Path, step: str, number: signal.Signals
) -> None:
    with demo(short, "--epochs", "4") as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith(step):
                break
        children = _some_children(process.pid)
        process.send_signal(number)
        process.communicate(timeout=100)
    assert process.returncode == 130
    assert children
    psutil.wait_procs(children, timeout=10)
    assert [child for child in children if child.is_running()] == []
    assert list(short.iterdir()) == []


def _some_children(pid: int) -> list[psutil.Process]:
    """The children of a process, once it has any."""
    parent = psutil.Process(pid)
    while parent.is_running():
        if found := parent.children(recursive=True):
            return found
    return []


@pytest.mark.deep
def test_few_samples_of_few_classes_are_enough(short: Path, tmp_path: Path) -> None:
    few = tmp_path / "few.npz"
    rng = np.random.default_rng(0)
    np.savez(few, x=rng.random((40, 1, 8, 8), np.float32), y=np.arange(40) % 3)
    with demo(short, "--data", str(few), "--epochs", "1", "--json") as process:
        out, told = process.communicate(timeout=400)
    assert process.returncode == 0, told
    assert "camera_after" in json.loads(out)


@pytest.mark.deep
def test_a_folder_is_kept_with_model_bundles_plan_and_charts(short: Path) -> None:
    kept = short / "kept"
    with demo(short, "--keep", str(kept), "--json") as process:
        out, told = process.communicate(timeout=400)
    assert process.returncode == 0, told
    assert "Dashboard: http://127.0.0.1:" in told
    names = {path.name for path in kept.iterdir()}
    assert {"cloud", "camera-a", "camera-b"} <= names
    assert len(json.loads(out)["start_again"]) == 3
    wanted = {"digits.tpm", "digits.bundle", "digits-int8.bundle", "digits.plan"}
    assert wanted | {"loss.svg", "accuracy.svg", "report.svg"} <= names


def test_the_fine_tuning_process_holds_only_the_runtime() -> None:
    script = Path(sys.modules["triplane.cloud.demo.processes"].__file__ or "")
    source = script.with_name("fine_tune.py").read_text()
    imports = [line for line in source.splitlines() if line.startswith(("import", "from"))]
    ours = [line for line in imports if "triplane" in line]
    assert ours == ["from triplane.unified_ir.runtime.plan import Plan"]
