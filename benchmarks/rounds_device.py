"""The device process: how soon it is ready, and the most memory it takes while it learns.

    python benchmarks/rounds_device.py                 # 1 kB and 40 MB of parameters
    python benchmarks/rounds_device.py --keep FILE     # also as a line of JSON a model

`python -m triplane.device` as it is, against a real cloud: three rounds of real steps, scored at
the end. Ready is from the start of the process to its ready line; then it has
its samples, its key and its libraries, and opens its stream.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
from rounds_memory import status_bytes, until
from rounds_ours import POPULATION, Ours, clouded
from rounds_sides import end_in_order

from triplane.cloud.cli.connection import new_key
from triplane.proto import federation_pb2 as pb

MIB: Final = 1 << 20
CASES: Final = (("1 kB", 16, ""), ("40 MB", 3162, ""), ("40 MB", 3162, "int8"))
"""Name of the model, side of its matrix, compression of updates."""
STARTS: Final = 5
ROUNDS: Final = 3
RUN_S: Final = 200.0
READY_S: Final = 1.0
BASE_BYTES: Final = 150 * MIB
TIMES: Final = 5
"""Of the parameter bytes, above `BASE_BYTES`."""


def samples(path: Path, side: int) -> None:
    """Twenty to learn from and five held out."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(25, side)).astype(np.float32), rng.integers(0, side, 25)
    held_out = {"held_out.x": x[20:], "held_out.y": y[20:]}
    np.savez(path, x=x[:20], y=y[:20], **held_out)


def command(side: Ours) -> list[Any]:
    """The process of the one device that was let in."""
    folder = side.family.folder
    home = folder / "devices" / "0"
    data = ["--data", folder / "samples.npz", "--population", POPULATION]
    return [sys.executable, "-m", "triplane.device", home, *data]


def started(side: Ours) -> tuple[Any, float, float]:
    """The process once it is ready, after how many seconds, and its processor time by then."""
    began_s = time.perf_counter()
    child = side.family.start("devices", command(side))
    assert child.stdout is not None
    if not child.stdout.readline():
        raise RuntimeError("the device did not start")
    ready_s = time.perf_counter() - began_s
    fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
    return child, ready_s, (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def learned(side: Ours, compression: str) -> None:
    """A run of this one device."""
    spec = pb.Spec(
        model="square@1", population=POPULATION, rounds=ROUNDS, evaluate_every=ROUNDS,
        cohort=pb.Cohort(devices=1, quorum=1.0, deadline_s=120.0), compression=compression,
    )  # fmt: skip
    side.run = side.stub.Start(pb.StartRequest(spec=spec, key=new_key())).id
    until(lambda: side.found().phase in {pb.Run.DONE, pb.Run.FAILED}, RUN_S, "a run ends")
    if (run := side.found()).phase != pb.Run.DONE:
        raise RuntimeError(run.reason)


def both_bytes(pid: int, key: str) -> int:
    """Of the process and of the one that does its tasks, added."""
    children = psutil.Process(pid).children()
    return sum(status_bytes(one, key) for one in (pid, *(child.pid for child in children)))


def measured(size: int, compression: str) -> dict[str, Any]:
    """Figures of one case."""
    with (
        tempfile.TemporaryDirectory(prefix="tr-") as name,
        clouded(Path(name) / "side", size, 1, start=False) as side,
    ):
        samples(side.family.folder / "samples.npz", size)
        starts = []
        for i in range(STARTS):
            child, *figures = started(side)
            starts.append(figures)
            if i < STARTS - 1:
                child.terminate()
                child.wait(60)
        learned(side, compression)
        peak, anonymous = (both_bytes(child.pid, key) for key in ("VmHWM", "RssAnon"))
    parameters = 4 * size * (size + 1)
    return {
        "compression": compression,
        "parameter_bytes": parameters,
        "ready_s": statistics.median(wall for wall, _ in starts),
        "ready_cpu_s": statistics.median(cpu for _, cpu in starts),
        "peak_bytes": peak,
        "anonymous_bytes": anonymous,
        "most_bytes": BASE_BYTES + TIMES * parameters,
    }


def main() -> None:
    """Measure, and print a line of JSON for each size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--keep", type=Path, default=Path(os.devnull))
    given = parser.parse_args()
    end_in_order()
    for name, size, compression in CASES:
        line = json.dumps({"device": name, **measured(size, compression)})
        print(line, flush=True)
        with given.keep.open("a") as kept:
            kept.write(f"{line}\n")


if __name__ == "__main__":
    main()
