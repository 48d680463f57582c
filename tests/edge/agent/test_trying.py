"""The trial child as a process: it never outlives the agent that waits for it."""

import os
import select
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from triplane.edge.agent.refusal import AttemptRefused
from triplane.edge.agent.trying import IDENTIFYING, judge_trial, run_trial
from triplane.proto.targets import SignedTarget
from triplane.unified_ir import convert, nn, ops, optim, train

pytestmark = pytest.mark.slow
WAIT_S = 60
HEAD = "import sys; from pathlib import Path; from triplane.edge.agent import trying; "
HEAD += "bundle, pipe = map(Path, sys.argv[1:]); "
RUN = {
    "trial": "trying.run_trial(bundle, size=1, golden=pipe)",
    "adapting": "trying.run_adaptation(bundle, size=1, samples=pipe, seed='s', out=Path('out'), "
    "current=None)",
}


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
@pytest.mark.parametrize("kind", RUN)
def test_a_trial_ends_with_the_agent_that_waits_for_it(bundle, tmp_path, kind, number):
    """The samples are a pipe that nobody writes into, so the trial would take all of its time."""
    pipe = tmp_path / "samples"
    os.mkfifo(pipe)
    agent = subprocess.Popen(
        [sys.executable, "-c", HEAD + RUN[kind], bundle, pipe],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    try:
        writing = opened_once_it_is_read(pipe)
        try:
            agent.send_signal(number)
            agent.wait(WAIT_S)
            poll = select.poll()
            poll.register(writing, 0)
            assert poll.poll(WAIT_S * 1000), "the trial lives on"
        finally:
            os.close(writing)
    finally:
        agent.kill()
        agent.wait(WAIT_S)


def opened_once_it_is_read(pipe):
    """The writing end of a pipe whose other end somebody opens."""
    until_s = time.monotonic() + WAIT_S
    while True:
        try:
            return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            assert time.monotonic() < until_s, "nobody reads the samples"
            time.sleep(0.01)


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
