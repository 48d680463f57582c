"""Child processes that outlive their parent and are taken over by the next one.

A child lives in a session of its own and is recorded with process id and start time, which together
identify one process until the machine restarts. A new supervisor takes over the recorded process,
so killing a supervisor does no harm. A child begins to run only when its record is durable, so no
kill leaves one without a record.
"""

import contextlib
import json
import logging
import os
import select
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from triplane.proto.disk import write_atomic

logger = logging.getLogger(__name__)

MAX_RECORD_BYTES: Final = 4096
MAX_LOG_BYTES: Final = 16 << 20
"""A longer log is renamed to NAME.log.1 when its process starts."""
LAST_BYTES: Final = 2048
"""Bytes at the end of a log that are searched for the reason of a process's end."""
_GATE: Final = ("/bin/sh", "-c", 'read -r _ && exec "$@" </dev/null', "gate")
"""Waits for a line, then becomes the command in the same process; ends if its parent ends first."""
_START_FIELD: Final = 21  # of /proc/PID/stat, counted from 0: clock ticks from boot to start


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """One process: its pid, and its start in clock ticks since boot."""

    pid: int
    started: int


class Child:
    """A running process, started here or by an earlier supervisor."""

    def __init__(self, name: str, record: ProcessRecord) -> None:
        self.name, self.pid = name, record.pid
        self.handle = os.pidfd_open(record.pid)

    @property
    def ended(self) -> bool:
        """Whether the process has ended. It is reaped if it is our child."""
        return self.wait(0.0)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.handle, number)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of the process; return whether it came in time."""
        poll = select.poll()
        poll.register(self.handle, select.POLLIN)
        if not poll.poll(int(timeout_s * 1000)):
            return False
        with contextlib.suppress(ChildProcessError):  # not our child: init reaps it
            os.waitpid(self.pid, os.WNOHANG)
        return True

    def close(self) -> None:
        """Close the handle; the process goes on running."""
        os.close(self.handle)


def start(
    name: str, command: Sequence[str], *, run: Path, logs: Path, says: Path | None = None
) -> Child:
    """Start a process that does not end with this one.

    says: a new file for its standard output, which otherwise goes to the log as well.
    """
    log = logs / f"{name}.log"
    if log.exists() and log.stat().st_size > MAX_LOG_BYTES:
        log.replace(log.with_suffix(".log.1"))
    if says is not None:  # an older process may still have the file open, and must not write to it
        says.unlink(missing_ok=True)
    with log.open("ab") as errors, (says or log).open("ab") as out:
        gate = [*_GATE, *command]
        process = subprocess.Popen(
            gate, stdin=subprocess.PIPE, stdout=out, stderr=errors, start_new_session=True
        )
    record = ProcessRecord(process.pid, _start_ticks(process.pid) or 0)
    write_atomic(run / f"{name}.json", json.dumps(asdict(record)).encode())
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError), process.stdin:  # killed before it began
            process.stdin.write(b"go\n")
    process.returncode = 0  # so that subprocess does not reap it: `Child` does
    logger.info("started", extra={"child": name, "pid": record.pid})
    return Child(name, record)


def last_line(log: Path) -> str:
    """Return the last line of a log, which says why its process ended."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_BYTES))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def adopt(name: str, run: Path) -> Child | None:
    """Take over the recorded process, if it still runs."""
    record = read_record(name, run)
    if record is None or _start_ticks(record.pid) != record.started:
        return None
    try:
        child = Child(name, record)
    except ProcessLookupError:
        return None
    if _start_ticks(record.pid) != record.started:  # another process got the pid in between
        child.close()
        return None
    logger.info("adopted", extra={"child": name, "pid": record.pid})
    return child


def read_record(name: str, run: Path) -> ProcessRecord | None:
    """Return the record of a child; None if none can be read."""
    try:
        parsed = json.loads((run / f"{name}.json").read_bytes()[:MAX_RECORD_BYTES])
        return ProcessRecord(int(parsed["pid"]), int(parsed["started"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def is_alive(name: str, run: Path) -> bool:
    """Return whether the recorded process runs."""
    record = read_record(name, run)
    return record is not None and _start_ticks(record.pid) == record.started


def _start_ticks(pid: int) -> int | None:
    """Return the start time in ticks; None if there is no such process, or it is a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[_START_FIELD - 2])
