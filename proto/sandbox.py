"""Child processes within limits: a JSON order on standard input, a JSON answer on standard output.

Each line is one order or one answer: {"done": {...}}, or {"refused": FAMILY, "text": ...} for an
error of `proto.errors`. The parent uses `SandboxedChild`, or `ask_once` for a single order. The
child uses `OrderPipe`, or `serve_order` for a single order.

A child has a session and process group of its own, and no descriptors of its parent besides the
pipes. It applies the order's limits to itself before it opens anything. The parent kills the whole
group if an answer is late. The child kills its own group when its standard input ends, because its
parent is gone then. So the parent always gets an answer or an error: the child's own, or
`ChildDied`, after which another attempt may succeed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from triplane.proto import errors, signals
from triplane.proto.errors import TriplaneError, Unavailable

logger = logging.getLogger(__name__)

MAX_OPEN_FILES: Final = 256
MAX_LINE_BYTES: Final = 16 << 20
"""Largest size of one order or answer."""
MAX_LOGGED_CHARS: Final = 2000
MAX_REASON_CHARS: Final = 2000
GRACE_S: Final = 10
"""From the end of a child's time to the kernel's alarm, if the parent has not killed it."""
ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class ChildDied(Unavailable):
    """The child ended, or was killed, before it answered. status: its exit status, or None."""

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildLimits:
    """Limits that a child applies to itself.

    seconds: time to answer an order. cpu_s: processor time, None for no limit. may_grow: the child
    may raise its memory limit with `allow_memory`, within the limit that the system set.
    """

    memory_bytes: int
    file_bytes: int
    seconds: float
    cpu_s: int | None = None
    open_files: int = MAX_OPEN_FILES
    may_grow: bool = False


# The parent's side.


class SandboxedChild:
    """A running child. `start` creates it; `end` must be called. name: for errors and the log."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        name: str,
        folder: Path | None,
        max_answer_bytes: int,
        log_fields: Mapping[str, object],
    ) -> None:
        self._process, self._name, self._folder = process, name, folder
        self._max_bytes = max_answer_bytes
        self._log_fields = {"child": name, **log_fields}

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        *,
        name: str,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
        max_answer_bytes: int = MAX_LINE_BYTES,
        log_fields: Mapping[str, object] | None = None,
    ) -> SandboxedChild:
        """Start a process. folder: its working folder, in which `stderr` gets its standard error.

        environment: all variables; by default this process's, with numeric libraries on one thread.
        log_fields: fields of the event that is logged if it dies.
        """
        nowhere = contextlib.nullcontext(subprocess.DEVNULL)
        with (folder / "stderr").open("wb") if folder else nowhere as stderr:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                # A group of its own, so that `end` also kills processes that the child has started.
                start_new_session=True,
                cwd=folder,
                env={**os.environ, **import_environment()} if environment is None else environment,
                limit=max_answer_bytes,
            )
        return cls(process, name, folder, max_answer_bytes, log_fields or {})

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    async def ask(self, order: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """Return the child's answer. Raises the child's error, or ChildDied."""
        try:
            async with asyncio.timeout(timeout_s):
                line = await self._exchange(json.dumps(order).encode() + b"\n")
                if not line.endswith(b"\n"):  # it may have closed its output and still be running
                    await self._process.wait()
        except TimeoutError:
            await self.end()
            raise ChildDied(
                f"{self._name} was killed: it took longer than {timeout_s:g} s"
            ) from None
        if not line.endswith(b"\n"):
            raise self._death()
        return _answer(line, self._name)

    async def _exchange(self, order: bytes) -> bytes:
        """Write the order and read a line. Standard input stays open: its end kills the child."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(ConnectionError):  # it died before it read; its answer is empty
            self._process.stdin.write(order)
            await self._process.stdin.drain()
        try:
            return await self._process.stdout.readline()
        except ValueError:
            raise Unavailable(
                f"{self._name} answered with more than {self._max_bytes} bytes"
            ) from None

    def _death(self) -> ChildDied:
        status = self._process.returncode
        tail = _tail(self._folder / "stderr") if self._folder else ""
        logger.error("child died", extra={**self._log_fields, "status": status, "stderr": tail})
        last = tail.strip().splitlines()[-1:] or ["it printed nothing"]
        return ChildDied(f"{self._name} {ended_by(status)}: {last[0][:MAX_REASON_CHARS]}", status)

    async def end(self) -> None:
        """Kill what is left of the child's group and reap it, even if cancelled meanwhile."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        if self._process.stdin is not None:
            self._process.stdin.close()
        # Shielded: a cancelled caller still reaps the child, which otherwise stays a zombie.
        await asyncio.shield(self._process.wait())


async def ask_once(
    command: Sequence[str], order: Mapping[str, Any], limits: ChildLimits, **options: Any
) -> dict[str, Any]:
    """Start a child for a single order; return its answer. options: see `SandboxedChild.start`."""
    child = await SandboxedChild.start(command, **options)
    try:
        return await child.ask({**order, "limits": asdict(limits)}, timeout_s=limits.seconds)
    finally:
        await child.end()


@contextlib.contextmanager
def job_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """Make an empty folder for a child, and remove it when the block ends."""
    try:
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    except OSError as error:
        raise Unavailable(f"no room for a child process in {parent}: {error}") from error
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def remove_job_folders(parent: Path, prefix: str) -> None:
    """Make `parent`, and remove the folders that an earlier process left in it."""
    parent.mkdir(parents=True, exist_ok=True)
    for left in parent.glob(f"{prefix}*"):
        shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def expected(name: str) -> Iterator[None]:
    """Raise Unavailable if reading an answer in the block fails: the answer is invalid."""
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:
        raise Unavailable(f"{name} gave no valid answer: {error!r:.200}") from error


def import_environment() -> dict[str, str]:
    """Return the variables with which a child imports what this process does, on one thread."""
    return {**ONE_THREAD, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def ended_by(status: int | None) -> str:
    """Describe an exit status: "ended with status 3", "was ended by signal 9 (SIGKILL)"."""
    if status is None or status >= 0:
        return f"ended with status {status}"
    return f"was ended by signal {-status} ({signal.Signals(-status).name})"


def _tail(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_bytes()[-MAX_LOGGED_CHARS:].decode(errors="replace")
    return ""


def _answer(line: bytes, name: str) -> dict[str, Any]:
    with expected(name):
        answer = json.loads(line)
        if "refused" not in answer:
            return dict(answer["done"])
        # The child may run hostile input, so its answer may only select one of the families.
        family = getattr(errors, str(answer["refused"]), None)
        text = str(answer["text"])[:MAX_REASON_CHARS]
    if not (isinstance(family, type) and issubclass(family, TriplaneError)):
        family = TriplaneError
    raise family(text)


# The child's side.

Work = Callable[[dict[str, Any]], dict[str, Any]]
"""Does an order and returns the answer."""


def serve_order(work: Mapping[str, Work]) -> None:
    """Do the one order of this process. Its field `do` is the key in `work`."""
    signals.restore_defaults()
    pipe = OrderPipe()
    order = pipe.begin()
    try:
        pipe.answer(work[order["do"]](order))
    except MemoryError:
        most = order["limits"]["memory_bytes"] >> 20
        pipe.refuse(Unavailable(f"it needs more than its memory limit of {most} MiB"))
    except TriplaneError as error:
        pipe.refuse(error)


class OrderPipe:
    """Reads orders and writes answers. The time limit holds from an order to its answer."""

    def __init__(self) -> None:
        self._answers: BinaryIO = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)  # whatever a library or a user's code prints goes to standard error
        self._seconds = 0.0

    def begin(self) -> dict[str, Any]:
        """Read the first order and apply its limits."""
        order = self._read()
        threading.Thread(target=end_with_parent, daemon=True).start()
        limits = ChildLimits(**order["limits"])
        self._seconds = limits.seconds
        limit_process(limits)
        return order

    def next(self) -> dict[str, Any]:
        """Read the next order; the time spent waiting for it is not limited."""
        signal.alarm(0)
        order = self._read()
        _alarm(self._seconds)
        return order

    def answer(self, answer: Mapping[str, Any]) -> None:
        """Answer the current order."""
        self._write({"done": answer})

    def refuse(self, error: TriplaneError) -> None:
        """Answer the current order with an error, which is raised in the parent."""
        self._write({"refused": type(error).__name__, "text": str(error)[:MAX_REASON_CHARS]})

    def _write(self, record: Mapping[str, Any]) -> None:
        self._answers.write(json.dumps(record).encode() + b"\n")
        self._answers.flush()

    def _read(self) -> dict[str, Any]:
        line = sys.stdin.buffer.readline(MAX_LINE_BYTES)
        # End of input: the parent is gone, and nobody would read an answer.
        if not line:
            os.killpg(0, signal.SIGKILL)
        order: dict[str, Any] = json.loads(line)
        return order


def end_with_parent() -> None:
    """Wait until the parent has closed standard input, then kill this process group."""
    poll = select.poll()
    # No events are asked for: poll reports a hang-up anyway, and this thread must not react to
    # orders, which the main thread reads.
    poll.register(0, 0)
    poll.poll()
    os.killpg(0, signal.SIGKILL)


def limit_process(limits: ChildLimits) -> None:
    """Apply limits to this process.

    Mapped files do not count as memory, allocations do. `seconds` becomes the kernel's alarm, which
    also ends code that holds the interpreter after the parent is gone. It is not RLIMIT_CPU: with
    that limit Linux counts processor time in ticks, which are too coarse to measure by.
    """
    _alarm(limits.seconds)
    most = resource.RLIM_INFINITY if limits.may_grow else None
    set_limit(resource.RLIMIT_DATA, limits.memory_bytes, most)
    set_limit(resource.RLIMIT_FSIZE, limits.file_bytes)
    set_limit(resource.RLIMIT_NOFILE, limits.open_files)
    set_limit(resource.RLIMIT_CORE, 0)
    if (cpu_s := limits.cpu_s) is not None:
        set_limit(resource.RLIMIT_CPU, cpu_s, cpu_s + 1)  # SIGXCPU first, which the parent sees


def set_limit(kind: int, soft: int, hard: int | None = None) -> None:
    """Set a resource limit of this process, but never above the limit that the system set."""
    most = resource.getrlimit(kind)[1]
    limits = soft, soft if hard is None else hard
    # Raising a hard limit needs a privilege; asking for more than the system allows would fail.
    soft, hard = (min(limit, most, key=_size) for limit in limits)
    resource.setrlimit(kind, (soft, hard))


def _size(limit: int) -> float:
    return math.inf if limit == resource.RLIM_INFINITY else limit


def allow_memory(more_bytes: int) -> None:
    """Raise the memory limit of this process, whose `ChildLimits.may_grow` must be set."""
    soft = resource.getrlimit(resource.RLIMIT_DATA)[0]
    if soft != resource.RLIM_INFINITY:
        set_limit(resource.RLIMIT_DATA, soft + more_bytes, resource.RLIM_INFINITY)


def _alarm(seconds: float) -> None:
    signal.alarm(math.ceil(seconds) + GRACE_S)
