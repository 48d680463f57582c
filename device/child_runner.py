"""Runs a device's tasks in a child process, which can be limited and killed whatever it does.

A plan's graph may never end, take all memory, or crash. The child has limits of memory and
processor time, and it is killed where it does not end a task that nobody wants any more. A kill
costs nothing: whatever matters is in the home, written whole. The child lives on between tasks, so
a round costs it one message each way. It ends with this process, whose pipe it reads.
"""

import base64
import json
import logging
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from triplane.device.home import DeviceHome, Settings
from triplane.device.stopping import DeadlineExceeded, Stop, Withdrawn
from triplane.device.tasks import Blob, Orders, Task, declined
from triplane.proto import errors
from triplane.proto import federation_pb2 as pb
from triplane.proto.errors import Corrupt, TriplaneError, Unavailable

logger = logging.getLogger(__name__)

LENGTH: Final = struct.Struct("<I")
MAX_REPLY_BYTES: Final = 8 << 20
GRACE_S: Final = 1.0
"""So long a child may take to end a task by itself before it is killed."""


class ChildRunner:
    """The side of the device's process; see `TaskRunner`. data: an npz file. app: MODULE:NAME."""

    def __init__(self, home: DeviceHome, settings: Settings, data: Path, app: str | None) -> None:
        self._home, self._settings = home, settings
        self._arguments = {
            "home": str(home.path),
            "data": str(data),
            "app": app,
            "settings": asdict(settings),
            "log_level": logging.getLogger().getEffectiveLevel(),
        }
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._interrupted = False

    def start(self) -> None:
        """Start the child, which happens by itself at the first task; raises what it says."""
        if self._child is not None and self._child.poll() is not None:
            logger.warning("process for tasks ended while idle", extra={"reason": self._end()})
        with self._lock:
            if self._interrupted:
                raise Withdrawn
            if self._child is not None:
                return
            command = [sys.executable, "-m", "triplane.device.child", json.dumps(self._arguments)]
            self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        reply = self._reply()
        if reply is None:
            raise Unavailable(f"the process for tasks did not start: {self._end()}")
        _result(reply)

    def do(self, task: Task, stop: Stop, wanted: Sequence[Blob]) -> pb.Contribution:
        """See `TaskRunner`. What a limit or a crash ended is declined with the reason."""
        self.start()
        ended = threading.Event()
        self._send(
            {
                "kind": "do",
                "device": task.work.device,
                "work": pb.Work(tasks=[task.told]),
                "until_s": stop.until_s,
                "wanted": [[blob.sha256.hex(), blob.size] for blob in wanted],
            }
        )
        stop.call(lambda: self._stop(stop, ended))
        reply = self._reply()
        ended.set()
        if reply is not None:
            return pb.Contribution.FromString(_result(reply))
        why = self._end()
        stop.check()
        if self._interrupted:
            raise Withdrawn
        logger.warning("process for tasks ended", extra={"run": task.work.run, "reason": why})
        return declined(task.work.run, task.work.round, bytes.fromhex(task.lease), why)

    def settle(self, orders: Orders) -> None:
        """See `TaskRunner`. Without any update there is nothing to start a child for."""
        if self._child is None and not any(self._home.pending.glob("*.update")):
            return
        self.start()
        self._send({"kind": "settle", "device": "", "work": orders.told})
        reply = self._reply()
        if reply is None:
            why = self._end()
            if self._interrupted:
                raise Withdrawn
            raise Unavailable(why)
        _result(reply)

    def renewed(self) -> None:
        """The next child has the new certificate."""
        self._end()

    def interrupt(self) -> None:
        """Kill the child: it may be anywhere, and loses nothing."""
        with self._lock:
            self._interrupted = True
            if self._child is not None:
                self._child.kill()

    def close(self) -> None:
        """See `TaskRunner`."""
        self.interrupt()
        self._end()

    def _stop(self, stop: Stop, ended: threading.Event) -> None:
        """Ask the child to end its task; see to it. Must not block: a thread of its own waits."""
        try:
            stop.check()
            expired = False
        except DeadlineExceeded:
            expired = True
        except Withdrawn:
            expired = False
        self._send({"kind": "stop", "expired": expired})
        child = self._child

        def kill_late() -> None:
            if not ended.wait(GRACE_S) and child is not None:
                child.kill()

        threading.Thread(target=kill_late, daemon=True).start()

    def _send(self, request: dict[str, Any]) -> None:
        """A child that has ended is found out by the reply that does not come."""
        child = self._child
        if child is None or child.stdin is None:
            return
        try:
            with self._lock:
                write_frame(child.stdin, json.dumps(request, default=_encoded_message).encode())
        except (OSError, ValueError):
            logger.debug("the child reads no more")

    def _reply(self) -> dict[str, Any] | None:
        """None where the child has ended, or says what is no reply: it is ended then."""
        child = self._child
        assert child is not None
        assert child.stdout is not None
        try:
            data = read_frame(child.stdout, MAX_REPLY_BYTES)
            return None if data is None else dict(json.loads(data))
        except (Corrupt, ValueError) as error:
            logger.warning("not a reply", extra={"reason": str(error)})
            return None

    def _end(self) -> str:
        """Why there is no child any more."""
        with self._lock:
            child, self._child = self._child, None
        if child is None:
            return ""
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                _close(pipe)
        try:
            code = child.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            child.kill()
            code = child.wait()
        return self._why(code)

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


def _close(pipe: Any) -> None:
    try:
        pipe.close()
    except OSError:
        logger.debug("a pipe had bytes that nobody reads")


def write_frame(file: Any, data: bytes) -> None:
    """Write bytes with their length before them."""
    file.write(LENGTH.pack(len(data)) + data)
    file.flush()


def read_frame(file: Any, max_bytes: int) -> bytes | None:
    """The next frame; None at the end of the file."""
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
    """The work document in a request."""
    return pb.Work.FromString(base64.b64decode(request["work"]))


def encoded(result: bytes) -> bytes:
    """A reply with a result."""
    return json.dumps({"result": base64.b64encode(result).decode()}).encode()


def encoded_error(error: Exception) -> bytes:
    """A reply that raises in the parent what was raised in the child."""
    return json.dumps({"error": type(error).__name__, "text": str(error)}).encode()


def _result(reply: dict[str, Any]) -> bytes:
    if "error" not in reply:
        return base64.b64decode(str(reply["result"]))
    name, text = str(reply["error"]), str(reply["text"])
    if name in ENDS:
        raise ENDS[name]
    kind = getattr(errors, name, TriplaneError)
    raise kind(text) if issubclass(kind, TriplaneError) else TriplaneError(text)


ENDS: Final[dict[str, type[Exception]]] = {
    "Withdrawn": Withdrawn,
    "DeadlineExceeded": DeadlineExceeded,
}
