"""Run a device's tasks in a child process, which can be limited and killed whatever it does.

A plan's graph may never end, take all memory, or crash. The child has limits of memory and
processor time, and it is killed if it does not end a task that was withdrawn. A kill loses nothing:
all state is in the home, in complete files. The child stays between tasks, so that a round takes
one message each way. It ends with this process, because it reads from its pipe.

The child has a session of its own, so processes that an app starts are killed with it. Its end is
noticed by a descriptor of the process, because a process that it forked may keep its pipes open.
"""

import base64
import contextlib
import json
import logging
import math
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from triplane.device.home import DeviceHome, DeviceSettings
from triplane.device.stopping import StopToken, TaskExpired, Withdrawn
from triplane.device.tasks import Blob, Task, WorkSet
from triplane.proto import errors
from triplane.proto import federation_pb2 as pb
from triplane.proto.errors import Corrupt, TriplaneError, Unavailable

logger = logging.getLogger(__name__)

LENGTH: Final = struct.Struct("<I")
MAX_REPLY_BYTES: Final = 8 << 20
GRACE_S: Final = 1.0
"""How long a child may take to end a task by itself before it is killed."""
GRACE_SHARE: Final = 0.5
"""Largest share of the time left until a deadline, so that the cloud gets the reason in time."""


class ChildExecutor:
    """Runs tasks in a child; see `TaskRunner`. data: the path of its samples. app: MODULE:NAME."""

    def __init__(
        self, home: DeviceHome, settings: DeviceSettings, data: Path, app: str | None
    ) -> None:
        self._home, self._settings = home, settings
        self._arguments = {
            "home": str(home.path),
            "data": str(data),
            "app": app,
            "settings": asdict(settings),
            "log_level": logging.getLogger().getEffectiveLevel(),
        }
        self._child: _Child | None = None
        self._using = threading.Lock()
        """Held while the child works: only the thread that holds this closes its descriptors."""
        self._lock, self._sending = threading.Lock(), threading.Lock()
        self._interrupted = False

    def start(self) -> None:
        """Start the child, which the first task does otherwise; raise the child's error."""
        with self._using:
            self._start()

    def _start(self) -> None:
        if self._child is not None and self._child.ends_within(0.0):
            logger.warning("process for tasks ended while idle", extra={"reason": self._end()})
        with self._lock:
            if self._interrupted:
                raise Withdrawn
            if self._child is not None:
                return
            command = [sys.executable, "-m", "triplane.device.child", json.dumps(self._arguments)]
            self._child = _Child(command)
        try:
            self._require_reply("the process for tasks did not start: ")
        except TriplaneError:
            self._end()  # the next start begins with a new child
            raise

    def do(self, task: Task, stop: StopToken, wanted: Sequence[Blob]) -> pb.Contribution:
        """See `TaskRunner`. A task that a limit or a crash ends is declined with the reason."""
        with self._using:
            self._start()
            ended = threading.Event()
            self._send(
                {
                    "kind": "do",
                    "device": task.work.device,
                    # The document itself, which the child checks again with the code that checked
                    # it here.
                    "work": pb.Work(tasks=[task.document]),
                    "until_s": stop.until_s,
                    "wanted": [[blob.sha256.hex(), blob.size] for blob in wanted],
                }
            )
            # After the request was sent, so that the child reads the stop as one of this task. If
            # the task was withdrawn before, this calls `_stop` at once.
            stop.call(lambda: self._stop(stop, task.until_s, ended))
            reply = self._reply()
            ended.set()
            if reply is not None:
                return pb.Contribution.FromString(_result(reply))
            why = self._end()
            stop.check()
            if self._interrupted:
                raise Withdrawn
            logger.warning("process for tasks ended", extra={"run": task.work.run, "reason": why})
            return task.decline(why)

    def settle(self, work_set: WorkSet) -> None:
        """See `TaskRunner`. No child is started if there is no update."""
        with self._using:
            if self._child is not None or any(self._home.pending.glob("*.update")):
                self._start()
                self._send({"kind": "settle", "device": "", "work": work_set.document})
                self._require_reply()

    def write_model(self) -> None:
        """See `TaskRunner`. No child is started for it."""
        with self._using:
            if self._child is not None:
                self._send({"kind": "write", "device": "", "work": pb.Work()})
                self._require_reply()

    def _require_reply(self, context: str = "") -> None:
        """Raise the error in the child's reply, or Unavailable if it has ended."""
        reply = self._reply()
        if reply is not None:
            _result(reply)
            return
        why = self._end()
        if self._interrupted:
            raise Withdrawn
        raise Unavailable(f"{context}{why}")

    def use_new_certificate(self) -> None:
        """End the child, so that the next one uses the new certificate."""
        with self._using:
            self._end()

    def interrupt(self) -> None:
        """Kill the child, whatever it does; nothing is lost."""
        with self._lock:
            self._interrupted = True
            if self._child is not None:
                self._child.kill()

    def close(self) -> None:
        """Kill the child, which ends a task in another thread, and release all resources."""
        self.interrupt()
        with self._using:
            self._end()

    def _stop(self, stop: StopToken, deadline_s: float, ended: threading.Event) -> None:
        """Ask the child to end its task; a thread kills it if it does not."""
        grace_s, expired = GRACE_S, False
        try:
            stop.check()
        except TaskExpired:
            left_s = max(0.0, deadline_s - time.monotonic())
            grace_s, expired = min(GRACE_S, GRACE_SHARE * left_s), True
        except Withdrawn:
            pass
        self._send({"kind": "stop", "expired": expired})
        child = self._child

        def kill_late() -> None:
            if not ended.wait(grace_s) and child is not None:
                child.kill()

        threading.Thread(target=kill_late, daemon=True).start()

    def _send(self, request: dict[str, Any]) -> None:
        """Send a request. If the child has ended, the missing reply will show it."""
        child = self._child
        if child is None:
            return
        try:
            with self._sending:
                write_frame(child.requests, json.dumps(request, default=_encoded_message).encode())
        except (OSError, ValueError):
            logger.debug("the child reads no more")

    def _reply(self) -> dict[str, Any] | None:
        """Return the child's reply; None if it has ended, or sent something else."""
        child = self._child
        assert child is not None
        try:
            data = read_frame(child, MAX_REPLY_BYTES)
            return None if data is None else dict(json.loads(data))
        except (Corrupt, ValueError) as error:
            logger.warning("not a reply", extra={"reason": str(error)})
            return None

    def _end(self) -> str:
        """End the child; return why it ended."""
        with self._lock:
            child, self._child = self._child, None
        if child is None:
            return ""
        return self._why(child.end())

    def _why(self, code: int) -> str:
        settings = self._settings
        if code == -signal.SIGXCPU:
            return (
                f"the task took more than {settings.max_cpu_s:.0f} s of processor time "
                "(max_cpu_s in this device's device.json)"
            )
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return (
            f"the process that ran the task's graphs ended by {how}; a task may take "
            f"{settings.max_memory_bytes} bytes of memory (max_memory_bytes in this device's "
            "device.json)"
        )


class _Child:
    """A process with pipes, and the processes that it starts."""

    def __init__(self, command: Sequence[str]) -> None:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self.requests, self._replies = process, process.stdin, process.stdout
        self._reaping = threading.Lock()
        try:
            # A pidfd becomes readable at the process's own end, even if a grandchild holds the
            # pipes open.
            self._gone = os.pidfd_open(process.pid)
        except BaseException:
            self.kill()
            process.communicate()
            raise

    def ends_within(self, seconds: float) -> bool:
        """Wait for its end; return whether it came in time. It is not reaped, so its pid stays."""
        ended = select.poll()
        ended.register(self._gone, select.POLLIN)
        return bool(ended.poll(None if seconds == math.inf else seconds * 1000))

    def read(self, size: int) -> bytes:
        """Read `size` bytes of replies, or fewer if the process has ended."""
        replies = self._replies.fileno()
        poll = select.poll()
        poll.register(replies, select.POLLIN)
        poll.register(self._gone, select.POLLIN)
        data, timeout_ms = bytearray(), None
        while len(data) < size:
            ready = dict(poll.poll(timeout_ms))
            if replies in ready:
                piece = os.read(replies, size - len(data))
                if not piece:
                    break
                data += piece
            elif timeout_ms == 0:
                break
            else:
                # Once more without waiting: the last reply may have been written just before the
                # end.
                timeout_ms = 0  # it has ended, so the pipe gets no more bytes
        return bytes(data)

    def kill(self) -> None:
        """Kill it with its session, from any thread; it may have ended already."""
        with self._reaping:
            if self._process.returncode is None:  # otherwise the pid may belong to another process
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> int:
        """Let it end by itself, or kill it; return its exit code."""
        _close(self.requests)
        _close(self._replies)
        self.ends_within(GRACE_S)
        self.kill()
        # Wait without reaping: until the lock is held, `kill` may still use the pid.
        self.ends_within(math.inf)
        with self._reaping:
            code = self._process.wait()
        os.close(self._gone)
        return code


def _close(pipe: Any) -> None:
    try:
        pipe.close()
    except OSError:
        logger.debug("a pipe was closed with unread bytes")


def write_frame(file: Any, data: bytes) -> None:
    """Write bytes with their length before them."""
    file.write(LENGTH.pack(len(data)) + data)
    file.flush()


def read_frame(file: Any, max_bytes: int) -> bytes | None:
    """Read the next frame; None at the end of the file."""
    head = file.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    if size > max_bytes:
        raise Corrupt(f"a message of {size} bytes from the process for tasks, at most {max_bytes}")
    data: bytes = file.read(size)
    return data if len(data) == size else None


def _encoded_message(message: pb.Work) -> str:
    return base64.b64encode(message.SerializeToString()).decode()


def work_of(request: dict[str, Any]) -> pb.Work:
    """Return the work document in a request."""
    return pb.Work.FromString(base64.b64decode(request["work"]))


def encoded(result: bytes) -> bytes:
    """Return a reply with a result."""
    return json.dumps({"result": base64.b64encode(result).decode()}).encode()


def encoded_error(error: Exception) -> bytes:
    """Return a reply that raises in the parent the error that was raised in the child."""
    return json.dumps({"error": type(error).__name__, "text": str(error)}).encode()


def _result(reply: dict[str, Any]) -> bytes:
    if "error" not in reply:
        return base64.b64decode(str(reply["result"]))
    name, text = str(reply["error"]), str(reply["text"])
    if name in ENDS:
        raise ENDS[name]
    # The child runs a plan and an app of others: its text may name only one of our families.
    kind = getattr(errors, name, TriplaneError)
    raise kind(text) if issubclass(kind, TriplaneError) else TriplaneError(text)


ENDS: Final[dict[str, type[Exception]]] = {
    "Withdrawn": Withdrawn,
    "TaskExpired": TaskExpired,
}
