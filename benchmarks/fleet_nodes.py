"""The nodes of `fleet.py`: one process that lives as many of them, each with a stream of its own.

    python benchmarks/fleet_nodes.py FOLDER ADDRESS FIRST LAST SEED

A node reports, does at once whatever it is told, and says so; only the work is left out. Nodes
whose number ends in 0, 1 or 2 are away at first. The process goes on at each line of its standard
input and writes one word per stage: ready, reported, committed, all, lost, back.
"""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

from triplane.proto import fleet_pb2 as pb
from triplane.proto.channels import connect_aio
from triplane.proto.identity import IdentityFolder
from triplane.proto.stream import SessionClient

AWAY_DIGITS = frozenset("012")
CAPABILITY = pb.Capability(
    runtime="onnxruntime", runtime_version="99", max_opset=26, targets=["ort-x64"],
    instructions=["avx2", "avx512_vnni", "fma"], memory_bytes=8 << 30,
)  # fmt: skip


def is_away(number: int) -> bool:
    """Whether the node comes only after the others have committed."""
    return str(number)[-1] in AWAY_DIGITS


class Crowd:
    """The nodes of this process. reported, committed: whose reports the cloud has acknowledged."""

    def __init__(self, folder: Path, address: str, seed: int) -> None:
        self._folder, self._address, self._seed = folder, address, seed
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.reported: set[int] = set()
        self.committed: set[int] = set()

    def wake(self, numbers: list[int]) -> None:
        """Have these nodes begin."""
        self._tasks += [asyncio.create_task(self._live(number)) for number in numbers]

    async def until(self, names: list[int], among: set[int]) -> None:
        """Wait until all of these are in the set. Raises what ended a node."""
        while not among.issuperset(names):
            self._changed.clear()
            await self._changed.wait()
            for task in self._tasks:
                if task.done():
                    task.result()

    async def sleep(self) -> None:
        """End every node."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _live(self, number: int) -> None:
        identity = IdentityFolder(self._folder / f"{number}")
        told: asyncio.Queue[pb.Desired] = asyncio.Queue()
        client = SessionClient(
            lambda: connect_aio(identity, address=self._address),
            told.put,
            rng=random.Random(self._seed + number).random,
        )
        running = asyncio.create_task(client.run())
        try:
            await client.send(pb.Report(capability=CAPABILITY))
            while True:
                self.reported.add(number)
                self._changed.set()
                desired = await told.get()
                await client.send(obeyed(desired))
                if desired.assignments:
                    self.committed.add(number)
        finally:
            self._changed.set()
            running.cancel()


def obeyed(desired: pb.Desired) -> pb.Report:
    """What a node says that has done what it was told."""
    report = pb.Report(capability=CAPABILITY, desired_number=desired.number)
    for wanted in desired.assignments:
        report.models.add(
            model=wanted.model, version=wanted.version, attempt=wanted.attempt,
            state=pb.COMMITTED, committed_version=wanted.version,
        )  # fmt: skip
    return report


async def told(word: str) -> None:
    """Say the word, then wait for a line."""
    say(word)
    await asyncio.to_thread(sys.stdin.readline)


def say(word: str) -> None:
    """A line of its own."""
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


async def live(folder: Path, address: str, first: int, last: int, seed: int) -> None:
    """The stages, one after another."""
    mine = list(range(first, last))
    there = [number for number in mine if not is_away(number)]
    crowd = Crowd(folder, address, seed)
    await told("ready")
    crowd.wake(there)
    await crowd.until(there, crowd.reported)
    say("reported")
    await crowd.until(there, crowd.committed)
    await told("committed")
    crowd.wake([number for number in mine if is_away(number)])
    await crowd.until(mine, crowd.committed)
    await told("all")
    crowd.reported.clear()
    say("lost")
    await crowd.until(mine, crowd.reported)
    await told("back")
    await crowd.sleep()


if __name__ == "__main__":
    folder, address, first, last, seed = sys.argv[1:]
    asyncio.run(live(Path(folder), address, int(first), int(last), int(seed)))
