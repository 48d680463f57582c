"""Child processes of the demo: the real command, in process groups that never outlive it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TextIO

from triplane.proto import signals
from triplane.proto.errors import Unavailable

STOP_GRACE_S: Final = 45.0
"""A node's supervisor first drains its server; killed earlier, it would leave it running."""
HURRIED_GRACE_S: Final = 20.0
"""After a second signal to the demo; the supervisor then kills what does not end."""
INTERRUPTS: Final = signals.Interrupts(limit_s=900.0, hurry_s=240.0)
"""The limits allow for the nine processes of the fleet, ended one after another."""
STEP_S: Final = 0.1
COMMAND: Final = (sys.executable, "-c", "from triplane.unified_ir.cli import main; main()")
"""The `triplane` command of this environment."""


class ProcessFailed(Unavailable):
    """A child process ended with an error."""


def triplane(*args: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the command to its end; its progress goes to this terminal, its output is returned."""
    return _run([*COMMAND, *map(str, args)])


def output(*args: str | Path) -> str:
    """Run the command and return its output; ProcessFailed if it fails."""
    return _output_of(triplane(*args))


def answer(*args: str | Path) -> Any:
    """Run the command and return its JSON document; ProcessFailed if it fails."""
    return json.loads(output(*args, "--json"))


def run_visibly(*args: str | Path) -> int:
    """Run the command with its output on standard error; return its exit code."""
    with _child([*COMMAND, *map(str, args)], stdout=sys.stderr) as process:
        return process.wait()


def python(script: Path, *args: str | Path) -> str:
    """Run a script in a new interpreter and return its output; ProcessFailed if it fails."""
    return _output_of(_run([sys.executable, str(script), *map(str, args)]))


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    with _child(command) as process:
        out, _ = process.communicate()
    return subprocess.CompletedProcess(command, process.returncode, out, "")


def _output_of(ended: subprocess.CompletedProcess[str]) -> str:
    if ended.returncode != 0:
        words = " ".join(["triplane" if part == COMMAND[2] else part for part in ended.args[2:]])
        raise ProcessFailed(f"{words} ended with exit code {ended.returncode}; its output is above")
    return ended.stdout


@contextmanager
def background(*args: str | Path, log: Path) -> Iterator[None]:
    """Run `triplane ARGS` with its output in a file; stop it at the end."""
    with log.open("a") as words, _child([*COMMAND, *map(str, args)], stdout=words, stderr=words):
        yield


@contextmanager
def started(
    *args: str | Path, log: Path | None = None
) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """Run `triplane ARGS --json` until it is ready; yield the process and its ready line.

    It is stopped by SIGTERM, then SIGKILL after a grace period, also on an error or Ctrl-C here.
    log: file for its standard error, which otherwise goes to this terminal.
    """
    with ExitStack() as stack:
        stderr = stack.enter_context(log.open("a")) if log else None
        process = stack.enter_context(_child([*COMMAND, *map(str, args), "--json"], stderr=stderr))
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise ProcessFailed(f"{args[0]} {args[1]} did not start; see {log or 'its output'}")
        yield process, json.loads(line)


@contextmanager
def _child(
    command: Sequence[str],
    *,
    stdout: int | TextIO = subprocess.PIPE,
    stderr: TextIO | None = None,
) -> Iterator[subprocess.Popen[str]]:
    process = None
    try:
        with INTERRUPTS.deferred():  # an exception within `Popen` would leave a child running
            process = subprocess.Popen(
                list(command), stdout=stdout, stderr=stderr, text=True, start_new_session=True
            )
        yield process
    finally:
        if process is not None:
            with INTERRUPTS.deferred():
                _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """End the whole process group: SIGTERM first, then SIGKILL."""
    if process.poll() is None:
        _signal_group(process, signal.SIGTERM)
        if not _has_ended(process, STOP_GRACE_S):
            # A second SIGTERM makes the supervisor kill its own children, which SIGKILL would leave
            # behind.
            _signal_group(process, signal.SIGTERM)
            if not _has_ended(process, HURRIED_GRACE_S, patient=False):
                _signal_group(process, signal.SIGKILL)
            process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _has_ended(process: subprocess.Popen[str], seconds: float, *, patient: bool = True) -> bool:
    """Return whether it ends in time; `patient`: wait only until a second signal to the demo."""
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s and not (patient and INTERRUPTS.hurried):
        with suppress(subprocess.TimeoutExpired):
            process.wait(STEP_S)
            return True
    return process.poll() is not None


def _signal_group(process: subprocess.Popen[str], number: int) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return
