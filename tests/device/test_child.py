"""A child that forks, hangs, dies or cannot start does not keep the device's process."""

import contextlib
import io
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.device.devices import save_shard
from tests.federated.core import plans

from triplane.device import child_executor
from triplane.device.child_executor import ChildExecutor
from triplane.device.client import FederatedClient, Graphs
from triplane.device.home import DeviceHome, DeviceSettings
from triplane.device.stopping import StopToken, TaskExpired, Withdrawn
from triplane.device.tasks import Blob, Task
from triplane.proto import federation_pb2 as pb
from triplane.proto.errors import Corrupt, TriplaneError
from triplane.unified_ir.federated.core.learn import Work

WAIT_S = 60
LONG_S = 3600.0

FAKE = """#!{python}
import os, signal, sys, time
from triplane.device.child_executor import encoded, read_frame, write_frame
write_frame(sys.stdout.buffer, encoded(b""))
read_frame(sys.stdin.buffer, 1 << 20)
forked = os.fork()
if not forked:
    time.sleep(3600)
with open("{pids}", "w") as file:
    file.write(str(forked))
os.rename("{pids}", "{pids}.done")
{then}
"""
HANGS = "time.sleep(3600)"
CRASHES = "os.kill(os.getpid(), signal.SIGSEGV)"


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Makes a runner whose child forks a worker at its task, and then does something else."""

    def make(then):
        script, pids = tmp_path / "python", tmp_path / "pids"
        script.write_text(FAKE.format(python=sys.executable, pids=pids, then=then))
        script.chmod(0o700)
        monkeypatch.setattr(child_executor, "sys", SimpleNamespace(executable=str(script)))
        return ChildExecutor(DeviceHome(tmp_path), DeviceSettings(), tmp_path / "x.npz", None)

    done = tmp_path / "pids.done"
    yield make
    assert ended(int(done.read_text()))


def ended(pid):
    """Whether the process ends soon."""
    until_s = time.monotonic() + WAIT_S
    while time.monotonic() < until_s:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    return False


def task_until(until_s):
    work = Work(
        run="0" * 16, round=1, device="ann", seed=0, steps=1, batch_size=1, support=0, query=0
    )
    blob = Blob(bytes(32), 1)
    return Task(kind="learn", lease="00", plan=blob, state=blob, work=work, until_s=until_s)


def does(runner, stop, until_s=LONG_S):
    """What a task comes to, in a thread that may never end; None where it did not."""
    task, results = task_until(until_s), []

    def do():
        try:
            results.append(runner.do(task, stop, []))
        except Withdrawn as error:
            results.append(error)

    thread = threading.Thread(target=do, daemon=True)
    thread.start()
    return thread, results


def forked(tmp_path):
    until_s = time.monotonic() + WAIT_S
    while not (tmp_path / "pids.done").exists():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_a_worker_of_a_child_that_crashed_does_not_hide_its_end(tmp_path, fake):
    thread, results = does(fake(CRASHES), StopToken(LONG_S + time.monotonic()))
    forked(tmp_path)
    thread.join(WAIT_S)
    (contribution,) = results or (None,)
    assert contribution is not None
    assert "SIGSEGV" in contribution.declined


def test_a_worker_does_not_outlive_a_task_that_is_withdrawn(tmp_path, fake):
    stop = StopToken(LONG_S + time.monotonic())
    thread, results = does(fake(HANGS), stop)
    forked(tmp_path)
    stop.now()
    thread.join(WAIT_S)
    assert [type(result) for result in results] == [Withdrawn]


def test_a_worker_does_not_outlive_an_interrupt(tmp_path, fake):
    runner = fake(HANGS)
    thread, results = does(runner, StopToken(LONG_S + time.monotonic()))
    forked(tmp_path)
    runner.interrupt()
    thread.join(WAIT_S)
    runner.close()
    assert [type(result) for result in results] == [Withdrawn]


def test_a_child_that_does_not_heed_is_killed_before_the_deadline_it_is_told_of(tmp_path, fake):
    """Told half a second before, it has half of that."""
    runner = fake(HANGS)
    runner.start()
    stop = StopToken(LONG_S + time.monotonic())
    until_s = time.monotonic() + LONG_S
    thread, results = does(runner, stop, until_s)
    forked(tmp_path)
    asked = []
    wait = threading.Event.wait

    def watched(event, timeout=None):
        asked.append(timeout)
        return wait(event, timeout)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child_executor, "time", SimpleNamespace(monotonic=lambda: until_s - 0.5))
        patch.setattr(threading.Event, "wait", watched)
        stop.expire()
        thread.join(WAIT_S)
    assert [type(result) for result in results] == [TaskExpired]
    assert 0.25 in asked


ANSWERS = """#!{python} -S
import struct, sys
out, requests = sys.stdout.buffer, sys.stdin.buffer
while True:
    out.write(struct.pack("<I", 14) + b'{{"result": ""}}')
    out.flush()
    head = requests.read(4)
    if len(head) < 4:
        break
    requests.read(*struct.unpack("<I", head))
"""
"""A child that answers each request at once."""
BLOCKED_S = 0.02
"""So long `close` may take before the task goes on: it waits for the task, or it is done."""


def closed_at(runner, instant):
    """A task beside which another thread closes the runner, at the task's n-th line of Python.

    (how the task ended, what `close` raised, number of lines of the task)
    """
    task = task_until(LONG_S)
    raised, lines, outcome = [], 0, None

    def close():
        try:
            runner.close()
        except BaseException as error:  # noqa: BLE001  # whatever it is fails the test
            raised.append(error)

    closing = threading.Thread(target=close, daemon=True)

    def traced(frame, event, _):
        nonlocal lines
        if frame.f_code.co_filename != child_executor.__file__:
            return None
        if event == "line":
            if lines == instant:
                closing.start()
                closing.join(BLOCKED_S)
            lines += 1
        return traced

    sys.settrace(traced)
    try:
        outcome = runner.do(task, StopToken(math.inf), [])
    except Exception as error:  # noqa: BLE001  # judged by the test
        outcome = error
    finally:
        sys.settrace(None)
    if lines <= instant:
        closing.start()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    return outcome, raised, lines


@pytest.mark.slow
def test_closing_beside_a_task_at_any_instant_ends_it_and_raises_nothing(tmp_path, monkeypatch):
    script = tmp_path / "python"
    script.write_text(ANSWERS.format(python=sys.executable))
    script.chmod(0o700)
    monkeypatch.setattr(child_executor, "sys", SimpleNamespace(executable=str(script)))
    instant, lines, ends = 0, 1, set()
    while instant < lines:
        runner = ChildExecutor(DeviceHome(tmp_path), DeviceSettings(), tmp_path / "x.npz", None)
        outcome, raised, lines = closed_at(runner, instant)
        assert not raised, (instant, raised)
        assert isinstance(outcome, Withdrawn | pb.Contribution), (instant, outcome)
        assert runner._child is None
        ends.add(type(outcome))
        instant += 1
    assert Withdrawn in ends


def test_the_end_of_the_parent_ends_the_workers_of_a_child():
    code = """
import os, time
from triplane.device import child
if not os.fork():
    time.sleep(3600)
child.Requests().read()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        process.communicate(timeout=WAIT_S)  # the end of file: the worker has gone too
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_a_start_that_fails_is_told_each_time_and_nothing_aborts(tmp_path, capfd):
    home = DeviceHome(tmp_path / "home")
    home.make()
    runner = ChildExecutor(home, DeviceSettings(), tmp_path / "absent.npz", None)
    try:
        for _ in range(2):
            with pytest.raises(TriplaneError, match="absent"):
                runner.start()
    finally:
        runner.close()
    assert "Fatal Python error" not in capfd.readouterr().err


def test_lower_limits_of_the_process_itself_hold():
    """As under systemd's LimitDATA= and LimitCPU=; nobody may raise them."""
    code = """
import resource
resource.setrlimit(resource.RLIMIT_DATA, (8 << 30, 8 << 30))
resource.setrlimit(resource.RLIMIT_CPU, (600, 600))
from triplane.device import child
child._limit_memory(1 << 50)
child._limit_processor(3600.0)
print(resource.getrlimit(resource.RLIMIT_DATA), resource.getrlimit(resource.RLIMIT_CPU))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.stdout == f"{(8 << 30, 8 << 30)} {(600, 600)}\n", done.stderr


@pytest.mark.parametrize("fails", [False, True])
def test_a_client_that_never_works_closes_its_runner(tmp_path, monkeypatch, fails):
    """It was told to stop while the child began, or its caller's `ready` raised."""
    save_shard(tmp_path / "x.npz", plans.shard(held_out=6))
    client = FederatedClient(tmp_path / "home", tmp_path / "x.npz", graphs=Graphs.CHILD)
    closed = []
    runner = SimpleNamespace(close=lambda: closed.append(True))
    monkeypatch.setattr(client, "_runner", lambda: runner)
    monkeypatch.setattr(DeviceHome, "is_enrolled", True)
    monkeypatch.setattr(
        DeviceHome, "enrolled", SimpleNamespace(name="ann", renew_at_s=time.time() + LONG_S)
    )

    def ready():
        client.stop()
        if fails:
            raise OSError("nobody reads")

    if fails:
        with pytest.raises(OSError, match="nobody reads"):
            client.run(ready)
    else:
        client.run(ready)
    assert closed


def test_a_message_beyond_the_limit_is_refused_before_it_is_read():
    frame = io.BytesIO(child_executor.LENGTH.pack(11) + b"0123456789x")
    with pytest.raises(Corrupt, match="a message of 11 bytes"):
        child_executor.read_frame(frame, 10)
    assert frame.tell() == child_executor.LENGTH.size
