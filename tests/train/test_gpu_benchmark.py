"""`benchmarks/gpu.py` on a CPU: both sides' work is counted right, and the script runs."""

import importlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu")


def run(*arguments):
    return subprocess.run(
        [sys.executable, BENCHMARKS / "gpu.py", *arguments],
        capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip


def test_the_work_is_that_of_the_published_networks(gpu):
    resnet, decoder = (gpu.work(gpu.CASES[n]) for n in ("ResNet-50 B128", "Transformer 124M B8"))
    # torchvision's ResNet-50: 25,557,032 parameters, 4.09e9 products for an image of 224x224.
    assert resnet.parameters == 25_557_032
    np.testing.assert_allclose(resnet.flops / (128 * 2 * 3), 4.09e9, rtol=0.02)
    # GPT-2 small has 124,439,808 with 50,257 words; 47 more rows fill up its vocabulary.
    assert decoder.parameters == 124_439_808 + 47 * 768


def test_the_floor_is_the_slower_of_arithmetic_and_memory(gpu):
    least = gpu.Work(flops=2e12, bytes=1e9, parameters=0)
    assert gpu.floor_s(least, "any", (1.0, 1.0)) == 2.0
    assert gpu.floor_s(least, "any", (1000.0, 1.0)) == 1.0
    assert gpu.floor_s(least, "NVIDIA H100 80GB HBM3", None) == pytest.approx(2 / 989)
    assert gpu.floor_s(least, "NVIDIA H100 PCIe", None) == pytest.approx(2 / 756)
    assert gpu.floor_s(least, "CPU", None) is None


def test_a_side_without_its_library_is_left_out_with_the_way_out(tmp_path):
    done = run("--only", "torch.compile", "--torch-python", str(tmp_path / "python"))
    assert done.returncode == 1
    assert "torch.compile is left out" in done.stderr
    assert "--torch-python" in done.stderr


def test_a_large_network_is_not_trained_on_a_cpu(gpu):
    with pytest.raises(SystemExit, match="needs a GPU, and Triplane would run on the CPU"):
        gpu.check_devices(
            "ResNet-50 B128", {"Triplane": {"device": "CPU"}, "torch.compile": {"device": "H100"}}
        )
    gpu.check_devices("small ResNet", {"Triplane": {"device": "CPU"}})


@pytest.mark.long
def test_our_side_runs_small():
    pytest.importorskip("jax")
    done = run(
        "--only", "Triplane", "--case", "small Transformer", "--rounds", "1", "--steps", "1"
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "| small Transformer | Triplane, JAX" in done.stdout
