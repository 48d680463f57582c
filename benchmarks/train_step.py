"""A training step against PyTorch eager: one thread, from equal weights, on equal batches."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Final

import numpy as np
from harness import Worker, peer, ratio, table, take_turns
from networks import CASES

COMPARED: Final = 20
"""Steps from the start over which the two losses are compared."""

BLOCK_S: Final = 0.06
"""CPU seconds of one turn, long beside the clock and short beside the machine's drifts."""

HEADS: Final = (
    "network", "ours ms", "PyTorch ms", "CPU ratio (quartiles)", "best/best", "control",
    "wall ratio", "peak MB ours / PyTorch", "loss difference",
)  # fmt: skip


def measure(case: str, *, rounds: int = 31) -> dict[str, Any]:
    """Everything known about one case; `control` is PyTorch against a second PyTorch process."""
    with ExitStack() as stack:
        workers = {
            "ours": stack.enter_context(Worker("side_ours.py")),
            "theirs": stack.enter_context(Worker("side_pytorch.py", python=peer())),
            "again": stack.enter_context(Worker("side_pytorch.py", python=peer())),
        }
        started = {name: w.ask("start", case=case) for name, w in workers.items()}
        first = {name: w.ask("run", steps=COMPARED) for name, w in workers.items()}
        steps = max(1, round(BLOCK_S / first["theirs"]["cpu_s"]))
        times = take_turns(workers, steps=steps, rounds=rounds)
        peaks = {name: w.ask("report")["peak_bytes"] for name, w in workers.items()}
    return {"case": case, "started": started, "first": first, "times": times, "peaks": peaks}


def row(found: dict[str, Any]) -> list[str]:
    """One line of the table."""
    cpu = {name: t["cpu_s"] for name, t in found["times"].items()}
    wall = {name: t["wall_s"] for name, t in found["times"].items()}
    ours, theirs = (np.array(found["first"][n]["losses"]) for n in ("ours", "theirs"))
    peaks = [found["peaks"][n] / 1e6 for n in ("ours", "theirs")]
    return [
        found["case"],
        f"{1e3 * np.median(cpu['ours']):.2f}",
        f"{1e3 * np.median(cpu['theirs']):.2f}",
        str(ratio(cpu["ours"], cpu["theirs"])),
        f"{min(cpu['ours']) / min(cpu['theirs']):.2f}",
        str(ratio(cpu["again"], cpu["theirs"])),
        str(ratio(wall["ours"], wall["theirs"])),
        f"{peaks[0]:.0f} / {peaks[1]:.0f}",
        f"{np.abs(ours - theirs).max() / theirs.max():.0e}",
    ]


def main(cases: Sequence[str] = tuple(CASES)) -> str:
    """The table for some cases, all by default."""
    return table(HEADS, [row(measure(case)) for case in cases])


if __name__ == "__main__":
    print(main(sys.argv[1:] or tuple(CASES)))
