"""A training step of imported networks against PyTorch eager: same weights, equal batches.

The rival is torchvision's network in training mode, exported once; ours imports that file and
trains it with `batch_norm="updated"`. Peak memory and its growth since the imports come from VmHWM.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np
from harness import Worker, peer, ratio, table, take_turns
from imported import CASES

COMPARED: Final = 5
"""Steps from the start over which the two losses are compared; later ones amplify rounding."""
BLOCK_S: Final = 0.5
"""CPU seconds of one turn."""
HEADS: Final = (
    "network", "ours ms", "PyTorch ms", "CPU ratio (quartiles)", "best/best", "control",
    "peak MB ours / PyTorch", "growth MB ours / PyTorch", "loss difference",
)  # fmt: skip


def measure(case: str, *, rounds: int, python: str, threads: int = 1) -> dict[str, Any]:
    """Everything known about one case; `control` is the rival against a second process of it."""
    with ExitStack() as stack:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "network.onnx"
        side = Path(__file__).with_name("side_torchvision.py")
        subprocess.run(
            [python, "-W", "ignore", side, case, path, "PRESERVE"], check=True, stdout=-3
        )
        os.environ["TRIPLANE_EXPORT"] = str(path)
        workers = {
            "ours": stack.enter_context(Worker("side_imported.py", threads=threads)),
            "theirs": stack.enter_context(Worker(side.name, python=python, threads=threads)),
            "again": stack.enter_context(Worker(side.name, python=python, threads=threads)),
        }
        for w in workers.values():
            w.ask("start", case=case)
        first = {name: w.ask("run", steps=COMPARED) for name, w in workers.items()}
        steps = max(1, round(BLOCK_S / first["theirs"]["cpu_s"]))
        times = take_turns(workers, steps=steps, rounds=rounds)
        memory = {name: w.ask("report") for name, w in workers.items()}
    return {"case": case, "first": first, "times": times, "memory": memory}


def row(found: dict[str, Any]) -> list[str]:
    """One line of the table."""
    cpu = {name: t["cpu_s"] for name, t in found["times"].items()}
    ours, theirs = (np.array(found["first"][n]["losses"]) for n in ("ours", "theirs"))
    peak, growth = (
        " / ".join(f"{found['memory'][n][key] / 1e6:.0f}" for n in ("ours", "theirs"))
        for key in ("peak_bytes", "growth_bytes")
    )
    return [
        found["case"],
        f"{1e3 * np.median(cpu['ours']):.0f}",
        f"{1e3 * np.median(cpu['theirs']):.0f}",
        str(ratio(cpu["ours"], cpu["theirs"])),
        f"{min(cpu['ours']) / min(cpu['theirs']):.2f}",
        str(ratio(cpu["again"], cpu["theirs"])),
        peak,
        growth,
        f"{np.abs(ours - theirs).max() / theirs.max():.0e}",
    ]


def main(cases: Sequence[str] = tuple(CASES), *, rounds: int = 15) -> str:
    """The table for some cases, all by default."""
    python = peer("TRIPLANE_ORACLES", ".venv-oracles")
    rows = [row(measure(case, rounds=rounds, python=python)) for case in cases]
    return table(HEADS, rows)


def asked() -> str:
    """The table that the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("case", nargs="*", choices=[*CASES, []], help="networks; all by default")
    parser.add_argument("--rounds", type=int, default=15, help="turns of about 0.5 s each")
    options = parser.parse_args()
    return main(options.case or tuple(CASES), rounds=options.rounds)


if __name__ == "__main__":
    print(asked())
