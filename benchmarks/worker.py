"""One side of a comparison as a process: it makes ready, then steps when told to.

Commands and replies are JSON, one per line, on standard input and output. Both sides run this same
loop, each in its own interpreter, so that a harness can let them take turns within one run.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Protocol

import networks

POOL: Final = 20
"""Batches made beforehand and repeated, so that making them is not measured."""

Step = Callable[[networks.Array, networks.Array], float]
Side = Callable[[Any], tuple[Step, dict[str, Any]]]


class Source(Protocol):
    """A module that names cases and makes their batches."""

    CASES: Mapping[str, Any]

    def batches(self, case: Any) -> Iterator[tuple[networks.Array, networks.Array]]:
        """Endless batches of a case."""
        ...


def serve(
    side: Side,
    source: Source | ModuleType = networks,
    peak: Callable[[], int] | None = None,
) -> None:
    """Answers `{"do": "start" | "run" | "report", ...}` until standard input ends.

    peak: the largest memory in use so far, by default that of this process.
    """
    step: Step | None = None
    before = peak_bytes()
    pool: Any = None
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "start":
            case = source.CASES[order["case"]]
            pool = itertools.cycle(list(itertools.islice(source.batches(case), POOL)))
            step, reply = side(case)
        elif order["do"] == "run":
            assert step is not None
            reply = _run(step, pool, order["steps"])
        else:
            reply = {"peak_bytes": (peak or peak_bytes)(), "growth_bytes": peak_bytes() - before}
        print(json.dumps(reply), flush=True)


def threads() -> int:
    """For one operator: what the harness set for every library."""
    return int(os.environ.get("OMP_NUM_THREADS", "1"))


def one_processor_per_thread() -> None:
    """Leave this process as many processors as it has threads.

    For libraries that start a thread for each processor: onnxsim's onnxruntime, and XLA.
    """
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: threads()])


def peak_bytes() -> int:
    """Largest resident memory of this process; getrusage would count its parent's before exec."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def _run(step: Step, pool: Any, steps: int) -> dict[str, Any]:
    batches = [next(pool) for _ in range(steps)]
    wall, cpu = time.perf_counter(), time.process_time()
    losses = [step(*batch) for batch in batches]
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return {"cpu_s": cpu / steps, "wall_s": wall / steps, "losses": losses}
