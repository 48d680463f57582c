"""A training step against PyTorch eager and others: from equal weights, on equal batches."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Final

import numpy as np
from harness import Worker, peer, ratio, table, take_turns
from networks import CASES

from triplane.proto.errors import NotFound

COMPARED: Final = 20
"""Steps from the start over which the two losses are compared."""

BLOCK_S: Final = 0.06
"""CPU seconds of one turn, long beside the clock and short beside the machine's drifts."""

HEADS: Final = (
    "network", "ours ms", "PyTorch ms", "CPU ratio (quartiles)", "best/best", "control",
    "wall ratio", "peak MB ours / PyTorch", "loss difference",
)  # fmt: skip


OTHERS: Final = (
    ("JAX", "side_jax.py", ("TRIPLANE_PEERS_JAX", ".venv-peers-jax"),
     tuple(CASES)),
    ("onnxsim", "side_onnxsim.py", ("TRIPLANE_PEERS_ONNXSIM", ".venv-peers-onnxsim"),
     ("CNN B32 Adam",)),
    ("MindSpore", "side_mindspore.py", ("TRIPLANE_PEERS_MINDSPORE", ".venv-peers-mindspore"),
     ("MLP B64 momentum", "LeNet B32 SGD", "LEAF CNN B32 SGD", "CNN B32 Adam")),
)  # fmt: skip
"""Further rivals: name, script, interpreter, and the networks they are asked for."""


def measure(
    case: str,
    *,
    rounds: int = 31,
    threads: int = 1,
    theirs: tuple[str, str] = ("side_pytorch.py", ""),
    ours: str = "side_ours.py",
) -> dict[str, Any]:
    """Everything known about one case; `control` is the rival against a second process of it."""
    script, python = theirs[0], theirs[1] or peer()
    with ExitStack() as stack:
        workers = {
            "ours": stack.enter_context(Worker(ours, threads=threads)),
            "theirs": stack.enter_context(Worker(script, python=python, threads=threads)),
            "again": stack.enter_context(Worker(script, python=python, threads=threads)),
        }
        started = {name: w.ask("start", case=case) for name, w in workers.items()}
        first = {name: w.ask("run", steps=COMPARED) for name, w in workers.items()}
        # The first steps may have compiled something.
        again = workers["theirs"].ask("run", steps=COMPARED)
        steps = max(1, round(BLOCK_S / again["cpu_s"]))
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


def main(
    cases: Sequence[str] = tuple(CASES), *, rounds: int = 31, threads: Sequence[int] = (1, 2)
) -> str:
    """The tables for some cases, all by default: PyTorch by number of threads, then the others."""
    parts = [
        f"{n} thread{'s' * (n > 1)} on both sides:\n\n"
        + table(HEADS, [row(measure(case, rounds=rounds, threads=n)) for case in cases])
        for n in threads
    ]
    for name, script, place, able in OTHERS:
        asked = [case for case in cases if case in able]
        if not asked:
            continue
        try:
            python = peer(*place)
        except NotFound as error:
            parts.append(f"{name}: {error}")
            continue
        heads = tuple(head.replace("PyTorch", name) for head in HEADS)
        rows = [row(measure(case, rounds=rounds, theirs=(script, python))) for case in asked]
        parts.append(f"Against {name}, one thread:\n\n{table(heads, rows)}")
    return "\n\n".join(parts)


def asked() -> str:
    """The tables that the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("case", nargs="*", choices=[*CASES, []], help="networks; all by default")
    parser.add_argument("--rounds", type=int, default=31, help="turns of about 60 ms each")
    parser.add_argument("--threads", type=int, action="append", help="1 and 2 by default")
    options = parser.parse_args()
    cases = options.case or tuple(CASES)
    return main(cases, rounds=options.rounds, threads=options.threads or (1, 2))


if __name__ == "__main__":
    print(asked())
