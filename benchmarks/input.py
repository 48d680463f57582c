"""Does the input hold training back? An epoch on augmented records against the same in memory.

    python benchmarks/input.py [--rounds 21] [--case LeNet]

Each side is a process that trains the same network on one thread, an epoch at a turn. The reference
has the augmented batches of an epoch in memory; the others read a record set, augment and shuffle,
with and without workers. Sides take turns; a ratio is of one round to the reference's of that
round, with quartiles, and "in memory again" is the control. The training thread's CPU time
leaves out what workers do, and the process's includes it; that of child processes is in neither.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, Final

import side_input
from harness import Worker, machine, ratio, table, take_turns

REFERENCE: Final = "in memory"
CLOCKS: Final = ("wall_s", "thread_s", "cpu_s")
HEADS: Final = (
    "network", "batches come from", "wall ms/step", "wall ratio (quartiles)",
    "training thread CPU ms/step", "ratio", "process CPU ms/step", "ratio",
)  # fmt: skip


def started(stack: ExitStack, side: str, case: str, path: Path) -> tuple[Worker, float]:
    """The process of one side, and the loss of its first epoch."""
    worker = stack.enter_context(Worker("side_input.py"))
    reply = worker.ask("start", side=side, case=case, path=str(path))
    return worker, reply["loss"]


def measure(name: str, rounds: int) -> list[tuple[Any, ...]]:
    """The rows of one network."""
    case = side_input.CASES[name]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        path = Path(folder) / "x.tpr"
        side_input.write(case, path)
        sides = {side: started(stack, side, name, path) for side in side_input.SIDES}
        losses = {loss for _, loss in sides.values()}
        if len(losses) > 1:
            raise AssertionError(f"the sides train on different samples: their losses are {losses}")
        workers = {side: worker for side, (worker, _) in sides.items()}
        times = take_turns(workers, steps=case.batches, rounds=rounds, keys=CLOCKS)
    return [row(name, side, times) for side in times]


def row(name: str, side: str, times: dict[str, Any]) -> tuple[Any, ...]:
    """A side's line of the table."""
    own, reference = times[side], times[REFERENCE]
    cells: list[Any] = []
    for key in CLOCKS:
        cells += [f"{1e3 * median(own[key]):.2f}", ratio(own[key], reference[key])]
    return (name, side, *cells)


def main() -> str:
    """Measure all networks and return the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--case", action="append", choices=tuple(side_input.CASES))
    options = parser.parse_args()
    names = options.case or side_input.CASES
    rows = [line for name in names for line in measure(name, options.rounds)]
    conditions = "; ".join([*machine().values(), f"seed {side_input.SEED}"])
    return f"{conditions}\n\n{table(HEADS, rows)}"


if __name__ == "__main__":
    print(main())
