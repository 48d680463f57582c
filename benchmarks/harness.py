"""Ratios between two sides that take turns within one run, with quartiles and an A/A control.

Each side is a process of its own interpreter that steps on command. One round lets every worker run
the same number of steps; a ratio is the median over rounds, so slow drifts of the machine cancel.
CPU time decides, wall time stands beside it: other work on the machine disturbs the former less.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np

from triplane.proto.errors import NotFound

ROOT: Final = Path(__file__).parents[1]
THREADS: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def peer(variable: str = "TRIPLANE_PEERS", made: str = ".venv-peers") -> str:
    """A rival's interpreter: what the variable names, else what `make peers` made.

    TRIPLANE_PEERS has PyTorch; TRIPLANE_PEERS_JAX, _ONNXSIM and _MINDSPORE what they say,
    _FLOWER_SIMULATION Flower with Ray, _RECORDS_ARROW and so on the formats of `records.py`.
    """
    found = Path(os.environ.get(variable) or ROOT / made / "bin" / "python")
    if not found.exists():
        raise NotFound(
            f"no peers' interpreter at {found}; run `make peers`, or set {variable} to a "
            "python that has the matching benchmarks/requirements-*.txt installed"
        )
    return str(found)


class Worker:
    """A side's process; `ask` sends one command and waits for its answer."""

    def __init__(self, script: str, *, python: str = sys.executable, threads: int = 1) -> None:
        self._process = subprocess.Popen(
            [python, "-W", "ignore", Path(__file__).with_name(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **dict.fromkeys(THREADS, str(threads))},
        )

    def ask(self, do: str, **more: Any) -> dict[str, Any]:
        """The reply to a command."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do, **more}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise NotFound(f"a benchmark side ended with status {self._process.wait()}")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.communicate()


@dataclass(frozen=True)
class Ratio:
    """Median and quartiles of a ratio over rounds."""

    median: float
    q1: float
    q3: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.q1:.2f}-{self.q3:.2f})"


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """`ours / theirs` round by round."""
    quotients = np.asarray(ours) / np.asarray(theirs)
    q1, median, q3 = np.percentile(quotients, [25, 50, 75])
    return Ratio(float(median), float(q1), float(q3))


def take_turns(
    workers: Mapping[str, Worker],
    *,
    steps: int,
    rounds: int,
    keys: Sequence[str] = ("cpu_s", "wall_s"),
) -> dict[str, Any]:
    """CPU and wall seconds per step of each worker by round; the order rotates each round."""
    names = list(workers)
    found: dict[str, Any] = {n: {key: [] for key in keys} for n in names}
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            reply = workers[name].ask("run", steps=steps)
            for key, column in found[name].items():
                column.append(reply[key])
    return found


def machine() -> dict[str, str]:
    """What the figures were taken on."""
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return {
        "processor": f"{cpu}, {os.cpu_count()} cores",
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
    }


def table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(str(c) for c in line) + " |" for line in lines)
