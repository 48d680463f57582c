"""`parallel="auto"`: XLA does what the planner decides, and learns what one device learns.

JAX fixes the number of its devices when it starts, so these run in a process of their own.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from triplane.proto.errors import InvalidInput, Unavailable
from triplane.unified_ir.cli.shell import EXIT_CODES
from triplane.unified_ir.engines.xla.engine import XlaEngine
from triplane.unified_ir.passes.sharding import Topology

SCRIPTS = Path(__file__).parent
ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "devices"),
    [("planned_training", 8), ("planned_products", 16), ("sharded_training", 4)],
)
def test_with_virtual_devices(script, devices):
    env = {**os.environ, "JAX_NUM_CPU_DEVICES": str(devices), "PYTHONPATH": str(ROOT)}
    path = SCRIPTS / f"{script}.py"
    ran = subprocess.run(
        [sys.executable, path], env=env, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == "all held"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"parallel": "full"}, "parallel must be one of 'auto', got 'full'"),
        ({"parallel": "auto", "mesh": {"data": 1}}, "chooses mesh and shard"),
        ({"parallel": "auto", "devices": 99}, "needs 99 devices, and JAX finds 1"),
        ({"devices": 2}, "belong to parallel='auto'"),
        ({"topology": Topology()}, "belong to parallel='auto'"),
    ],
)
def test_options_that_contradict_are_refused(options, why):
    with pytest.raises(InvalidInput, match=why):
        XlaEngine(**options)


@pytest.mark.long
@pytest.mark.parametrize(
    ("variable", "error"),
    [
        pytest.param(
            "JAX_PLATFORMS=cuda",
            Unavailable,
            marks=pytest.mark.skipif(
                any(map(find_spec, ("jax_cuda12_plugin", "jax_cuda13_plugin"))),
                reason="JAX has it",
            ),
        ),
        ("JAX_PLATFORMS=nope", Unavailable),
        ("JAX_NUM_CPU_DEVICES=0", Unavailable),
        ("JAX_NUM_CPU_DEVICES=many", InvalidInput),
    ],
)
def test_an_environment_that_jax_cannot_use_is_named(tmp_path, variable, error):
    name, _, value = variable.partition("=")
    command = [Path(sys.executable).with_name("triplane"), "plan", "--measure", tmp_path / "m.json"]
    ran = subprocess.run(
        command, env={**os.environ, name: value}, capture_output=True, text=True, check=False
    )
    assert ran.returncode == EXIT_CODES[error], ran.stderr
    assert name.lower() in ran.stderr.lower()
    assert "a bug in triplane" not in ran.stderr
