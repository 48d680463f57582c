"""The trial child as a process: it never outlives the agent that waits for it."""

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tests.quantize.nets import module_of

from triplane.edge.agent.trying import IDENTIFYING, judge_trial, run_trial
from triplane.proto.signed.refusal import AttemptRefused
from triplane.proto.targets import SignedTarget
from triplane.unified_ir import TensorSpec, convert, nn, ops, optim, train

pytestmark = pytest.mark.slow
WAIT_S = 60
COMPUTING_S = 4.0
ENDS_S = 15  # far below the time that a trial may take
AGENT = """
import sys
from pathlib import Path
from triplane.edge.agent import trying
bundle, samples = map(Path, sys.argv[1:])
trying.run_trial(bundle, size=1, golden=samples)
"""


class Endless(nn.Cell):
    """Never answers for numbers above 2, which no golden has."""

    def construct(self, x):
        y = x
        while y.max() > 2.0:
            y = y * 1.5
        return y


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """Of one dense layer that learned nothing."""
    nn.seed(0)
    trainer = train.Trainer(nn.Dense(4, 2), loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(1))
    trainer.prepare(np.zeros((1, 4), np.float32), np.zeros(1, np.int64))
    path = tmp_path_factory.mktemp("made") / "dense.bundle"
    convert.convert(trainer.export(("predict",)), name="dense", out=path)
    return path


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_trial_ends_with_the_agent_that_waits_for_it(tmp_path, number):
    """The model computes without an end, so the trial would take all of its time."""
    bundle, samples = tmp_path / "endless.bundle", tmp_path / "samples.npz"
    convert.convert(module_of(Endless(), TensorSpec(("N", 2))), name="endless", out=bundle)
    np.savez(samples, x=np.full((4, 2), 3.0, np.float32), y=np.zeros(4, np.int64))
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, bundle, samples],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    try:
        trial = os.pidfd_open(computing_child(agent))
        try:
            agent.send_signal(number)
            agent.wait(WAIT_S)
            poll = select.poll()
            poll.register(trial, select.POLLIN)
            assert poll.poll(ENDS_S * 1000), "the trial lives on"
        finally:
            os.close(trial)
    finally:
        agent.kill()
        agent.wait(WAIT_S)


def computing_child(agent):
    """The process id of the agent's child, once it has used more time than all else would take."""
    until_s = time.monotonic() + WAIT_S
    while time.monotonic() < until_s:
        children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        times = {int(pid): processor_s(pid) for pid in children}
        if times and max(times.values()) > COMPUTING_S:
            return max(times, key=times.__getitem__)
        time.sleep(0.05)
    raise AssertionError(f"no child computed for {COMPUTING_S} s")


def processor_s(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.long
@pytest.mark.parametrize("mib", [150, 500])
def test_a_model_of_one_large_product_passes_its_trial(tmp_path, mib):
    """It takes three times its weights while it loads; the bundle's estimate says twice."""
    columns = 8192
    rows = (mib << 20) // (4 * columns)
    path = large_product(tmp_path, rows, columns)
    size = path.stat().st_size
    assert size > mib << 20
    answer = run_trial(path, size=size)
    assert answer["grown_bytes"] > answer["memory_limit_bytes"], "the estimate alone would refuse"
    assert answer["golden_error"] == 0
    judge_trial(answer, signed(answer, size))


def large_product(folder, rows, columns):
    """A bundle of y = x W, with random weights."""
    nn.seed(0)
    x = np.random.default_rng(0).normal(size=(4, rows)).astype(np.float32)
    cell = nn.Dense(rows, columns, bias=False)
    trainer = train.Trainer(cell, loss=nn.MSE(), optimizer=optim.SGD(1))
    trainer.prepare(x[:1], np.zeros((1, columns), np.float32))
    path = folder / "large.bundle"
    convert.convert(trainer.export(("predict",)), name="large", out=path)
    return path


def signed(answer, size):
    """The target by which people signed a bundle that answers so."""
    custom = {name: answer[name] for name in IDENTIFYING}
    return SignedTarget("release/large@1+ort-x64.bundle", size, bytes(32), custom)


class Wide(nn.Cell):
    """A few weights, and large tensors between two layers."""

    def __init__(self, channels):
        super().__init__()
        self.first = nn.Conv2d(1, channels, 1)
        self.last = nn.Conv2d(channels, 1, 1)

    def construct(self, x):
        """One number of each image."""
        return self.last(ops.tanh(self.first(x))).mean((1, 2, 3))


@pytest.mark.parametrize("channels", [96, pytest.param(768, marks=pytest.mark.long)])
def test_a_small_model_with_large_tensors_passes_its_trial(tmp_path, channels):
    """74 and 588 MiB for each tensor of the four golden samples, beside a kilobyte of weights."""
    nn.seed(0)
    trainer = train.Trainer(Wide(channels), loss=nn.MSE(), optimizer=optim.SGD(1))
    x = np.zeros((1, 1, 224, 224), np.float32)
    trainer.prepare(x, np.zeros(1, np.float32))
    path = tmp_path / "wide.bundle"
    convert.convert(trainer.export(("predict",)), name="wide", out=path)
    size = path.stat().st_size
    answer = run_trial(path, size=size)
    assert answer["grown_bytes"] > 4 * x.nbytes * channels
    judge_trial(answer, signed(answer, size))


def test_a_trial_without_a_valid_answer_is_a_verdict(bundle, monkeypatch):
    """Tried again, it would not answer either: the attempt fails and says so."""
    monkeypatch.setattr("triplane.edge.agent.trying.MAX_ANSWER_BYTES", 10)
    with pytest.raises(AttemptRefused, match="answered with more than 10 bytes") as refused:
        run_trial(bundle, size=bundle.stat().st_size, golden=None)
    assert refused.value.kind == "load"
