"""Where a training step's time goes, by operator: onnxruntime's own profile of the same graph."""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Final

import networks
from harness import table
from side_ours import trainer_of

from triplane.unified_ir.onnx import emit, serialize
from triplane.unified_ir.runtime.session import Session, SessionOptions

STEPS: Final = 60
WARM_UP: Final = 10

HAND_WRITTEN: Final = {
    "MLP B64 momentum": 0.86,
    "LeNet B32 SGD": 0.78,
    "LeNet B128 SGD": 1.07,
    "LEAF CNN B10 SGD": 1.01,
    "LEAF CNN B32 SGD": 1.14,
}
"""Best CPU ratio to PyTorch that graphs written by hand, node by node, reached before this
compiler existed (another machine of the same family, minima, portable operators, exact pooling)."""


def shares(case: networks.Case) -> dict[str, tuple[int, float]]:
    """Nodes per step and milliseconds per step of each operator, the largest first.

    Nodes are named by operator and output shape; profiling itself adds a little to each.
    """
    trainer = trainer_of(case)
    function, held = trainer.train_function(), trainer.state()
    state = {name: held[name] for name in trainer.state_names(function)}
    model = serialize(emit(function))
    with tempfile.TemporaryDirectory() as folder:
        options = SessionOptions(profile_prefix=Path(folder) / "step")
        session = Session(model, options=options)
        loop = session.loop(state)
        for x, labels in itertools.islice(networks.batches(case), STEPS):
            loop.step(**dict(zip(trainer.model.batch_names(), (x, labels), strict=True)))
        events = json.loads(session.profile().read_text())
    return _totals(events)


def _totals(events: list[dict[str, object]]) -> dict[str, tuple[int, float]]:
    spent: dict[str, list[int]] = defaultdict(list)
    for event in events:
        args = event.get("args")
        if event.get("cat") != "Node" or not str(event["name"]).endswith("_kernel_time"):
            continue
        assert isinstance(args, dict)
        shapes = " ".join("x".join(map(str, *s.values())) for s in args["output_type_shape"][:1])
        spent[f"{args['op_name']} {shapes}"].append(int(str(event["dur"])))
    found = {}
    for name, durations in spent.items():
        per_step = len(durations) // STEPS
        steady = durations[WARM_UP * per_step :]
        found[name] = (per_step, sum(steady) / (STEPS - WARM_UP) / 1e3)
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))


def main(case: str, *, lines: int = 25) -> str:
    """The costliest operators of a case and the whole."""
    found = shares(networks.CASES[case])
    total = sum(ms for _, ms in found.values())
    rows = [
        (name, count, f"{ms:.3f}", f"{100 * ms / total:.1f} %")
        for name, (count, ms) in itertools.islice(found.items(), lines)
    ]
    heads = ("operator and first output", "nodes", "ms per step", "share")
    whole = f"{case}: {total:.2f} ms in {sum(c for c, _ in found.values())} nodes"
    if case in HAND_WRITTEN:
        whole += f"; a graph written by hand reached {HAND_WRITTEN[case]} of PyTorch's CPU time"
    return f"{whole}\n\n{table(heads, rows)}"


if __name__ == "__main__":
    print("\n\n".join(main(case) for case in sys.argv[1:] or networks.CASES))
