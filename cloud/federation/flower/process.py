"""The cloud's side of a strategy's process: start it, give it one order at a time, end it.

The process is a child of `proto/sandbox.py` with an empty folder of its own and an environment
without the cloud's variables. Standard input and output are its only connection: it has no
database, no key and no other descriptor. The caller always gets an answer or an error: the error
that the strategy raised, or `ChildDied` if the process died or was too slow, after which another
process may continue from the last state.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from triplane.proto.sandbox import (
    ChildLimits,
    SandboxedChild,
    import_environment,
    job_folder,
)

COMMAND: Final = (sys.executable, "-m", "triplane.cloud.federation.flower.child")
PREFIX: Final = "strategy-"
INHERITED: Final = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TZ")
"""Variables of the cloud's environment that an interpreter needs to start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyLimits:
    """Limits of a strategy's process, and `runs`, the number of such processes.

    answer_s: longest time from an order to its answer.
    """

    memory_bytes: int = 4 << 30
    file_bytes: int = 4 << 30
    answer_s: float = 600.0
    runs: int = 8


class StrategyProcess:
    """One process. `start` creates it; `end` must be called."""

    def __init__(
        self, child: SandboxedChild, folder: Path, answer_s: float, on_end: contextlib.ExitStack
    ) -> None:
        self._child, self.folder, self._answer_s = child, folder, answer_s
        self._on_end = on_end

    @classmethod
    async def start(
        cls, folder: Path, order: Mapping[str, Any], limits: StrategyLimits
    ) -> StrategyProcess:
        """Start a process and wait until it has made its strategy. order: see `child`."""
        with contextlib.ExitStack() as stack:
            job = stack.enter_context(job_folder(folder, PREFIX))
            child = await SandboxedChild.start(
                COMMAND,
                name="the strategy's process",
                folder=job,
                environment=_environment(job),
                log_fields={"run_id": str(order["run"])},
            )
            process = cls(child, job, limits.answer_s, stack.pop_all())
        bounds = ChildLimits(
            memory_bytes=limits.memory_bytes,
            file_bytes=limits.file_bytes,
            seconds=round(limits.answer_s),
        )
        try:
            await process.ask({**order, "folder": str(job), "limits": asdict(bounds)})
        # Also when cancelled: nobody else knows this process yet.
        except BaseException:
            await process.end()
            raise
        return process

    async def ask(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to an order. Raises ChildDied, or the error of the strategy."""
        return await self._child.ask(order, timeout_s=self._answer_s)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._child.pid

    async def end(self) -> None:
        """Kill what is left of its group, reap it, and remove its folder."""
        await self._child.end()
        self._on_end.close()


def _environment(job: Path) -> dict[str, str]:
    """Return the environment: imports as here, one thread, Flower's telemetry and updates off."""
    return {
        **{name: os.environ[name] for name in INHERITED if name in os.environ},
        **import_environment(),
        # Libraries write caches and settings; in the job's folder they are removed with it.
        "HOME": str(job),
        "TMPDIR": str(job),
        "FLWR_HOME": str(job),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
    }
