"""Signals at any instant, each in a small process of its own."""

import ast
import os
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

WAIT_S = 60
PACKAGES = ("proto", "unified_ir", "cloud", "edge", "device")
ROOT = Path(__file__).parents[2]
INSTALLING = {"signal", "set_wakeup_fd", "add_signal_handler", "sigwait", "pthread_sigmask"}
EXCEPT = {
    "device/child.py",
    "proto/signals.py",
    "unified_ir/cli/watching.py",
    "unified_ir/train/interrupt.py",
}
NUMBERS = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])

HEAD = """
import ctypes, os, select, signal, subprocess, sys, threading, time
from triplane.proto import signals
SIGNALS = {signal.SIGTERM, signal.SIGINT}

def say(text):
    os.write(1, text.encode() + b"\\n")

def not_interrupted():
    "From now on other threads take the signals, as if they came just before a call blocks."
    threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

def wait_for_child():
    child = None
    try:
        with made.deferred():  # subprocess forgets a child whose start is interrupted
            child = subprocess.Popen(["sleep", "3600"])
        child.wait()
    finally:
        child.kill()
"""
WAITS = {
    "read": "os.read(os.pipe()[0], 1)",
    "event": "threading.Event().wait()",
    "sleep": "time.sleep(3600)",
    "poll": "select.poll().poll()",
    "child": "wait_for_child()",
}


@contextmanager
def running(code, **options):
    """A process of this code that has said that it is ready."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, "-c", HEAD + code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
        **options,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n", process.communicate(timeout=WAIT_S)[1]
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def ended(process):
    """Exit status, standard output and standard error."""
    out, log = process.communicate(timeout=WAIT_S)
    return process.returncode, out, log


@NUMBERS
def test_a_signal_that_interrupts_no_system_call_is_noticed(number):
    code = """
made = signals.Termination(limit_s=3600)
not_interrupted()
say("ready")
made.wait()
say("stopping")
"""
    with running(code) as process:
        process.send_signal(number)
        assert ended(process) == (0, "stopping\n", "")


@NUMBERS
@pytest.mark.parametrize("wait", WAITS)
def test_a_signal_interrupts_whatever_the_main_thread_waits_for(wait, number):
    """The signal itself goes to another thread, so nothing but the module wakes the main one."""
    code = f"""
made = signals.Interrupts(limit_s=3600, hurry_s=3600)
made.install()
not_interrupted()
try:
    say("ready")
    {WAITS[wait]}
except KeyboardInterrupt:
    say("interrupted")
"""
    with running(code) as process:
        process.send_signal(number)
        assert ended(process) == (0, "interrupted\n", "")


def test_a_process_that_does_not_stop_ends_at_its_limit():
    code = """
signals.Termination(limit_s=0.2)
say("ready")
while True:
    time.sleep(3600)
"""
    with running(code) as process:
        process.send_signal(signal.SIGTERM)
        status, _, log = ended(process)
    assert status == 1
    assert "exiting regardless" in log


@pytest.mark.slow
def test_a_second_signal_ends_a_process_whose_hooks_do_nothing():
    code = """
made = signals.Termination(lambda: say("stop"), hurry=lambda: say("hurry"), limit_s=3600)
say("ready")
while True:
    time.sleep(3600)
"""
    with running(code) as process:
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "stop\n"
        process.send_signal(signal.SIGTERM)
        status, out, _ = ended(process)
    assert (status, out) == (1, "hurry\n")


def test_a_hook_that_fails_does_not_keep_the_process_alive():
    code = """
signals.Termination(lambda: 1 / 0, limit_s=0.2)
say("ready")
while True:
    time.sleep(3600)
"""
    with running(code) as process:
        process.send_signal(signal.SIGTERM)
        status, _, log = ended(process)
    assert status == 1
    assert "ZeroDivisionError" in log


@pytest.mark.slow
def test_the_limit_holds_for_an_end_that_no_signal_asked_for():
    """A thread that nobody ends keeps the interpreter, a library that hangs at exit too."""
    code = """
import atexit
made = signals.Termination(limit_s=0.1)
atexit.register(lambda: time.sleep(3600))
threading.Thread(target=time.sleep, args=(3600,)).start()
made.request()
say("ready")
"""
    with running(code) as process:
        assert ended(process)[0] == 1


@pytest.mark.slow
def test_the_kernel_ends_a_process_whose_interpreter_hangs():
    """A C function that keeps the interpreter's lock: no thread of ours runs."""
    code = """
signals.ALARM_S = 0
made = signals.Termination(limit_s=0.1)
say("ready")
made.wait()
ctypes.PyDLL(None).sleep(3600)
"""
    with running(code) as process:
        process.send_signal(signal.SIGTERM)
        assert ended(process)[0] == -signal.SIGALRM


@NUMBERS
def test_before_it_takes_signals_one_ends_the_process(number):
    """Also where the parent had it ignored, as a shell does for its background jobs."""

    def ignored():
        signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, {number})

    code = "signals.restore_defaults(); say('ready'); time.sleep(3600)"
    with running(code, preexec_fn=ignored) as process:
        process.send_signal(number)
        assert ended(process)[0] == -number


@NUMBERS
def test_signals_are_taken_that_the_parent_ignored_and_blocked(number):
    def ignored():
        signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, {number})

    code = "made = signals.Termination(limit_s=3600); say('ready'); made.wait()"
    with running(code, preexec_fn=ignored) as process:
        process.send_signal(number)
        assert ended(process) == (0, "", "")


def test_a_child_of_a_process_that_takes_signals_has_the_default_actions():
    shown = "import signal; from pathlib import Path; print(Path('/proc/self/status').read_text())"
    code = f"""
signals.restore_defaults()
signals.Termination(limit_s=3600)
say("ready")
subprocess.run([sys.executable, "-c", {shown!r}])
"""
    with running(code) as process:
        _, out, _ = ended(process)
    masks = dict(line.split(":\t") for line in out.splitlines() if line.startswith("Sig"))
    taken = sum(1 << (number - 1) for number in (signal.SIGTERM, signal.SIGALRM, signal.SIGURG))
    assert not int(masks["SigBlk"], 16)
    assert not int(masks["SigIgn"], 16) & taken
    assert not int(masks["SigCgt"], 16) & taken


def test_an_interrupt_is_held_back_while_it_is_deferred_and_comes_once():
    code = """
made = signals.Interrupts(limit_s=3600, hurry_s=3600)
made.install()
with made.deferred():
    try:
        with made.deferred():
            say("ready")
            while not made._is_pending:
                time.sleep(0.01)
            say("deferred")
    except KeyboardInterrupt:
        say("too early")
    while not made.hurried:
        time.sleep(0.01)
    say("hurried")
    done = True
"""
    with running(
        "try:"
        + code.replace("\n", "\n    ")
        + """
except KeyboardInterrupt:
    say(f"interrupted, {done}")
signal.raise_signal(signal.SIGTERM)
say("cleaned up")
"""
    ) as process:
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "deferred\n"
        process.send_signal(signal.SIGINT)
        assert ended(process) == (0, "hurried\ninterrupted, True\ncleaned up\n", "")


@pytest.mark.slow
def test_hundreds_of_signals_at_random_instants_are_all_noticed():
    """The parent signals while the child is on its way into its wait, over and over."""
    code = """
import random
made = signals._Wakeup()
made.install(signals._noted)
heard = threading.Semaphore(0)
def watch():
    while made.read(None):
        heard.release()
threading.Thread(target=watch, daemon=True).start()
rounds, random = 400, random.Random(7)
say("ready")
for number in range(rounds):
    for _ in range(random.randrange(200)):
        pass
    say(str(number))
    assert heard.acquire(timeout=60), number
"""
    with running(code) as process:
        for line in process.stdout:
            for _ in range(int(line) % 50):
                pass
            process.send_signal(signal.SIGTERM)
        assert ended(process)[0] == 0


def test_termination_that_is_closed_leaves_nothing_behind():
    """For a caller that goes on to something else, as where nothing could be started."""
    code = """
termination = signals.Termination(limit_s=0.1)
termination.close()
termination.request()
assert threading.active_count() == 1
assert {signal.getsignal(n) for n in SIGNALS} == {signal.SIG_DFL}
time.sleep(0.5)
print("alive", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60)
"""
    done = subprocess.run(
        [sys.executable, "-c", HEAD + code], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "alive\n"), done.stderr


def test_no_other_module_installs_handlers():
    """A handler that sets a flag for a thread that waits is the fault that `signals` ends."""
    installing = set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            source = path.read_bytes()
            for node in ast.walk(ast.parse(source)) if b"signal" in source else ():
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    owner = getattr(node.func.value, "id", "")
                    name = node.func.attr
                    if name == "add_signal_handler" or (owner == "signal" and name in INSTALLING):
                        installing.add(str(path.relative_to(ROOT)))
    assert installing == EXCEPT
