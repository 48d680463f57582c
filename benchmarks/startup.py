"""What a process costs before it learns: imports, first step, memory; and how long recording takes.

A device's fine-tuning process opens a plan and takes twenty steps of LeNet, batch 32; it imports
onnxruntime, numpy, protobuf and our `runtime`. The other side imports PyTorch and does the same
from the same weights. Processes start in turns; a second PyTorch process is the control.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any, Final

import networks
import numpy as np
from harness import THREADS, Worker, peer, ratio, table

ROUNDS: Final = 5
STEPS: Final = 20
CASE: Final = "LeNet B32 SGD"
STAGES: Final = {"import": "imports done", "first": "first step done", "all": f"{STEPS} steps done"}


def write_plan(folder: Path) -> Path:
    """A plan with `local_update`, and its batches beside it."""
    from side_ours import trainer_of

    from triplane.unified_ir.onnx import emit, serialize
    from triplane.unified_ir.runtime import PlanSpec
    from triplane.unified_ir.runtime import write_plan as write

    case = networks.CASES[CASE]
    trainer = trainer_of(case)
    function, state = trainer.train_function(), trainer.state()
    path = folder / "lenet.plan"
    write(
        path,
        PlanSpec(
            entries={"local_update": serialize(emit(function))},
            state=state,
            roles={k: str(role) for k, role in trainer.roles().items()},
        ),
    )
    x, y = zip(*islice(networks.batches(case), STEPS), strict=True)
    np.savez(path.with_suffix(".npz"), x=np.stack(x), y=np.stack(y))
    return path


def launch(python: str, script: str, plan: Path) -> dict[str, Any]:
    """One process from start to end; stages are (wall, CPU) seconds since its start."""
    born = repr(time.monotonic())
    command = [python, "-W", "ignore", Path(__file__).with_name(script), plan, born, CASE]
    made = subprocess.run(
        command,
        env={**os.environ, **dict.fromkeys(THREADS, "1")},
        check=True,
        capture_output=True,
        text=True,
    )
    found: dict[str, Any] = json.loads(made.stdout)
    return found


def measure(rounds: int = ROUNDS) -> dict[str, list[dict[str, Any]]]:
    """Each side's processes in turn; the first round warms the disk and is dropped."""
    sides = {
        "ours": (sys.executable, "finetune_ours.py"),
        "theirs": (peer(), "finetune_pytorch.py"),
        "again": (peer(), "finetune_pytorch.py"),
    }
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    with tempfile.TemporaryDirectory() as folder:
        plan = write_plan(Path(folder))
        for _ in range(rounds + 1):
            for name, (python, script) in sides.items():
                found[name].append(launch(python, script, plan))
    return {name: runs[1:] for name, runs in found.items()}


def process_table() -> str:
    """Stages and memory of the fine-tuning process."""
    found = measure()
    heavy = found["ours"][0]["heavy"]
    assert not heavy, f"the fine-tuning process imported {heavy}"
    losses = [np.array(found[n][0]["losses"]) for n in ("ours", "theirs")]
    assert np.abs(losses[0] - losses[1]).max() < 1e-3, "the two sides learn differently"
    rows = []
    for stage, label in STAGES.items():
        for i, clock in enumerate(("wall", "CPU")):
            at = {n: [run[stage][i] for run in runs] for n, runs in found.items()}
            rows.append(_row(f"{label}, {clock} s", at, 1.0, "{:.2f}"))
    at = {n: [run["resident"] for run in runs] for n, runs in found.items()}
    rows.append(_row("resident at the end, MB", at, 1e6, "{:.0f}"))
    return table(("fine-tuning process", "ours", "PyTorch", "ratio (quartiles)", "control"), rows)


def _row(label: str, at: dict[str, list[float]], unit: float, form: str) -> list[str]:
    ours, theirs = (form.format(np.median(at[n]) / unit) for n in ("ours", "theirs"))
    against = ratio(at["ours"], at["theirs"]), ratio(at["again"], at["theirs"])
    return [label, ours, theirs, *map(str, against)]


def compile_table() -> str:
    """CPU milliseconds to record and differentiate a training step, and to compile it."""
    rows = []
    for case in networks.CASES:
        times: dict[str, list[float]] = {"record_s": [], "compile_s": []}
        for _ in range(3):
            with Worker("side_ours.py") as worker:
                reply = worker.ask("start", case=case)
            for key, column in times.items():
                column.append(reply[key])
        rows.append([case, *(f"{1e3 * np.median(column):.0f}" for column in times.values())])
    return table(("network", "record and differentiate, ms", "emit and load, ms"), rows)


def main() -> str:
    """Both tables."""
    return f"{process_table()}\n\n{compile_table()}"


if __name__ == "__main__":
    print(main())
