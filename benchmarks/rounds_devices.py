"""The devices of `rounds.py`: one process that is many of them, each with a stream of its own.

    python benchmarks/rounds_devices.py FOLDER FIRST LAST

Each is a `FederatedClient` on a home of its own, with all that it does for a task: fetching, plan
and state, the model that it keeps, writing, sending, acknowledgement and settlement. Only the
steps of learning and scoring are left out: an update changes every number by the same amount.
A line of standard input is a number: tasks of rounds up to it are answered. The first task beyond
it is answered by a line of JSON: seconds spent so far, over all devices, in each part of `PARTS`.
The end of the input ends the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, Final

import numpy as np

from triplane.device import client, task_runner
from triplane.device.client import FederatedClient
from triplane.device.stopping import StopToken
from triplane.device.task_runner import TaskRunner
from triplane.device.tasks import Task, WorkSet
from triplane.proto import federation_pb2 as pb
from triplane.unified_ir.federated.core.draws import Array
from triplane.unified_ir.federated.core.learn import Learned, Learner, Shard, Work
from triplane.unified_ir.runtime.plan import Plan

POPULATION: Final = "bench"
STEP: Final = 2.0**-10
"""A change of zero would leave every round the same state, which then is neither written nor sent.
"""
PARTS: Final = (
    (TaskRunner, "_fetch", "fetch"),
    (TaskRunner, "_assign", "fetch"),
    (TaskRunner, "_adopt_unmeasured", "model"),
    (TaskRunner, "_written", "encode"),
    (TaskRunner, "_contribution_of", "upload"),
    (TaskRunner, "settle", "settle"),
)
"""Methods whose time is added up, with the name of the part."""
SPENT: defaultdict[str, float] = defaultdict(float)
UNLEARNED: Final = Shard(
    {"x": np.zeros((1, 1), np.float32), "y": np.zeros(1, np.int64)},
    {"x": np.zeros((1, 1), np.float32), "y": np.zeros(1, np.int64)},
)
"""Samples that no step looks at."""


class Gate:
    """Holds back the tasks of rounds beyond `limit`."""

    def __init__(self) -> None:
        self._limit = 0
        self._told = False
        self._raised = asyncio.Event()

    async def passed(self, number: int) -> None:
        """When the tasks of that round may be answered."""
        while number > self._limit:
            if not self._told:
                self._told = True
                print(json.dumps(SPENT), flush=True)
            await self._raised.wait()

    async def follow(self) -> None:
        """Raise the limit to each line of standard input, until it ends."""
        while line := await asyncio.to_thread(sys.stdin.readline):
            self._limit, self._told = int(line), False
            raised, self._raised = self._raised, asyncio.Event()
            raised.set()


@contextlib.contextmanager
def spending(part: str) -> Iterator[None]:
    """Add the time of the block to that of the part."""
    started_s = time.perf_counter()
    try:
        yield
    finally:
        SPENT[part] += time.perf_counter() - started_s


def timed(part: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, its time added to that of the part."""

    @wraps(call)
    def timing(*args: Any, **named: Any) -> Any:
        with spending(part):
            return call(*args, **named)

    return timing


def unlearned(
    _plan: Learner, _work: Work, _shard: Shard, start: Callable[[], Mapping[str, Array]]
) -> Learned:
    """In place of `learn`: opens the state once more, as that does."""
    return Learned({name: np.full_like(x, STEP) for name, x in start().items()}, 1, 0.5)


def unscored(_runner: TaskRunner, _plan: Plan, task: Task, _stop: StopToken) -> pb.Contribution:
    """In place of `TaskRunner.score`."""
    work, lease = task.work, bytes.fromhex(task.lease)
    score = pb.Score(samples=1, before=0.5, after=0.5)
    return pb.Contribution(run=work.run, round=work.round, lease=lease, score=score)


def prepare(gate: Gate) -> None:
    """Leave learning out, hold tasks back, and put clocks around the rest."""
    working: Any = client._Working  # noqa: SLF001 -- the benchmark replaces parts of it
    names = ("_do", "_contribute")
    do, contribute = (getattr(working, name) for name in names)

    async def gated(self: Any, task: Task, work_set: WorkSet) -> pb.Contribution:
        await gate.passed(task.work.round)
        found: pb.Contribution = await do(self, task, work_set)
        return found

    async def acknowledged(self: Any, key: str, contribution: pb.Contribution) -> None:
        with spending("acknowledge"):
            await contribute(self, key, contribution)

    for name, method in zip(names, (gated, acknowledged), strict=True):
        setattr(working, name, method)
    module: Any = task_runner
    module.learn, module.check_labels = unlearned, lambda _plan, _shard: None
    setattr(TaskRunner, "score", unscored)  # noqa: B010 -- mypy refuses the assignment
    for owner, name, part in PARTS:
        setattr(owner, name, timed(part, getattr(owner, name)))


async def main() -> None:
    """Be the devices until the standard input ends."""
    folder, first, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    gate = Gate()
    prepare(gate)
    devices = [
        FederatedClient(folder / str(n), UNLEARNED, population=POPULATION)
        for n in range(first, last)
    ]
    tasks = [asyncio.create_task(device.serve()) for device in devices]
    await gate.follow()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(main())
