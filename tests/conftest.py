"""What holds for every test: nothing leaks, and searches repeat.

A test that leaves a thread, a child process or an open file behind fails, naming it. What must live
longer than one test belongs in a fixture of wider scope, which is set up before the count is taken.
"""

import gc
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
import traceback
import zlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

# onnxruntime 1.29+ reports to its maker unless told otherwise before it is first imported.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

# Some containers forbid byte code: every run would compile 300 modules of tests anew, and each of
# the hundreds of processes that tests start would compile the packages.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

RUN = "TRIPLANE_TEST_RUN"
"""Variable by which every process that a run of tests started is known, however far below it."""
WATCH = """
import os, select, signal, sys, time
from pathlib import Path
run, watched = os.fsencode(sys.argv[1]), select.poll()
watched.register(int(sys.argv[2]), select.POLLIN)
if os.fork():
    os._exit(0)  # so that no process of the tests is our parent
os.setsid()
watched.poll()
for _ in range(100):  # until none is left that could start another
    found = 0
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if run in path.read_bytes().split(bytes(1)):
                os.kill(int(path.parent.name), signal.SIGKILL)
                found += 1
        except OSError:
            continue
    if not found:
        break
    time.sleep(0.05)
"""
"""Ends what a run of tests leaves behind, whatever ended the run, a SIGKILL too."""

GRACE_S = 5.0  # for threads that were told to end and descriptors that close with them
STEP_S = 0.01
FIRST_SWEEP_S = 0.05  # then after twice as long each time
SWEEP_AFTER = (5000, 20, 20)
"""New objects, and sweeps of the young; Python's own 700, 10, 10 took a fifteenth of the time."""
LIMITS_S = {
    "deep": 4 * 3600,
    "long": 1000,
}  # of tests with that marker; pyproject.toml has the rest
QUICK_S = 1.0  # a test that takes longer belongs under the marker `slow`
DESCRIPTORS = "/proc/self/fd"
KEPT_OPEN = (
    "anon_inode:",  # epoll and event descriptors: grpc and asyncio keep one each per process
    "/dev/",
    "/proc/",
)

# One seed on CI and at home: a red search is red again. `deep` looks further, with fresh examples.
settings.register_profile(
    "default", derandomize=True, deadline=None, max_examples=40,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
settings.register_profile(
    "deep", deadline=None, max_examples=5000, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("quick", settings.get_profile("default"), max_examples=10)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_configure(config):
    """`make quick` searches a quarter as far; before any module of tests reads the profile."""
    watch()
    if quick(config) and "HYPOTHESIS_PROFILE" not in os.environ:
        settings.load_profile("quick")


def watch():
    """Have another process end what this one starts, once this one has ended."""
    if not hasattr(os, "pidfd_open"):
        return
    name = f"{RUN}={secrets.token_hex(16)}"
    others = {k: v for k, v in os.environ.items() if k != RUN}  # it must not find itself
    handle = os.pidfd_open(os.getpid())
    try:
        subprocess.run(
            [sys.executable, "-S", "-c", WATCH, name, str(handle)],
            env=others,
            pass_fds=[handle],
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    finally:
        os.close(handle)
    os.environ[RUN] = name.partition("=")[2]


def quick(config):
    """Whether this run leaves the slow tests out."""
    return "not slow" in config.option.markexpr


def sampled(item):
    """Whether `make quick` takes it: all that stands alone, a fifth of the cases of a table."""
    return not hasattr(item, "callspec") or zlib.crc32(item.nodeid.encode()) % 5 == 0


@pytest.fixture(autouse=True)
def ctrl_c_interrupts():
    """A shell's background job ignores Ctrl-C, a server in this process takes it for itself.

    Either would be left to whatever runs next, and to the processes it starts.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def nothing_leaks(caplog):
    before = living()
    yield
    left = living() - before
    if left:
        for record in caplog.get_records("call"):
            if record.exc_info:  # kept for the report, and with it all that its frames hold
                traceback.clear_frames(record.exc_info[2])
        left = settle(before)
    assert not left, f"left behind by this test: {sorted(left)}"


def settle(before):
    """What is still left beyond `before` when it has had `GRACE_S` to end.

    A sweep of all objects takes half a second late in a run, so most of the wait is for threads and
    descriptors that close by themselves. What survives a sweep is kept out of the next ones.
    """
    deadline = time.monotonic() + GRACE_S
    wait_s = FIRST_SWEEP_S
    sweep_at = time.monotonic() + wait_s
    gc.collect(1)  # what this test made last
    while (left := living() - before) and time.monotonic() < deadline:
        if time.monotonic() >= sweep_at:
            gc.collect()  # again: a cycle may have closed since, as where a thread has ended
            gc.freeze()
            wait_s *= 2
            sweep_at = time.monotonic() + wait_s
        else:
            threading.Event().wait(STEP_S)
    if left:  # perhaps held by what an earlier sweep had frozen
        gc.unfreeze()
        gc.collect()
        left = living() - before
    return left


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return Files(config, log) if config.getvalue("dist") == "loadfile" else None


class Files(LoadFileScheduling):  # type: ignore[misc]  # pytest-xdist ships no types
    """`--dist loadfile` that goes on after a worker died, as at the limit of a test in C code.

    pytest-xdist 3.8 hands out again what the worker had finished, and gives one file to the worker
    that takes its place, or none; either waits without end.
    """

    def schedule(self):
        """Give every worker two files, for it begins its last test when it knows what follows."""
        super().schedule()
        for node in self.nodes:
            self._reschedule(node)

    def remove_node(self, node):
        """Give others what the worker left; the test that it died in, or None."""
        units = self.assigned_work.pop(node)
        left = [(unit, test) for unit in units.values() for test, done in unit.items() if not done]
        if not left:
            return None
        unit, died_in = left[0]
        unit[died_in] = True
        self.workqueue.update({f: unit for f, unit in units.items() if not all(unit.values())})
        for other in self.assigned_work:
            self._reschedule(other)
        return died_in


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Sweep only after it: of a million objects that collection makes, hardly any is garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(config, items):
    """Files with slow tests go first: what is short fills the workers up at the end.

    With TRIPLANE_SAMPLED (`make quick`) one case in five of a parametrized test runs, always the
    same one.
    """
    for item in items:
        limit_s = limit_of(item)
        if limit_s and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(limit_s))
    if os.environ.get("TRIPLANE_SAMPLED"):
        left_out = [item for item in items if not sampled(item)]
        items[:] = [item for item in items if sampled(item)]
        config.hook.pytest_deselected(items=left_out)
    long = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in long)


def limit_of(item):
    """Seconds that this test may take where its kind has a limit of its own, else None."""
    if os.environ.get("HYPOTHESIS_PROFILE") == "deep":
        return LIMITS_S["deep"]
    return next((s for marker, s in LIMITS_S.items() if item.get_closest_marker(marker)), None)


def pytest_collection_finish(session):
    """Keep what was collected out of every later sweep: it is a million objects, and stays."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*SWEEP_AFTER)


def pytest_terminal_summary(terminalreporter, config):
    """Name the tests that make `make quick` slow, where they are met."""
    if not quick(config):
        return
    passed = terminalreporter.getreports("passed")
    for report in sorted(passed, key=lambda r: -r.duration):
        if report.duration > QUICK_S:
            terminalreporter.line(f"{report.duration:.1f} s, mark it slow: {report.nodeid}")


def living():
    """Names of the threads, child processes and open files of this process."""
    threads = {f"thread {t.name} ({t.ident})" for t in threading.enumerate()}
    return threads | children() | descriptors()


def children():
    """One system call where there is none, which is nearly always."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return set()
    found = set()
    for task in Path("/proc/self/task").glob("*/children"):
        try:
            found |= {f"process {pid}" for pid in task.read_text().split()}
        except FileNotFoundError:  # the thread ended while we looked
            continue
    return found


def descriptors():
    """Twice for each test: plain strings, as a `Path` for each link costs more than most tests."""
    found = set()
    for number in os.listdir(DESCRIPTORS) if os.path.isdir(DESCRIPTORS) else ():  # noqa: PTH112, PTH208
        try:
            target = os.readlink(f"{DESCRIPTORS}/{number}")  # noqa: PTH115
        except OSError:  # the listing's own descriptor
            continue
        if not target.startswith(KEPT_OPEN):
            found.add(f"descriptor {number} on {target}")
    return found
