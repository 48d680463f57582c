import json
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from triplane.edge.supervisor.children import adopt, is_alive, read_record, start

SLEEPER = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]


@pytest.fixture
def child(tmp_path):
    made = start("serving", SLEEPER, run=tmp_path, logs=tmp_path)
    yield made
    made.signal(signal.SIGKILL)
    made.wait(60)
    made.close()


def test_a_started_child_is_recorded_and_can_be_adopted(tmp_path, child):
    assert is_alive("serving", tmp_path)
    found = adopt("serving", tmp_path)
    assert found is not None
    assert found.pid == child.pid
    assert not found.ended
    found.close()


def test_a_child_that_was_killed_has_ended_and_is_not_adopted(tmp_path, child):
    child.signal(signal.SIGKILL)
    assert child.wait(60)
    assert child.ended
    assert adopt("serving", tmp_path) is None
    assert not is_alive("serving", tmp_path)


def test_another_process_with_the_recorded_number_is_not_adopted(tmp_path, child):
    record = read_record("serving", tmp_path)
    assert record is not None
    text = json.dumps({"pid": record.pid, "started": record.started - 1})
    (tmp_path / "serving.json").write_text(text)
    assert adopt("serving", tmp_path) is None


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"pid": "x", "started": 1}', "\x00" * 9000])
def test_a_record_that_cannot_be_read_is_none(tmp_path, text):
    (tmp_path / "serving.json").write_text(text)
    assert read_record("serving", tmp_path) is None
    assert adopt("serving", tmp_path) is None


def test_a_child_lives_in_a_session_of_its_own(child):
    assert os.getsid(child.pid) == child.pid


KILLED = """
import os, signal, sys
from pathlib import Path
from triplane.edge.supervisor import children

def killed(*_):
    os.kill(os.getpid(), signal.SIGKILL)

children.write_atomic = killed
folder = Path(sys.argv[1])
children.start("serving", ["/bin/touch", str(folder / "ran")], run=folder, logs=folder)
"""


def test_a_supervisor_killed_before_it_recorded_a_child_leaves_none(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE
    ) as parent:
        parent.wait(30)
    assert parent.returncode == -signal.SIGKILL
    log = tmp_path / "serving.log"
    assert log.exists(), "the child was never started, so nothing was tried"
    assert until(lambda: not holders(log)), "a process that nobody recorded lives on"
    assert not (tmp_path / "ran").exists()


def holders(file):
    """Processes that have the file open."""
    return [p.pid for p in psutil.process_iter() if str(file) in opened(p)]


def opened(process):
    try:
        return [found.path for found in process.open_files()]
    except psutil.Error:
        return []


def until(condition, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not (found := condition()) and time.monotonic() < deadline:
        threading.Event().wait(0.02)
    return found
