"""A training step on a GPU: Triplane on the engine xla against torch.compile, in bfloat16.

Needs this repository and a Python that has jax or torch; the machine may be offline. A side whose
interpreter lacks something is left out, and the message says what it lacks. `--small` runs the same
code with tiny networks, on a CPU as well.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

# Where Triplane is not installed, it is imported from here, by this process and by the sides.
NAMESPACE: Final = str(Path(__file__).parents[1] / ".ci" / "namespace")
sys.path.insert(0, NAMESPACE)

import numpy as np  # noqa: E402
from gpu_cases import CASES, Work, work  # noqa: E402
from harness import Worker, machine, ratio, table, take_turns  # noqa: E402

COMPARED: Final = 3
"""Steps whose losses are compared; they compile, too."""
SMALL: Final = "small"
"""How the names of networks begin that a CPU can train."""
HEADS: Final = (
    "network", "side", "ms/step (quartiles)", "floor ms", "floor / step", "peak GB",
    "ratio to torch.compile (quartiles)", "control", "loss difference",
)  # fmt: skip


@dataclass(frozen=True)
class Side:
    """One side: its script, and the modules that its interpreter needs."""

    name: str
    script: str
    needs: tuple[str, ...]


SIDES: Final = (
    Side(
        "Triplane",
        "gpu_ours.py",
        ("jax", "numpy", "google.protobuf", "typing_extensions", "onnx", "onnxruntime"),
    ),
    Side("torch.compile", "gpu_torch.py", ("torch", "numpy")),
)
OURS: Final = SIDES[0].name
THEIRS: Final = SIDES[1].name

DEVICES: Final[Mapping[str, tuple[float, float]]] = {
    # part of the device's name: dense bfloat16 TFLOP/s, GB/s of memory, by their data sheets
    "B200": (2250, 8000),
    "H200": (989, 4800),
    "H100 PCIe": (756, 2000),
    "H100 NVL": (835, 3900),
    "H100": (989, 3350),
    "A100-SXM4-80GB": (312, 2039),
    "A100 80GB": (312, 1935),
    "A100": (312, 1555),
    "L40S": (362, 864),
    "L4": (121, 300),
    "RTX 4090": (165, 1008),
}


def lacking(side: Side, python: str) -> dict[str, str]:
    """What the interpreter cannot import of what a side needs, and why."""
    script = (
        "import importlib, json, sys\n"
        "lacks = {}\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n"
        "        importlib.import_module(name)\n"
        "    except Exception as error:\n"
        "        lacks[name] = f'{type(error).__name__}: {error}'\n"
        "print(json.dumps(lacks))\n"
    )
    try:
        answer = subprocess.run(
            [python, "-W", "ignore", "-c", script, *side.needs],
            check=True,
            capture_output=True,
            text=True,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        return {python: str(error)}
    lacks: dict[str, str] = json.loads(answer.stdout.splitlines()[-1])
    return lacks


def explanation(side: Side, python: str, lacks: Mapping[str, str]) -> str:
    """Why a side is left out, and what to do."""
    why = "; ".join(f"{name} ({error})" for name, error in lacks.items())
    packages = " ".join({"google.protobuf": "protobuf"}.get(name, name) for name in lacks)
    return (
        f"{side.name} is left out: {python} cannot import {why}. Name another interpreter with "
        f"--{'jax' if side.name == OURS else 'torch'}-python; or, on a machine without a network, "
        f"`pip install --no-deps --target FOLDER {packages}` for this system and Python elsewhere, "
        "copy the folder here and set PYTHONPATH=FOLDER"
    )


def floor_s(least: Work, device: str, given: tuple[float, float] | None) -> float | None:
    """Seconds that the device needs at least: for the arithmetic, or for the memory."""
    by_name = next((peak for name, peak in DEVICES.items() if name in device), None)
    peak = given or by_name
    if peak is None:
        return None
    return max(least.flops / (peak[0] * 1e12), least.bytes / (peak[1] * 1e9))


def check_devices(case: str, started: Mapping[str, Any]) -> None:
    """Stop before a side trains a large network on a CPU, which would take hours."""
    on_cpu = [name for name, side in started.items() if side["device"] == "CPU"]
    if on_cpu and not case.startswith(SMALL):
        sys.exit(
            f"{case} needs a GPU, and {' and '.join(on_cpu)} would run on the CPU: install "
            "jax[cuda13], or a PyTorch with CUDA, and look at nvidia-smi; --small tries the script "
            "on a CPU"
        )


def measure(
    case: str, pythons: Mapping[str, str], *, rounds: int, steps: int, control: bool
) -> dict[str, Any]:
    """Times, losses and peaks of the sides by name; the control is a second process of the last."""
    scripts = {side.name: side.script for side in SIDES if side.name in pythons}
    names = list(scripts)
    if control:
        names.append("control")
        scripts["control"], pythons = scripts[names[-2]], {**pythons, "control": pythons[names[-2]]}
    with ExitStack() as stack:
        workers = {
            name: stack.enter_context(Worker(scripts[name], python=pythons[name])) for name in names
        }
        started = {name: worker.ask("start", case=case) for name, worker in workers.items()}
        check_devices(case, started)
        losses = {name: w.ask("run", steps=COMPARED)["losses"] for name, w in workers.items()}
        times = take_turns(workers, steps=steps, rounds=rounds, keys=("wall_s",))
        peaks = {name: w.ask("report")["peak_bytes"] for name, w in workers.items()}
    return {
        name: {
            **started[name],
            "losses": losses[name],
            "wall_s": times[name]["wall_s"],
            "peak_bytes": peaks[name],
        }
        for name in names
    }


def rows(case: str, sides: Mapping[str, Any], given: tuple[float, float] | None) -> list[list[str]]:
    """The table's lines of one network."""
    theirs, control = sides.get(THEIRS), sides.get("control")
    lines = []
    for name in (OURS, THEIRS):
        if name not in sides:
            continue
        side = sides[name]
        q1, median, q3 = 1e3 * np.percentile(side["wall_s"], [25, 50, 75])
        floor = floor_s(work(CASES[case]), side["device"], given)
        against = theirs if name == OURS else None
        gap = "-"
        if against:
            ours, other = (np.array(s["losses"]) for s in (side, against))
            gap = f"{np.abs(ours / other - 1).max():.0e}"
        lines.append(
            [
                case,
                f"{name}, {side['version']}, {side['device']}",
                f"{median:.2f} ({q1:.2f}-{q3:.2f})",
                f"{1e3 * floor:.2f}" if floor else "-",
                f"{1e3 * floor / median:.2f}" if floor else "-",
                f"{side['peak_bytes'] / 1e9:.2f}",
                str(ratio(side["wall_s"], against["wall_s"])) if against else "-",
                str(ratio(control["wall_s"], side["wall_s"])) if control and not against else "-",
                gap,
            ]
        )
    return lines


def options() -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--small", action="store_true", help="tiny networks, to test the script")
    parser.add_argument("--case", action="append", choices=list(CASES), help="networks to train")
    parser.add_argument("--only", choices=[side.name for side in SIDES], help="one side alone")
    parser.add_argument("--jax-python", default=sys.executable, help="interpreter that has jax")
    parser.add_argument("--torch-python", default=sys.executable, help="interpreter that has torch")
    parser.add_argument("--rounds", type=int, default=21, help="turns of each side")
    parser.add_argument("--steps", type=int, default=10, help="steps of a turn")
    parser.add_argument("--control", action="store_true", help="torch.compile against itself, too")
    parser.add_argument(
        "--peak", type=float, nargs=2, metavar=("TFLOPS", "GB_PER_S"),
        help="of a device that the script does not know: dense bfloat16, and memory",
    )  # fmt: skip
    return parser.parse_args()


def main() -> int:
    """Measure and print the table; the exit status is 1 if no side could run."""
    asked = options()
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (NAMESPACE, os.environ.get("PYTHONPATH", "")))
    )
    # Both sides hold memory of one device at the same time.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    pythons = {}
    for side, python in zip(SIDES, (asked.jax_python, asked.torch_python), strict=True):
        if asked.only not in {None, side.name}:
            continue
        if lacks := lacking(side, python):
            print(explanation(side, python, lacks), file=sys.stderr)
        else:
            pythons[side.name] = python
    if not pythons:
        return 1
    cases = asked.case or [name for name in CASES if name.startswith(SMALL) == asked.small]
    print("; ".join(machine().values()) + "\n")
    lines = []
    for case in cases:
        sides = measure(
            case, pythons, rounds=asked.rounds, steps=asked.steps, control=asked.control
        )
        lines += rows(case, sides, asked.peak)
    print(table(HEADS, lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
