"""The devices of `rounds.py`: one process that is many of them, each with a stream of its own.

    python benchmarks/rounds_devices.py FOLDER FIRST LAST

A device fetches the state of its task, keeps the same small change of every number on its disk,
sends it and says so, and settles it when it is told what became of it; only learning is left out.
A line of standard input is a number: tasks of rounds up to it are answered. The first task beyond
it is answered by a line of JSON: seconds spent so far, over all devices, in fetching, encoding,
uploading, waiting for the acknowledgement, and settling. The end of the input ends the process.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from triplane.device.memory import UNSYNCED, Facts, Memory, Pending
from triplane.proto import federation_pb2 as pb
from triplane.proto.channels import connect, connect_aio
from triplane.proto.errors import TriplaneError
from triplane.proto.identity import IdentityFolder
from triplane.proto.stream import SessionClient
from triplane.proto.transfer import BlobFolder, download, upload
from triplane.unified_ir.federated.core.files import (
    encode_update,
    like_of,
    read_state,
    write_update,
)
from triplane.unified_ir.runtime.plan import Plan

STEP = 2.0**-10
"""A change of zero would leave every round the same state, which then is neither written nor sent.
"""
SPENT: defaultdict[str, float] = defaultdict(float)


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


class Device:
    """One device. It learns nothing, and does the rest as a device does."""

    def __init__(self, folder: Path, gate: Gate) -> None:
        self._folder, self._identity, self._gate = folder, IdentityFolder(folder), gate
        self._channel: grpc.Channel | None = None
        self._blobs = BlobFolder(folder / "blobs")
        self._states = BlobFolder(folder / "blobs", UNSYNCED)
        self._digests: dict[bytes, str] = {}
        for name in ("personal", "pending"):
            (folder / name).mkdir(exist_ok=True)
        self._memory = Memory(folder / "personal", folder / "pending")
        self._asked: asyncio.Queue[pb.Work] = asyncio.Queue()
        self._client = SessionClient(
            lambda: connect_aio(self._identity), self._asked.put, greeting=self._offer
        )

    def _offer(self) -> pb.Offer:
        return pb.Offer(population="bench", examples=1, held_out=1)

    async def live(self) -> None:
        """Until cancelled."""
        session = asyncio.create_task(self._client.run())
        done: set[bytes] = set()
        try:
            while True:
                work = await self._asked.get()
                await asyncio.to_thread(self._settle, work)
                for task in work.tasks:
                    if task.lease not in done:
                        done.add(task.lease)
                        await self._gate.passed(task.round)
                        await self._do(task)
        finally:
            session.cancel()
            await asyncio.gather(session, return_exceptions=True)

    def _settle(self, work: pb.Work) -> None:
        """As `device.client.settle`: before the next task, since that implies what counted."""
        started_s = time.perf_counter()
        told = {(s.run, s.lease.hex()): s.counted for s in work.settled}
        going_on = {task.lease.hex() for task in work.tasks}
        for pending in self._memory.pending():
            run, lease = pending.facts.run, pending.facts.lease
            counted = told.get((run, lease))
            if counted is not None or lease not in going_on:
                self._memory.settle(pending, counted=bool(counted))
        SPENT["settle"] += time.perf_counter() - started_s

    async def _do(self, task: pb.Task) -> None:
        try:
            told = await asyncio.to_thread(self._done, task)
        except TriplaneError as error:  # its round is over, or its run
            print(error, file=sys.stderr)
            return
        started_s = time.perf_counter()
        await self._client.send(told)
        SPENT["acknowledge"] += time.perf_counter() - started_s

    def _done(self, task: pb.Task) -> pb.Contribution:
        told = pb.Contribution(run=task.run, round=task.round, lease=task.lease)
        if task.WhichOneof("work") == "evaluate":
            told.score.CopyFrom(pb.Score(samples=1, before=0.5, after=0.5))
            return told
        if self._channel is None:
            self._channel = connect(self._identity)
        marks = [time.perf_counter()]
        state = self._state(self._channel, task)
        marks.append(time.perf_counter())
        pending = self._kept(task, state)
        marks.append(time.perf_counter())
        data = self._memory.inline_of(pending, task.inline_bytes) if task.inline_bytes else None
        if data is None:
            path = self._memory.bytes_of(pending)
            blob = pb.Blob(sha256=upload(self._channel, path), size=path.stat().st_size)
            SPENT["upload"] += time.perf_counter() - marks[-1]
        else:
            blob = pb.Blob(sha256=hashlib.sha256(data).digest(), size=len(data))
        for part, before, after in zip(("fetch", "encode"), marks, marks[1:], strict=False):
            SPENT[part] += after - before
        told.update.CopyFrom(
            pb.Update(blob=blob, examples=1, loss=0.5, seconds=0.0, inline=data or b"")
        )
        return told

    def _kept(self, task: pb.Task, state: dict[str, Any]) -> Pending:
        """An update that implies nothing, held as a device does; see `Desk._written`."""
        lease = task.lease.hex()
        facts = Facts(
            run=task.run, round=task.round, lease=lease, examples=1, loss=0.5, seconds=0.0
        )  # fmt: skip
        like = like_of(state)
        change = {n: np.full(shape, STEP, dtype) for n, (dtype, shape) in like.items()}
        options: dict[str, Any] = {
            "run": task.run, "round": task.round, "lease": lease, "compression": "", "keep": 1.0,
            "seed": 0, "remainder": self._memory.personal(task.run).remainder,
        }  # fmt: skip
        if sum(x.nbytes for x in state.values()) <= task.inline_bytes:
            data, _ = encode_update(change, **options)
            return self._memory.hold(facts, data)
        path = self._folder / "pending" / f"{task.run}.new"
        write_update(path, change, disk=UNSYNCED, **options)
        return self._memory.hold(facts, path)

    def _state(self, channel: grpc.Channel, task: pb.Task) -> dict[str, Any]:
        sha256 = task.plan.sha256
        if sha256 not in self._digests:
            path = download(channel, sha256, task.plan.size, self._blobs)
            self._digests[sha256] = Plan.load(path).digest
        if task.inline_state:
            return read_state(Path("state"), plan=self._digests[sha256], data=task.inline_state)
        path = download(channel, task.state.sha256, task.state.size, self._states)
        state = read_state(path, plan=self._digests[sha256], verified=True)
        self._blobs.remove(task.state.sha256)
        return state


async def main() -> None:
    """Be the devices until the standard input ends."""
    folder, first, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    gate = Gate()
    tasks = [asyncio.create_task(Device(folder / str(n), gate).live()) for n in range(first, last)]
    await gate.follow()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(main())
