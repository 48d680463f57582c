"""A version's model file, back from the registry."""

import json
import shutil
import subprocess

import pytest
from tests.cloud.cli.proxied import link
from tests.quantize import nets
from tests.support.cloud_process import COMMAND, run, running

from triplane.unified_ir import nn
from triplane.unified_ir.ir import TensorSpec

WAIT_S = 60
WIDTH = 2048  # a square of float32 with 16 MiB


@pytest.fixture
def place(tmp_path):
    """A cloud's home, an operator's identity of the test's own, and a model file."""
    run("cloud", "init", "--home", tmp_path / "home", "--offline-keys", tmp_path / "keys")
    shutil.copytree(tmp_path / "home" / "operator", tmp_path / "me")
    cell = nets.shaken(nn.Dense(WIDTH, WIDTH))
    nets.module_of(cell, TensorSpec(("N", WIDTH))).save(tmp_path / "wide.tpm")
    return tmp_path


def by_way_of(made, place):
    (place / "me" / "cloud").write_text(f"{made.address}\n")
    return ["--identity", str(place / "me")]


@pytest.mark.slow
def test_pulled_file_is_the_pushed_one_and_nothing_is_overwritten(place):
    with running(place / "home") as (ready, _), link(ready["port"]) as way:
        me = by_way_of(way, place)
        run("registry", "push", place / "wide.tpm", *me)
        made = run("registry", "pull", "wide@latest", "--out", place / "back.tpm", *me)
        assert made["version"] == 1
        assert (place / "back.tpm").read_bytes() == (place / "wide.tpm").read_bytes()
        again = subprocess.run(
            [*COMMAND, "registry", "pull", "wide", "--out", place / "back.tpm", *me, "--json"],
            check=False, capture_output=True, text=True, timeout=WAIT_S,
        )  # fmt: skip
        assert again.returncode == 3
        assert "exists already" in json.loads(again.stdout)["error"]["message"]
    assert [p.name for p in place.iterdir() if p.name.endswith(".parts")] == []
