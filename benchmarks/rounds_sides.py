"""What the sides of `rounds.py` have in common: a case, a turn of rounds, a family of processes."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, TextIO

import psutil

START_S: Final = 180.0
STOP_S: Final = 60.0
STEP_S: Final = 0.05
PARTS: Final = ("server", "devices")
"""That a side's figures are of."""
CALLER: Final = "caller"
"""What only begins a run."""
MARK: Final = "TRIPLANE_BENCH_FAMILY"
"""Environment variable by which a family's processes are known, wherever they hang in the tree."""


@dataclass(frozen=True)
class Case:
    """devices in a round; side: of the square matrix that is learnt; target_ms: of a round.

    rounds: of ours in a turn. flower: rounds of the SuperLink in one, 0 to leave it out. masked:
    whether the cloud learns sums of updates only, which Flower's sides do not offer.
    """

    name: str
    devices: int
    side: int
    rounds: int
    target_ms: float
    flower: int = 1
    masked: bool = False

    @property
    def parameter_bytes(self) -> int:
        """Of a dense layer, float32."""
        return 4 * self.side * (self.side + 1)


@dataclass(frozen=True)
class Turn:
    """ms: of each timed round; cpu_ms: per round, by part; rounds: all that were done."""

    ms: list[float]
    cpu_ms: Mapping[str, float]
    rounds: int


class Side(Protocol):
    """A started server with its devices."""

    def turn(self, rounds: int) -> Turn:
        """So many rounds, now."""

    def peak_bytes(self) -> dict[str, int]:
        """The most memory of server and devices so far; see `Family.peak_bytes`."""


@dataclass
class Family:
    """The processes of one side by part; none of them is left when `running` ends."""

    folder: Path
    children: list[subprocess.Popen[str]] = field(default_factory=list)
    _counted: Iterator[int] = field(default_factory=itertools.count)

    def start(
        self, part: str, command: list[Any], environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start a process with pipes for input and output; its errors go to a log."""
        mark = {MARK: f"{part} {self.folder}"}
        with (self.folder / f"{part}-{next(self._counted)}.log").open("wb") as log:
            child = subprocess.Popen(
                [str(word) for word in command],
                env={**os.environ, **(environment or {}), **mark},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                cwd=self.folder, start_new_session=True,
            )  # fmt: skip
        self.children.append(child)
        return child

    def members(self, part: str) -> list[psutil.Process]:
        """All living processes of a part."""
        mark = f"{MARK}={part} {self.folder}".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError, psutil.Error):
                if mark in path.read_bytes().split(b"\0"):
                    found.append(psutil.Process(int(path.parent.name)))
        return found

    def cpu_s(self) -> dict[str, float]:
        """Processor seconds of each part so far, those of its ended children included."""
        return {part: sum(map(_cpu_s, self.members(part))) for part in PARTS}

    def peak_bytes(self) -> dict[str, int]:
        """Sum over the living processes of a part of the most that each had resident."""
        return {part: sum(map(_peak_bytes, self.members(part))) for part in PARTS}

    def lines(self) -> str:
        """The end of each log, for an error."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"{log.name}: {log.read_text(errors='replace')[-1500:]}" for log in logs)

    def end(self) -> None:
        """Ask all to end, then make them; RuntimeError where one is left."""
        for child in self.children:
            child.terminate()
        for child in self.children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.communicate(timeout=5)
        deadline = time.monotonic() + STOP_S
        while left := [process for part in (*PARTS, CALLER) for process in self.members(part)]:
            if time.monotonic() > deadline:
                raise RuntimeError(f"processes are left: {left}")
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.send_signal(signal.SIGKILL)
            for child in self.children:
                child.poll()
            time.sleep(STEP_S)


@dataclass
class Told:
    """A side that is told a number of rounds by a line, and answers with the ms of each."""

    family: Family
    to: TextIO
    answers: TextIO

    def turn(self, rounds: int) -> Turn:
        """See `Side`."""
        before = self.family.cpu_s()
        self.to.write(f"{rounds}\n")
        self.to.flush()
        ms = json.loads(self.answers.readline() or "[]")
        if len(ms) != rounds:
            raise RuntimeError(f"{len(ms)} of {rounds} rounds were done")
        return Turn(ms, per_round(before, self.family.cpu_s(), rounds), rounds)

    def peak_bytes(self) -> dict[str, int]:
        """See `Side`."""
        return self.family.peak_bytes()


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Family]:
    """A family in a new folder; an error carries what its processes logged."""
    folder.mkdir(parents=True)
    family = Family(folder)
    try:
        yield family
    except Exception as error:
        error.add_note(family.lines())
        raise
    finally:
        family.end()


def end_in_order() -> None:
    """SIGTERM ends this process as an error would, so that no child is left."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def free_port() -> int:
    """One that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for_port(port: int, child: subprocess.Popen[str]) -> None:
    """Until somebody listens on it."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and child.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(STEP_S)
    raise RuntimeError(f"nothing listens on {port}")


def per_round(before: Mapping[str, float], after: Mapping[str, float], n: int) -> dict[str, float]:
    """What grew between two readings in seconds, per round and in ms."""
    return {key: 1000 * (after[key] - before.get(key, 0.0)) / n for key in after}


def _cpu_s(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.Error):
        found = process.cpu_times()
        return float(found.user + found.system + found.children_user + found.children_system)
    return 0.0


def _peak_bytes(process: psutil.Process) -> int:
    with contextlib.suppress(OSError, StopIteration):
        status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        line = next(line for line in status if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    return 0
