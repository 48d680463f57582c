"""Reading records in a random order: CPU time for each record, against a memory-mapped .npy.

    python benchmarks/records.py [--rivals] [--rounds 15]

Each side is a process that reads batches of 128 rows of a permutation of all rows, from the page
cache, into memory of its own. Sides take turns; a ratio is of one round to the .npy's of that
round, with quartiles, and "npy again" is the control. The first epoch of ours, in which each block
is compared with its checksum, is timed apart. --rivals adds the formats of other libraries, each
in an environment of its own that `make peers` makes, or TRIPLANE_PEERS_RECORDS_ARROW and so on.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, Final

import side_records
from harness import Worker, machine, peer, ratio, table, take_turns

OURS: Final = ("ours", "ours, no checksums", "npy", "npy again")
RIVALS: Final = {
    "Arrow IPC": "arrow", "ArrayRecord": "arrayrecord", "Grain": "grain", "MDS": "mds",
    "TFRecord": "tfrecord",
}  # fmt: skip
"""Formats of other libraries, and the names of their environments."""
STEPS: Final = 150
HEADS: Final = (
    "records", "format", "CPU us/record", "ratio to npy (quartiles)", "wall ratio",
    "bytes on disk / raw",
)  # fmt: skip
FIRST_HEADS: Final = (
    "records", "first epoch, CPU us/record", "without checksums", "later epochs", "checksums at",
)  # fmt: skip


def on_disk(folder: Path, name: str) -> int:
    """The bytes of what one side wrote."""
    names = {"npy again": "x.npy", "npy": "x.npy", "Arrow IPC": "x.arrow", "MDS": "mds"}
    names |= {"ArrayRecord": "x.arrayrecord", "Grain": "x.arrayrecord", "TFRecord": "x.tfrecord"}
    path = folder / names.get(name, "ours.tpr")
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(f.stat().st_size for f in files if f.is_file())


def started(stack: ExitStack, name: str, case: str, folder: Path) -> Worker:
    """The process of one side, which has read the right rows."""
    options: dict[str, Any] = {}
    if name in RIVALS:
        made = RIVALS[name]
        options["python"] = peer(
            f"TRIPLANE_PEERS_RECORDS_{made.upper()}", f".venv-peers-records-{made}"
        )
    worker = stack.enter_context(Worker("side_records.py", **options))
    reply = worker.ask("start", side=name.removesuffix(" again"), case=case, folder=str(folder))
    if not reply["right"]:
        raise AssertionError(f"{name} reads other rows than it wrote")
    return worker


def measure(
    name: str, folder: Path, sides: Sequence[str], rounds: int
) -> tuple[list[tuple[Any, ...]], tuple[Any, ...]]:
    """The rows of one data set: those of every side, and that of our first epoch."""
    case = side_records.CASES[name]
    raw, epoch = case.n * case.n_bytes, case.n // side_records.BATCH
    with ExitStack() as stack:
        workers = {side: started(stack, side, name, folder) for side in sides}
        # Every page is in the cache, since all files were just written, and every block of ours is
        # touched before the sides take turns. A whole epoch of Grain would take minutes.
        steps = {s: epoch if s in OURS else min(STEPS, epoch) for s in sides}
        first = {s: w.ask("run", steps=steps[s]) for s, w in workers.items()}
        times = take_turns(workers, steps=min(STEPS, epoch), rounds=rounds)
    middle_s = {side: median(times[side]["cpu_s"]) for side in sides}
    rows = [
        (
            name,
            side,
            f"{middle_s[side] * 1e6:.3f}",
            ratio(times[side]["cpu_s"], times["npy"]["cpu_s"]),
            ratio(times[side]["wall_s"], times["npy"]["wall_s"]),
            f"{on_disk(folder, side) / raw:.4f}",
        )
        for side in sides
    ]
    checked_s = (first["ours"]["cpu_s"] - first["ours, no checksums"]["cpu_s"]) * epoch
    each = (f"{first[side]['cpu_s'] * 1e6:.3f}" for side in OURS[:2])
    rate = f"{raw / checked_s / 1e9 / side_records.BATCH:.1f} GB/s"
    return rows, (name, *each, f"{middle_s['ours'] * 1e6:.3f}", rate)


def main() -> str:
    """Measure all data sets and return the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rivals", action="store_true", help="also the formats of other libraries")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    sides = OURS + (tuple(RIVALS) if options.rivals else ())
    rows, firsts = [], []
    for name in side_records.CASES:
        with tempfile.TemporaryDirectory() as folder:
            of_sides, first = measure(name, Path(folder), sides, options.rounds)
        rows += of_sides
        firsts.append(first)
    conditions = "; ".join([*machine().values(), f"seed {side_records.SEED}"])
    return "\n\n".join([conditions, table(HEADS, rows), table(FIRST_HEADS, firsts)])


if __name__ == "__main__":
    print(main())
