"""A cell as a table: what it is made of, what each part gives, how many parameters it holds."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from triplane.unified_ir.frontend.cell import Cell
from triplane.unified_ir.frontend.owner import Owner
from triplane.unified_ir.frontend.trace import trace
from triplane.unified_ir.ir.graph import Function


def summary(cell: Cell, *specs: Any) -> str:
    """Rows of path, class, last output, parameters; then the sum and what training changes.

    specs: what `trace` takes for the cell. A part that computes nothing on these has no output.
    """
    outputs = _outputs(trace(cell, *specs))
    rows = [("path", "cell", "gives", "parameters")]
    rows += [
        (path or "(whole)", type(part).__name__, outputs.get(path, ""), f"{_held(part):,}")
        for path, part in cell.cells()
    ]
    own = cell.parameters().values()
    learnt = sum(p.array.size for p in own if p.trainable)
    return "\n".join([*_aligned(rows), f"{_held(cell):,} elements, {learnt:,} of them learnt"])


def _held(part: Owner) -> int:
    return sum(prod(p.array.shape) for p in part.parameters().values())


def _outputs(function: Function) -> dict[str, str]:
    """Type of the last value that each part, or a part of it, made."""
    given = dict(zip(function.result_names, function.results, strict=True))
    own = [str(r.type) for name, r in given.items() if name not in function.param_names]
    found = {"": ", ".join(own)}
    for node in function.nodes:
        parts = node.meta.scope.split(".") if node.meta.scope else []
        for i in range(len(parts)):
            found[".".join(parts[: i + 1])] = str(node.outputs[0].type)
    return found


def _aligned(rows: list[tuple[str, str, str, str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for path, kind, gives, held in rows:
        line = (
            f"{path:<{widths[0]}}  {kind:<{widths[1]}}  {gives:<{widths[2]}}  {held:>{widths[3]}}"
        )
        yield line.rstrip()
