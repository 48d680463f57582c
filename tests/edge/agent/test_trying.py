"""The trial child as a process: it never outlives the agent that waits for it."""

import os
import select
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from triplane.unified_ir import convert, nn, optim, train

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
