"""Seconds to trace, differentiate, save, load and emit networks of 10 to 12,500 layers.

`--record` writes docs/evidence/growth.md and its picture. CPU seconds of one process, one run of
each size: a curve is looked at for its slope, not for a figure.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
from harness import ROOT, machine, table

from triplane.unified_ir import nn, ops
from triplane.unified_ir.autodiff import value_and_grad
from triplane.unified_ir.files.chart import line_chart
from triplane.unified_ir.frontend import trace
from triplane.unified_ir.ir import Module, Role, StateTensor, TensorSpec
from triplane.unified_ir.onnx import emit, serialize
from triplane.unified_ir.ops.check import load
from triplane.unified_ir.passes.occurrences import repeated

LAYERS: Final = (10, 100, 1_000, 3_000, 6_000, 12_500)
PLACE: Final = ROOT / "docs" / "evidence"
STAGES: Final = ("trace", "differentiate", "save", "load", "emit ONNX", "find repeats")


class Deep(nn.Cell):
    """Dense layers of width 8, each with tanh."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.CellList([nn.Dense(8, 8) for _ in range(layers)])

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        """x: (N, 8) -> the mean square of what comes out."""
        for layer in self.layers:
            x = ops.tanh(layer(x))
        return (x * x).mean()


def measured(layers: int) -> tuple[int, list[float]]:
    """Nodes of the network with its gradients, and seconds of each stage."""
    net, seconds = Deep(layers), []

    def timed(work: Callable[[], Any]) -> Any:
        start = time.process_time()
        made = work()
        seconds.append(time.process_time() - start)
        return made

    forward = timed(lambda: trace(net, TensorSpec(("N", 8))))
    wanted = [name for name in forward.param_names if name != "x"]
    both = timed(lambda: value_and_grad(forward, wanted))
    state = {k: StateTensor(Role.PARAMETER, p.array) for k, p in net.parameters().items()}
    module = Module(functions={"f": both}, entries={"f": "f"}, state=state, meta={})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "deep.tpm"
        timed(lambda: module.save(path))
        timed(lambda: load(path))
    timed(lambda: serialize(emit(both)))
    timed(lambda: repeated(both))
    return len(both.nodes), seconds


def main() -> None:
    """Measures, prints and, when asked, records."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--record", action="store_true", help=f"into {PLACE.name}/")
    options = parser.parse_args()
    found = [measured(layers) for layers in LAYERS]
    nodes = np.array([n for n, _ in found], float)
    seconds = np.array([s for _, s in found])
    large = nodes >= 1_000
    slopes = [np.polyfit(np.log(nodes[large]), np.log(column[large]), 1)[0] for column in seconds.T]
    rows = [
        [f"{layers:,}", f"{n:,}", *(f"{s:.2f}" for s in times)]
        for layers, (n, times) in zip(LAYERS, found, strict=True)
    ]
    rows.append(["", "grows with the power", *(f"{slope:.2f}" for slope in slopes)])
    text = (
        f"# Large graphs\n\n`benchmarks/growth.py --record`: {'; '.join(machine().values())}. CPU "
        "seconds; layers of width 8, with every gradient. The last row is the exponent from 1,000 "
        "nodes on; 1 is linear.\n\n"
        f"{table(('layers', 'nodes', *(f'{stage}, s' for stage in STAGES)), rows)}\n\n"
        "![CPU seconds over nodes](growth.svg)\n"
    )
    print(text)
    if options.record:
        PLACE.joinpath("growth.md").write_text(text)
        series = {
            stage: [(n / 1e3, s) for n, s in zip(nodes, column, strict=True)]
            for stage, column in zip(STAGES, seconds.T, strict=True)
        }
        drawn = line_chart(series, "Work over the size of a graph", "thousand nodes", "CPU s")
        PLACE.joinpath("growth.svg").write_text(drawn)


if __name__ == "__main__":
    main()
