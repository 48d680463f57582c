"""The devices of `rounds.py`: one process that is many of them, each with a stream of its own.

    python benchmarks/rounds_devices.py FOLDER FIRST LAST

A device fetches the state of its task, sends the same small change of every number and says so;
only learning is left out. A line of standard input is a number: tasks of rounds up to it are
answered. The first task beyond it is answered by a line of JSON: seconds spent so far, over all
devices, in fetching, encoding, uploading, and waiting for the acknowledgement. The end of the input
ends the process.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from triplane.device.desk import Unsynced
from triplane.device.memory import Facts, Memory, Personal
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
        self._states = BlobFolder(folder / "blobs", Unsynced())
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
                for task in (await self._asked.get()).tasks:
                    if task.lease not in done:
                        done.add(task.lease)
                        await self._gate.passed(task.round)
                        await self._do(task)
        finally:
            session.cancel()
            await asyncio.gather(session, return_exceptions=True)

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
        if sum(x.nbytes for x in state.values()) <= task.inline_bytes:
            data = self._kept(task, state)
            SPENT["fetch"] += marks[1] - marks[0]
            SPENT["encode"] += time.perf_counter() - marks[1]
            blob = pb.Blob(sha256=hashlib.sha256(data).digest(), size=len(data))
            told.update.CopyFrom(pb.Update(blob=blob, examples=1, loss=0.5, inline=data))
            return told
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            path = Path(folder) / "update"
            like = like_of(state)
            change = {n: np.full(shape, STEP, dtype) for n, (dtype, shape) in like.items()}
            write_update(
                path, change, run=task.run, round=task.round, lease=task.lease.hex(),
                compression="", keep=1.0, seed=0,
            )  # fmt: skip
            marks.append(time.perf_counter())
            blob = pb.Blob(sha256=upload(self._channel, path), size=path.stat().st_size)
        marks.append(time.perf_counter())
        for part, before, after in zip(
            ("fetch", "encode", "upload"), marks, marks[1:], strict=False
        ):
            SPENT[part] += after - before
        told.update.CopyFrom(pb.Update(blob=blob, examples=1, loss=0.5, seconds=0.0))
        return told

    def _kept(self, task: pb.Task, state: dict[str, Any]) -> bytes:
        """A small update, on our disk before it leaves, as a device keeps it."""
        like = like_of(state)
        change = {n: np.full(shape, STEP, dtype) for n, (dtype, shape) in like.items()}
        data, lost = encode_update(
            change, run=task.run, round=task.round, lease=task.lease.hex(), compression="",
            keep=1.0, seed=0,
        )  # fmt: skip
        facts = Facts(
            run=task.run, round=task.round, lease=task.lease.hex(), examples=1, loss=0.5,
            seconds=0.0,
        )  # fmt: skip
        self._memory.keep(facts, data, Personal({}, lost))
        return data

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
