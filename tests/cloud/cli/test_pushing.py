"""A push of a large file: killed in the middle, gone on with, given the time it needs."""

import shutil
import signal
import subprocess

import numpy as np
import pytest
from tests.cloud.cli.proxied import link
from tests.cloud.cli.verbs import answer
from tests.quantize import nets
from tests.support.cloud_process import COMMAND, running

from triplane.cloud.cli.pushing import register_within_s
from triplane.proto.blobs import digest_of
from triplane.proto.channels import DEADLINE_S
from triplane.unified_ir import nn
from triplane.unified_ir.ir import TensorSpec

IN_FLIGHT_BYTES = 12 << 20  # what buffers on the way may hold when the sender dies
WAIT_S = 60
WIDTH = 3072  # a square of float32 with 36 MiB


@pytest.fixture
def place(tmp_path):
    """A cloud's home, an operator's identity of the test's own, and a large model file."""
    answer("cloud", "init", "--home", tmp_path / "home", "--offline-keys", tmp_path / "keys")
    shutil.copytree(tmp_path / "home" / "operator", tmp_path / "me")
    cell = nets.shaken(nn.Dense(WIDTH, WIDTH))
    nets.module_of(cell, TensorSpec(("N", WIDTH))).save(tmp_path / "wide.tpm")
    return tmp_path


def push_over(made, place):
    """The words of a push by way of a link."""
    (place / "me" / "cloud").write_text(f"{made.address}\n")
    return ["registry", "push", str(place / "wide.tpm"), "--identity", str(place / "me")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.long)]
)
def test_a_push_that_was_stopped_sends_the_rest_when_it_is_run_again(place, number):
    file = place / "wide.tpm"
    size = file.stat().st_size
    partial = place / "home" / "blobs" / "partial" / digest_of(file).hex()
    with running(place / "home") as (ready, _):
        with link(ready["port"], most=size // 2) as cut:
            first = subprocess.Popen(
                [*COMMAND, *push_over(cut, place)],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
            assert cut.full.wait(WAIT_S)
            first.send_signal(number)
            _, told = first.communicate(timeout=WAIT_S)
            assert first.returncode == (130 if number == signal.SIGINT else -number)
            assert "uploading wide.tpm" in told
        with link(ready["port"]) as whole:
            made = answer(*push_over(whole, place))
    assert made["version"] == 1
    assert not partial.exists()
    kept = size - whole.sent
    assert kept > size // 2 - IN_FLIGHT_BYTES, f"sent {whole.sent} of {size} bytes again"


@pytest.mark.long
def test_a_push_waits_for_a_cloud_that_does_not_know_yet_that_the_sender_vanished(place):
    size = (place / "wide.tpm").stat().st_size
    with running(place / "home") as (ready, _), link(ready["port"]) as whole:
        with link(ready["port"], most=size // 2) as silent:
            first = subprocess.Popen(
                [*COMMAND, *push_over(silent, place)], stderr=subprocess.DEVNULL
            )
            assert silent.full.wait(WAIT_S)
            first.kill()
            first.wait(WAIT_S)
            second = subprocess.Popen(
                [*COMMAND, *push_over(whole, place)], stderr=subprocess.PIPE, text=True
            )
            assert second.stderr is not None
            while "is being received already" not in (told := second.stderr.readline()):
                assert told, "the second push ended"
        _, told = second.communicate(timeout=WAIT_S)
    assert second.returncode == 0, told
    assert whole.sent < size


def test_a_larger_file_has_more_time_to_be_registered():
    assert register_within_s(0) > 4 * DEADLINE_S
    assert register_within_s(16 << 30) >= register_within_s(0) + 2000


@pytest.mark.slow
def test_a_file_that_is_no_model_is_refused_before_a_byte_is_sent(place, tmp_path):
    np.savez(tmp_path / "img.npz", x=np.zeros(3))
    whole = (place / "wide.tpm").read_bytes()
    (tmp_path / "cut.tpm").write_bytes(whole[: len(whole) // 2])
    blobs = place / "home" / "blobs"
    with running(place / "home") as (ready, _), link(ready["port"]) as between:
        (place / "me" / "cloud").write_text(f"{between.address}\n")
        before = sorted(p.name for p in blobs.rglob("*"))
        for name, code, words in (
            ("img.npz", 2, "img.npz is not a model file"),
            ("cut.tpm", 5, "cut.tpm: container directory"),
        ):
            argv = ["registry", "push", str(tmp_path / name), "--identity", str(place / "me")]
            done = subprocess.run(
                [*COMMAND, *argv], capture_output=True, text=True, check=False, timeout=WAIT_S
            )
            assert done.returncode == code, done.stderr
            assert words in done.stderr
            assert "uploading" not in done.stderr
        assert sorted(p.name for p in blobs.rglob("*")) == before
