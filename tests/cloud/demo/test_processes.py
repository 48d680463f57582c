"""Signals to the demo while a child process of it runs."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

WAIT_S = 60
RUN = """
import sys
from triplane.cloud.demo import processes
processes.INTERRUPTS.install()
try:
    processes.python(*sys.argv[1:])
except KeyboardInterrupt:
    sys.exit(130)
"""
STUBBORN = """
import os, signal, sys, time
told = []
def tell(*_):
    told.append(1)
    print("told", file=sys.stderr, flush=True)
signal.signal(signal.SIGTERM, tell)
print(os.getpid(), file=sys.stderr, flush=True)
while len(told) < 2:
    time.sleep(0.02)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_hurries_the_end_and_leaves_no_child(tmp_path: Path, number: int) -> None:
    script = tmp_path / "stubborn.py"
    script.write_text(STUBBORN)
    with subprocess.Popen(
        [sys.executable, "-c", RUN, str(script)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,
    ) as process:
        assert process.stderr is not None
        child = psutil.Process(int(process.stderr.readline()))
        try:
            process.send_signal(number)
            assert process.stderr.readline() == "told\n"
            process.send_signal(number)
            process.communicate(timeout=WAIT_S)
            assert process.returncode == 130
            assert not child.is_running()
        finally:
            for left in (process, child):
                try:
                    left.kill()
                except psutil.NoSuchProcess:
                    continue
