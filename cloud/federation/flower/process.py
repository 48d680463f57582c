"""The cloud's side of a strategy's process: begun, asked one thing at a time, ended.

The process has a session (and process group) of its own, an empty folder that goes with it, limits
of memory, files and time, and an environment in which nothing of the cloud's stands. Its standard
input and output are all that connects it: no database, no key, no other descriptor. Whatever
happens to it, whoever asks gets an answer or a family of errors: what the strategy refused or
raised as it told it, `Unavailable` where the process died or was too slow.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from triplane.proto import errors
from triplane.proto.errors import TriplaneError, Unavailable

logger = logging.getLogger(__name__)

COMMAND: Final = (sys.executable, "-m", "triplane.cloud.federation.flower.child")
MAX_LINE_BYTES: Final = 16 << 20
"""Of one order or answer: names and paths of `spec.MAX_DEVICES` devices."""
MAX_LOGGED_CHARS: Final = 2000
MAX_REASON_CHARS: Final = 2000
PREFIX: Final = "strategy-"
KEPT: Final = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TZ")
"""Of the cloud's environment: what an interpreter needs to start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyLimits:
    """Of one strategy's process, and how many runs have one. answer_s: from order to answer."""

    memory_bytes: int = 4 << 30
    file_bytes: int = 4 << 30
    answer_s: float = 600.0
    runs: int = 8


class Died(Unavailable):
    """The process is no more, so another may be begun from the last state."""


class StrategyProcess:
    """One process; `start` makes it, `end` must be called."""

    def __init__(
        self, child: asyncio.subprocess.Process, folder: Path, limits: StrategyLimits, run: str
    ) -> None:
        self._child, self.folder, self._limits, self._run = child, folder, limits, run

    @classmethod
    async def start(
        cls, folder: Path, order: Mapping[str, Any], limits: StrategyLimits
    ) -> StrategyProcess:
        """Begin one and wait until its strategy stands. order: see `child.py`."""
        try:
            job = Path(tempfile.mkdtemp(prefix=PREFIX, dir=folder))
        except OSError as error:
            raise Unavailable(f"no room for a strategy in {folder}: {error}") from error
        with (job / "stderr").open("wb") as stderr:
            child = await asyncio.create_subprocess_exec(
                *COMMAND,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
                cwd=job,
                env=_environment(job),
                limit=MAX_LINE_BYTES,
            )
        made = cls(child, job, limits, str(order["run"]))
        try:
            bounds = {"memory_bytes": limits.memory_bytes, "file_bytes": limits.file_bytes}
            bounds["seconds"] = round(limits.answer_s)
            await made.ask({**order, "folder": str(job), "limits": bounds})
        except BaseException:
            await made.end()
            raise
        return made

    async def ask(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Its answer to an order. Died; or the family of what the strategy refused."""
        try:
            async with asyncio.timeout(self._limits.answer_s):
                line = await self._exchanged(json.dumps(order).encode() + b"\n")
        except TimeoutError:
            await self.end()
            raise Died(
                f"the strategy was ended: it took longer than {self._limits.answer_s:g} s"
            ) from None
        if not line.endswith(b"\n"):
            raise await self._died()
        return _answer(line)

    async def _exchanged(self, line: bytes) -> bytes:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        with contextlib.suppress(ConnectionError):  # it died before it read; its answer is empty
            self._child.stdin.write(line)
            await self._child.stdin.drain()
        try:
            return await self._child.stdout.readline()
        except ValueError:
            raise Unavailable(f"a strategy says at most {MAX_LINE_BYTES} bytes at once") from None

    async def _died(self) -> Died:
        await self._child.wait()
        status, tail = self._child.returncode, _tail(self.folder / "stderr")
        logger.warning(
            "strategy died", extra={"run_id": self._run, "status": status, "stderr": tail}
        )
        last = tail.strip().splitlines()[-1:] or ["it said nothing"]
        return Died(f"the strategy's process {_ending(status)}: {last[0][:MAX_REASON_CHARS]}")

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._child.pid

    async def end(self) -> None:
        """Kill what is left of its group, reap it, and remove its folder."""
        if self._child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)
        if self._child.stdin is not None:
            self._child.stdin.close()
        await asyncio.shield(self._child.wait())
        shutil.rmtree(self.folder, ignore_errors=True)


def forget_left(folder: Path) -> None:
    """Remove what the processes of an earlier cloud left."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f"{PREFIX}*"):
        shutil.rmtree(left, ignore_errors=True)


def _environment(job: Path) -> dict[str, str]:
    """Imports as here, one thread, Flower's telemetry and update check off; nothing else."""
    return {
        **{name: os.environ[name] for name in KEPT if name in os.environ},
        "HOME": str(job),
        "TMPDIR": str(job),
        "FLWR_HOME": str(job),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }


def _ending(status: int | None) -> str:
    if status is None or status >= 0:
        return f"ended with status {status}"
    return f"was ended by signal {-status} ({signal.Signals(-status).name})"


def _tail(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_bytes()[-MAX_LOGGED_CHARS:].decode(errors="replace")
    return ""


def _answer(line: bytes) -> dict[str, Any]:
    try:
        told = json.loads(line)
        done = None if "refused" in told else dict(told["done"])
    except (ValueError, TypeError, KeyError) as error:
        raise Unavailable(f"what the strategy said is no answer: {error!r:.200}") from error
    if done is None:
        raise _refusal(told)
    return done


def _refusal(told: Mapping[str, Any]) -> TriplaneError:
    family = getattr(errors, str(told["refused"]), None)
    if not (isinstance(family, type) and issubclass(family, TriplaneError)):
        family = TriplaneError
    return family(str(told["text"])[:MAX_REASON_CHARS])
