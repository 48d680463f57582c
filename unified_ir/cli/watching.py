"""Training on many hosts: a child process trains, and this one watches it.

JAX ends a process from C++ when another one is lost. The parent lives on: it says which process was
lost, which checkpoint stands, and how to go on.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, NoReturn

from triplane.proto.errors import TriplaneError, Unavailable
from triplane.unified_ir.cli.shell import exit_code_of
from triplane.unified_ir.engines.xla.hosts import Hosts, ProcessLost

if TYPE_CHECKING:
    from types import FrameType

WAITING_S: Final = 10.0
"""Between two lines that say that the processes have not met yet."""
WATCHED: Final = "TRIPLANE_WATCHED"
"""Set for the child, which removes it."""
TAIL: Final = 200
"""Lines of the child's standard error that are searched for the cause of its end."""
_LEFT: Final = "triplane lost: "
_ENDED: Final = "triplane ended: "
_FATAL: Final = re.compile(rb"F[0-9]{4} [0-9:.]+ |triplane lost: ")
"""Begins what JAX's C++ prints last, over many lines, or what `leave` does."""
_CHATTER: Final = re.compile(
    rb"\[Gloo\] |Rank \[Gloo\] |[0-9]+ is connected to [0-9]+ peer ranks|triplane ended: "
)
"""Of Gloo, whose threads tear each other's lines apart, and of the child to its parent."""
_MISSING: Final = re.compile(r"stopped sending heartbeats\):\s*((?:[0-9]+\s)+)")
_TIMED_OUT: Final = re.compile(r"Task ([0-9]+) heartbeat timeout")
_LEFT_EARLY: Final = re.compile(r"Shutdown.*first task at the barrier: ([0-9]+)", re.DOTALL)
_TWICE: Final = re.compile(r"([0-9]+) unexpectedly tried to connect with a different incarnation")
_NEED_MESH: Final = ("--buckets", "--shard")
"""Options that a run of one process takes only with a mesh; several have all their devices."""
_UNMET: Final = "CoordinationService/RegisterTask"
_LEADER: Final = re.compile(
    r"leader task was preempted|Failed to send RPC to coordination service"
    r"|Deadline Exceeded\s+RPC: \S+CoordinationService/Heartbeat"
)


def is_watched() -> bool:
    """Return whether this is the child; if so, let it end when its parent does."""
    if os.environ.pop(WATCHED, None) is None:
        return False
    threading.Thread(target=_end_with_parent, daemon=True).start()
    return True


def _end_with_parent() -> None:
    # The parent writes nothing: the pipe ends when it does, however that happens.
    os.read(0, 1)
    os._exit(ProcessLost.exit_code)


@contextmanager
def reporting(hosts: Hosts | None) -> Iterator[None]:
    """Within the block, tell the parent how the child ends: JAX may abort its farewell."""
    code = 0
    try:
        yield
    except ProcessLost as error:
        _leave(error)
    except BaseException as error:
        code = exit_code_of(error)
        raise
    finally:
        if hosts is not None:
            sys.stderr.write(f"{_ENDED}{code}\n")
            sys.stderr.flush()


@contextmanager
def waiting(hosts: Hosts | None, note: Callable[[str], None]) -> Iterator[None]:
    """Within the block, say from time to time that the processes have not met yet."""
    if hosts is None:
        yield
        return
    met = threading.Event()

    def report() -> None:
        start_s = time.monotonic()
        while not met.wait(WAITING_S):
            text = _waited(hosts, round(time.monotonic() - start_s))
            if not met.is_set():
                note(text)

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        met.set()
        thread.join()


def _waited(hosts: Hosts, seconds: int) -> str:
    limit_s = hosts.meet_within_s
    # JAX gives up some seconds after the limit.
    waited = f"all {limit_s}" if seconds > limit_s else f"{seconds} of {limit_s}"
    head = f"process {hosts.process} of {hosts.count} has waited {waited} s (--meet-within)"
    head += " for the others"
    if hosts.process == 1:
        return f"{head}; start each of 2/{hosts.count} to {hosts.count}/{hosts.count}"
    host, _, port = hosts.coordinator.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=1.0).close()
    except OSError as error:
        return f"{head}; process 1 does not answer at {hosts.coordinator} ({error})"
    return f"{head}; process 1 answers, so another one is not there"


def _leave(error: ProcessLost) -> NoReturn:
    """End the child at once, without a farewell that waits for others; the parent reports it."""
    sys.stderr.write(f"{_LEFT}{error}\n")
    sys.stderr.flush()
    os._exit(ProcessLost.exit_code)


def train(hosts: Hosts, checkpoint: Path | None, note: Callable[[str], None]) -> int:
    """Run this command in a child and return its exit code; ProcessLost if a process was lost."""
    note(f"{hosts}")
    child = subprocess.Popen(
        [sys.executable, *sys.orig_argv[1:]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Only errors that end the process; warnings of a step that is ending say nothing more.
        env={"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ, WATCHED: "1"},
        # Ctrl-C goes to a whole session; the child ends between two steps.
        start_new_session=True,
    )
    assert child.stdin
    assert child.stdout
    assert child.stderr
    tail: deque[str] = deque(maxlen=TAIL)
    relays = [
        threading.Thread(target=_relay, args=(child.stdout, sys.stdout.buffer, deque())),
        threading.Thread(target=_relay, args=(child.stderr, sys.stderr.buffer, tail)),
    ]
    with _signals_to(child, note) as stopped:
        for relay in relays:
            relay.start()
        code = _ended(child)
        for relay in relays:
            relay.join()
    child.stdin.close()
    if code < 0 and (own := re.search(f"{_ENDED}([0-9]+)", "".join(tail))):
        return int(own[1])  # it had done its work, or its error is on the screen
    # Before JAX took the first signal, or after a second one.
    if stopped and code in {-signal.SIGTERM, -signal.SIGKILL}:
        raise KeyboardInterrupt
    if code < 0 or code == ProcessLost.exit_code:
        raise failure(hosts, code, "".join(tail), checkpoint)
    return code


def _ended(child: subprocess.Popen[bytes]) -> int:
    """Wait for the child and return its exit code."""
    # In steps: a signal right before a wait without a limit would be handled only after it.
    while True:
        with suppress(subprocess.TimeoutExpired):
            return child.wait(1.0)


def _relay(source: IO[bytes], target: IO[bytes], tail: deque[str]) -> None:
    """Copy lines, except those of JAX's libraries; keep the last ones."""
    fatal = False
    with source:
        for line in source:
            tail.append(line.decode(errors="replace"))
            fatal = fatal or _FATAL.match(line) is not None
            if not fatal and not _CHATTER.match(line):
                target.write(line)
                target.flush()


@contextmanager
def _signals_to(child: subprocess.Popen[bytes], note: Callable[[str], None]) -> Iterator[list[int]]:
    """Within the block, hand SIGINT and SIGTERM to the child; the second ends it at once."""
    stopped: list[int] = []

    def on_signal(number: int, _frame: FrameType | None) -> None:
        stopped.append(number)
        if len(stopped) > 1:
            child.kill()
            return
        note("ending all processes after the same step; once more ends this one at once")
        child.terminate()

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, on_signal) for number in numbers]
    try:
        yield stopped
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def failure(hosts: Hosts, code: int, tail: str, checkpoint: Path | None) -> Unavailable:
    """Return the error of a child that ended with this code and these last words."""
    if _UNMET in tail:
        return Unavailable(
            f"{hosts}: the processes did not all meet within {hosts.meet_within_s} s; is each of "
            f"1/{hosts.count} to {hosts.count}/{hosts.count} started, and the coordinator's "
            "address that of the first one, reachable from here? --meet-within SECONDS waits longer"
        )
    return ProcessLost(
        f"{_who(hosts, code, tail)}; {_standing(checkpoint)}; {_way_on(hosts, tail)}"
    )


def _who(hosts: Hosts, code: int, tail: str) -> str:
    if match := _TWICE.search(tail):
        number = int(match[1]) + 1
        return (
            f"process {number} of {hosts.count} was started a second time, which ends the run: "
            "each process has a number of its own"
        )
    numbers = lost_processes(tail)
    if not numbers and code in {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGSEGV}:
        name = signal.Signals(-code).name
        return f"this process, {hosts.process} of {hosts.count}, was ended by {name}"
    if not numbers:
        return f"a process of {hosts.count} was lost, or the connection to it"
    if len(numbers) == 1 and _LEFT_EARLY.search(tail):
        return f"process {numbers[0]} of {hosts.count} ended with an error of its own"
    named = f"process{'es' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
    role = ", the coordinator," if 1 in numbers else ""
    return (
        f"{named} of {hosts.count}{role} was lost (no sign of life for {hosts.heartbeat_s} s, or "
        "the connection was closed), so the run has ended"
    )


def lost_processes(tail: str) -> list[int]:
    """Return the numbers, from 1, of the processes that JAX's last words name."""
    if match := _MISSING.search(tail):
        return sorted({int(n) + 1 for n in match[1].split()})
    if match := _TIMED_OUT.search(tail):
        return [int(match[1]) + 1]
    if match := _LEFT_EARLY.search(tail):
        return [int(match[1]) + 1]
    return [1] if _LEADER.search(tail) else []


def _standing(checkpoint: Path | None) -> str:
    if checkpoint is None:
        return "there is no checkpoint, which --checkpoint FOLDER would write"
    from triplane.unified_ir.train.checkpoint import Checkpoint

    try:
        with warnings.catch_warnings(action="ignore"):
            newest = Checkpoint(checkpoint).newest()
    except (TriplaneError, OSError) as error:
        return f"no checkpoint can be read ({error})"
    if newest is None:
        return f"{checkpoint} holds no checkpoint yet"
    place = newest.place
    file = f"{checkpoint}/step-{place.step:012d}.tpc"
    return f"{file} stands, after step {place.step} (epoch {place.epoch} finished)"


def _way_on(hosts: Hosts, tail: str) -> str:
    left = hosts.count - len(lost_processes(tail) or [0])
    words = ["triplane", *sys.argv[1:]]
    mesh = " (--mesh must fit the devices left)" if "--mesh" in shlex.join(words) else ""
    if left < 1 or _TWICE.search(tail):
        return f"to go on: {shlex.join(words)}"
    by_options = hosts.source == "--coordinator and --process"
    if left == 1 and by_options:
        if not mesh and any(word.startswith(_NEED_MESH) for word in words):
            mesh = " --mesh data=N (N devices of this machine)"
        return f"to go on without it: {shlex.join(_with(words, None, None))}{mesh}"
    address = "HOST:PORT" if 1 in lost_processes(tail) else hosts.coordinator
    if left == 1 or not hosts.source.endswith("--process"):
        several = "processes" if left > 1 else "process"
        return f"to go on without it, run the same command as {left} {several}{mesh}"
    command = shlex.join(_with(words, address, f"I/{left}"))
    return f"to go on without it, for each I in 1..{left}: {command}{mesh}"


def _with(words: list[str], coordinator: str | None, process: str | None) -> list[str]:
    """Return a command line with these values of the two options; None: without the option."""
    values = {"--coordinator": coordinator, "--process": process}
    if coordinator is None:  # those of a run of several processes
        values |= {"--heartbeat": None, "--meet-within": None}
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        name, equals, _ = word.partition("=")
        if name not in values:
            kept.append(word)
            continue
        if not equals:
            next(rest, None)
        if (value := values[name]) is not None:
            kept += [name, value]
    return kept
