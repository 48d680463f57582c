"""Simulated studies: ours on both engines beside Flower's simulation, clients per second.

    python benchmarks/simulation.py                    # under four minutes
    python benchmarks/simulation.py --no-flower        # without an environment that has Flower

Each side is a family of processes; they take turns, a round each. All begin with the same weights
and samples and draw nothing, so their losses are compared too. CPU and memory are those of all of
a side's processes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import numpy as np
from harness import Ratio, machine, peer, ratio, table
from rounds_sides import Family, end_in_order, per_round, running
from simulation_case import SAMPLES, STEPS, WEIGHTS

HERE: Final = Path(__file__).resolve().parent
MIB: Final = 1 << 20
QUIET: Final = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONWARNINGS": "ignore",
}
HEADS: Final = (
    "side", "clients", "clients/s (quartiles)", "CPU ms a client", "peak MB", "first round, s",
    "time against the engine onnx",
)  # fmt: skip
DIGITS: Final = 1e-4
"""Largest difference between the losses of two sides."""


@dataclass
class Simulated:
    """A side: its processes, and what its rounds took."""

    family: Family
    child: subprocess.Popen[str]
    first_s: float = 0.0
    seconds: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def round(self) -> float:
        """Let one round through and return its seconds."""
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        before = self.family.cpu_s()
        print(1, file=self.child.stdin, flush=True)
        line = self.child.stdout.readline()
        if not line:
            raise RuntimeError("a side has ended")
        reply: dict[str, Any] = json.loads(line)
        self.cpu_ms.append(sum(per_round(before, self.family.cpu_s(), 1).values()))
        self.losses.append(reply["loss"])
        return float(reply["seconds"][0])


def commands(clients: int, *, control: bool, flower: bool) -> dict[str, list[Any]]:
    """How each side is started. control: the first side a second time."""
    ours = [sys.executable, "-W", "ignore", HERE / "simulation_ours.py"]
    sides = {f"engine {engine}": [*ours, engine, clients] for engine in ("onnx", "xla")}
    if control:
        sides["control: engine onnx again"] = sides["engine onnx"]
    if flower:
        python = peer("TRIPLANE_PEERS_FLOWER_SIMULATION", ".venv-peers-flower-simulation")
        processors = os.cpu_count() or 1
        sides["Flower"] = [python, HERE / "simulation_flower.py", clients, processors]
    return sides


@contextlib.contextmanager
def started(commands: Mapping[str, list[Any]]) -> Iterator[dict[str, Simulated]]:
    """All sides after their first round, in which they compile and start actors."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        sides = {}
        for i, (name, command) in enumerate(commands.items()):
            family = stack.enter_context(running(Path(folder) / str(i)))
            sides[name] = Simulated(family, family.start("devices", command, QUIET))
            sides[name].first_s = sides[name].round()
            sides[name].cpu_ms.clear()
        yield sides


def rows(clients: int, rounds: int, **others: bool) -> list[list[str]]:
    """Measure a number of clients: a line for each side. others: see `commands`."""
    with started(commands(clients, **others)) as sides:
        names = list(sides)
        for i in range(rounds):
            for name in names[i % len(names) :] + names[: i % len(names)]:
                sides[name].seconds.append(sides[name].round())
        check(sides)
        usual = next(iter(sides.values())).seconds
        return [row(name, side, clients, usual) for name, side in sides.items()]


def check(sides: dict[str, Simulated]) -> None:
    """Refuse figures of sides that do not compute the same."""
    losses = np.array([side.losses for side in sides.values()])
    if np.ptp(losses, axis=0).max() > DIGITS:
        raise RuntimeError(f"the sides' losses differ: {dict(zip(sides, losses, strict=True))}")


def row(name: str, side: Simulated, clients: int, usual: list[float]) -> list[str]:
    """One line of the table."""
    q1, median, q3 = np.percentile(clients / np.array(side.seconds), [25, 50, 75])
    return [
        name,
        f"{clients:,}",
        str(Ratio(round(median), round(q1), round(q3))).replace(".00", ""),
        f"{np.median(side.cpu_ms) / clients:.2f}",
        f"{sum(side.family.peak_bytes().values()) / MIB:,.0f}",
        f"{side.first_s:.1f}",
        str(ratio(side.seconds, usual)),
    ]


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each side")
    parser.add_argument("--large", type=int, default=10_000, help="clients of ours alone; or 0")
    parser.add_argument("--no-flower", action="store_true", help="measure only our engines")
    options = parser.parse_args()
    end_in_order()
    versions = [f"{name} {version(name)}" for name in ("onnxruntime", "jax")]
    load = f"load {os.getloadavg()[0]:.1f} at the start"
    print("; ".join([*machine().values(), *versions, load]) + ".")
    print(f"{WEIGHTS} weights, {SAMPLES} samples and {STEPS} steps a client, FedAvg.\n")
    lines = rows(options.clients, options.rounds, control=True, flower=not options.no_flower)
    if options.large:
        lines += rows(options.large, 3, control=False, flower=False)
    print(table(HEADS, lines))


if __name__ == "__main__":
    main()
