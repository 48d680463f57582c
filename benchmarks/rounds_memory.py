"""The cloud's memory over the devices of a round, with a thousand of them there on streams.

    python benchmarks/rounds_memory.py --keep FILE      # a line of JSON for each size of update
    python benchmarks/rounds_memory.py --record FILE    # the kept lines as a plot, docs/evidence/
    python benchmarks/rounds_memory.py --there 200 --devices 10 --devices 50

One cloud for a size of update; a short run for each number of devices, fewest first, and before it
the process's high-water mark is set back. `anonymous` is what no file backs: pages of updates and
states that are mapped from disk count as resident, but the system takes them back when it needs to.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from harness import machine
from rounds_ours import NO_END, Ours, clouded
from rounds_sides import STEP_S, end_in_order

from triplane.proto import federation_pb2 as pb
from triplane.unified_ir.files.chart import line_chart, stack

PLOT: Final = Path(__file__).resolve().parent.parent / "docs" / "evidence" / "rounds-memory.svg"
SIDES: Final = {"1 kB": 16, "1 MB": 512}
"""Names of updates, and the side of the matrix that they change."""
DEVICES: Final = (10, 30, 100, 300)
THERE: Final = 1000
ROUNDS: Final = 6
JOIN_S: Final = 300.0
RUN_S: Final = 240.0
CLEAR_PEAK: Final = "5"
"""What `/proc/PID/clear_refs` takes to set the high-water mark back."""


@dataclass
class Watch:
    """Largest anonymous memory of a process, looked at 20 times a second."""

    pid: int
    peak_bytes: int = 0
    _over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(STEP_S):
            self.peak_bytes = max(self.peak_bytes, status_bytes(self.pid, "RssAnon"))


def status_bytes(pid: int, name: str) -> int:
    """A line of the process's status."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) * 1024


def until(holds: Any, seconds: float, what: str) -> None:
    """Ask until it holds."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what}: not within {seconds} s")
        time.sleep(STEP_S * 10)


def joined(side: Ours, there: int) -> None:
    """Until so many devices are members: a run for all of them is begun, and stopped."""
    side.begin(there)
    until(lambda: sum(m.connected for m in side.found().members) >= there, JOIN_S, "devices join")
    side.stub.Stop(pb.ChangeRunRequest(id=side.run, reason="only to see them join"))


def one_run(side: Ours, devices: int) -> dict[str, Any]:
    """Rounds of so many devices: memory, and what a round took."""
    pid = side.server.pid
    Path(f"/proc/{pid}/clear_refs").write_text(CLEAR_PEAK)
    before = side.family.cpu_s()["server"]
    with Watch(pid) as watch:
        side.begin(devices, ROUNDS)
        until(lambda: side.found().phase in {pb.Run.DONE, pb.Run.FAILED}, RUN_S, "a run ends")
    run = side.found()
    if run.phase != pb.Run.DONE or any(found.counted < devices for found in run.rounds):
        raise RuntimeError(f"a run of {devices} did not count every device: {run.reason}")
    return {
        "devices": devices,
        "resident_bytes": status_bytes(pid, "VmHWM"),
        "anonymous_bytes": watch.peak_bytes,
        "round_s": statistics.median(found.closed_s - found.opened_s for found in run.rounds),
        "cpu_s": (side.family.cpu_s()["server"] - before) / ROUNDS,
    }


def measured(size: int, there: int, devices: list[int]) -> list[dict[str, Any]]:
    """One row for each number of devices."""
    with (
        tempfile.TemporaryDirectory(prefix="tr-") as name,
        clouded(Path(name) / "side", size, there) as side,
    ):
        side.tell(NO_END)
        joined(side, there)
        idle = {"devices": 0, "resident_bytes": status_bytes(side.server.pid, "VmRSS")}
        idle["anonymous_bytes"] = status_bytes(side.server.pid, "RssAnon")
        return [idle, *(one_run(side, count) for count in devices)]


def plot(kept: list[dict[str, Any]]) -> str:
    """Two lines for each size of update."""
    lines = {
        f"{line['memory']}, {kind}": [
            (row["devices"], row[f"{kind}_bytes"] / (1 << 20)) for row in line["rows"]
        ]
        for line in kept
        for kind in ("resident", "anonymous")
    }
    chart = line_chart(lines, "The cloud's peak memory", "devices in a round", "MiB")
    title = f"Rounds of some of {kept[0]['there']:,} devices, by the size of an update"
    return stack([chart], title, [kept[0]["conditions"]])


def main() -> None:
    """Measure, print a line of JSON for each size, and draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--there", type=int, default=THERE)
    parser.add_argument("--devices", type=int, action="append")
    parser.add_argument("--size", choices=SIDES, action="append")
    parser.add_argument("--keep", type=Path, default=Path(os.devnull))
    parser.add_argument("--record", type=Path, metavar="FILE", help=f"draw {PLOT.name}")
    given = parser.parse_args()
    if given.record:
        lines = [json.loads(line) for line in given.record.read_text().splitlines()]
        PLOT.write_text(plot([line for line in lines if "memory" in line]))
        return
    end_in_order()
    conditions = "; ".join(machine().values())
    for name in given.size or SIDES:
        rows = measured(SIDES[name], given.there, given.devices or list(DEVICES))
        told = {"memory": name, "there": given.there, "conditions": conditions, "rows": rows}
        print(json.dumps(told), flush=True)
        with given.keep.open("a") as kept:
            kept.write(f"{json.dumps(told)}\n")


if __name__ == "__main__":
    main()
