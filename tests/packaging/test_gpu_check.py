"""`make gpu`: the script passes on a CPU, and fails where it must."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / ".ci/gpu_check.py"


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module  # dataclasses look their module up
    path = [*sys.path]
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = path
    del sys.modules["gpu_check"]


@pytest.mark.long
def test_every_check_passes_on_this_machine():
    done = subprocess.run(
        [sys.executable, SCRIPT], capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "xla on " in done.stdout
    assert "onnx on " in done.stdout
    assert "13 of 13 checks passed" in done.stdout


def test_a_difference_fails_it(script, capsys, monkeypatch):
    side = script.Side("onnx", {"engine": "onnx"}, "cpu", is_gpu=False)
    monkeypatch.setattr(script, "sides", lambda: [side])
    monkeypatch.setattr(script, "CHECKS", {"precision of float32": script.products})
    assert script.main([]) == 0
    monkeypatch.setattr(script, "PRODUCT", 0.0)
    assert script.main([]) == 1
    assert "FAILED  precision of float32" in capsys.readouterr().out


def test_losses_that_go_another_way_fail_it(script, monkeypatch):
    losses = [2.0] * script.STEPS
    monkeypatch.setattr(script, "reference", lambda _: losses)
    assert script.follow(losses, 1e-4).startswith("2.0000 to 2.0000")
    for others in (losses[1:], [*losses[1:], 2.01], [*losses[1:], float("nan")]):
        with pytest.raises(AssertionError):
            script.follow(others, 1e-4)


def test_without_a_gpu_it_fails_where_one_is_asked_for(script, capsys, monkeypatch):
    side = script.Side("onnx", {"engine": "onnx"}, "cpu", is_gpu=False)
    monkeypatch.setattr(script, "sides", lambda: [side])
    monkeypatch.setattr(script, "CHECKS", {})
    assert script.main([]) == 0
    assert script.main(["--gpu"]) == 1
    assert "no engine runs on a GPU" in capsys.readouterr().out
