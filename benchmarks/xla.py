"""The engine xla: its step against JAX written by hand, and many steps in one launch.

Both sides run in this interpreter's environment, so they have the same XLA.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.metadata import version
from typing import Final

import numpy as np
import train_step
from harness import Worker, machine, ratio, table, take_turns
from networks import CASES, SEED
from side_launches import NETWORKS, STEPS, TOGETHER

LAUNCH_HEADS: Final = (
    "network", "one launch, ms/step", f"{STEPS} launches, ms/step", "CPU ratio (quartiles)",
    "control", "wall ratio",
)  # fmt: skip


def against_jax(cases: Sequence[str], *, rounds: int, threads: int) -> str:
    """The table of training steps."""
    heads = tuple(head.replace("PyTorch", "JAX") for head in train_step.HEADS)
    rows = [
        train_step.row(
            train_step.measure(
                case,
                rounds=rounds,
                threads=threads,
                ours="side_xla.py",
                theirs=("side_jax.py", sys.executable),
            )
        )
        for case in cases
    ]
    return table(heads, rows)


def launches(case: str, *, rounds: int, threads: int) -> list[str]:
    """One line of the table of launches; `control` is separate launches in a second process."""
    asked = {"together": case + TOGETHER, "apart": case, "again": case}
    with ExitStack() as stack:
        workers = {
            name: stack.enter_context(Worker("side_launches.py", threads=threads)) for name in asked
        }
        for name, worker in workers.items():
            worker.ask("start", case=asked[name])
            worker.ask("run", steps=1)  # compiles
        times = take_turns(workers, steps=1, rounds=rounds)
    cpu = {name: t["cpu_s"] for name, t in times.items()}
    wall = {name: t["wall_s"] for name, t in times.items()}
    return [
        case,
        f"{1e3 / STEPS * np.median(cpu['together']):.3f}",
        f"{1e3 / STEPS * np.median(cpu['apart']):.3f}",
        str(ratio(cpu["together"], cpu["apart"])),
        str(ratio(cpu["again"], cpu["apart"])),
        str(ratio(wall["together"], wall["apart"])),
    ]


def main() -> None:
    """Measure and print the tables that the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("case", nargs="*", choices=[*NETWORKS, []], help="networks; all by default")
    parser.add_argument("--rounds", type=int, default=31, help="turns of about 60 ms each")
    parser.add_argument(
        "--launch-rounds", type=int, default=7, help=f"turns of {STEPS} steps; 0 leaves them out"
    )
    parser.add_argument("--threads", type=int, default=1, help="processors of each side")
    options = parser.parse_args()
    asked = options.case or list(NETWORKS)
    lines = [*machine().values(), f"JAX {version('jax')}", f"seed {SEED}"]
    print(f"{'; '.join(lines)}; processors of each side: {options.threads}.")
    stepped = [case for case in asked if case in CASES]
    if options.rounds and stepped:
        shown = against_jax(stepped, rounds=options.rounds, threads=options.threads)
        print(f"\nA step against JAX written by hand:\n\n{shown}")
    if options.launch_rounds:
        rows = [
            launches(case, rounds=options.launch_rounds, threads=options.threads) for case in asked
        ]
        print(f"\n{STEPS} steps in one launch:\n\n{table(LAUNCH_HEADS, rows)}")


if __name__ == "__main__":
    main()
