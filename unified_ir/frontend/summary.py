"""A cell as a table: its parts, the output of each, and the number of parameters."""

from __future__ import annotations

from itertools import accumulate
from math import prod
from typing import Any

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.files.text_table import aligned
from triplane.unified_ir.frontend.binding import LEARNT, StateTree
from triplane.unified_ir.frontend.run import current_floats, host_arguments
from triplane.unified_ir.frontend.trace import record
from triplane.unified_ir.ir.graph import Function, Value
from triplane.unified_ir.passes.clean import drop_dead


def summary(cell: StateTree, *specs: Any) -> str:
    """Return a table: path, class, last output, elements of parameters and of buffers; then sums.

    Buffers are state that is not learned, such as running statistics and random keys. specs: the
    arguments of the cell, each an array or a `TensorSpec`; without any there are no outputs. A part
    that computes nothing on them has no output. InvalidInput: the first is a mere shape.
    """
    outputs = _outputs(_recorded(cell, specs)) if specs else {}
    rows: list[tuple[str, ...]] = [("path", "cell", "gives", "parameters", "buffers")]
    for path, part in cell.cells():
        counts = [f"{n:,}" for n in _held(part)]
        rows.append((path or "(whole)", type(part).__name__, outputs.get(path, ""), *counts))
    own = cell.parameters().values()
    trainable = sum(p.array.size for p in own if p.trainable)
    parameters, buffers = _held(cell)
    total = f"{parameters:,} parameters, {trainable:,} of them trainable"
    return "\n".join([*aligned(rows, texts=3), f"{total}; {buffers:,} elements of buffers"])


def _recorded(cell: StateTree, specs: tuple[Any, ...]) -> Function:
    if isinstance(specs[0], (tuple, list)) and all(isinstance(n, (int, str)) for n in specs[0]):
        shape = tuple(specs[0])
        raise InvalidInput(f"a summary takes arrays or specs, got {shape}: TensorSpec({shape})?")
    arguments, _ = host_arguments(cell, specs, {}, current_floats())
    return record(cell, arguments).function


def _held(part: StateTree) -> tuple[int, int]:
    """Return the number of trainable elements, frozen ones included, and of other state."""
    sizes = [(p.role in LEARNT, prod(p.array.shape)) for p in part.parameters().values()]
    return sum(n for learnt, n in sizes if learnt), sum(n for learnt, n in sizes if not learnt)


def _outputs(function: Function) -> dict[str, str]:
    """Return the type of the last value of each part that others read, or that is a result."""
    results = dict(zip(function.result_names, function.results, strict=True))
    # A result with the name of a parameter is the next value of a buffer.
    own = {name: r for name, r in results.items() if name not in function.param_names}
    texts = {"": ", ".join(str(r.type) for r in own.values())}
    computed = drop_dead(function.with_(results=own.values(), result_names=own))
    readers: dict[Value | None, list[str]] = {value: [""] for value in computed.results}
    for node in computed.nodes:
        for value in node.inputs:
            readers.setdefault(value, []).append(node.meta.scope)
    for value, scope in _computed_in(computed).items():
        outside = [_scopes(reader) for reader in readers.get(value, ())]
        for path in _scopes(scope):
            if any(path not in paths for paths in outside):
                texts[path] = str(value.type)
    return texts


def _computed_in(function: Function) -> dict[Value, str]:
    """Return the scope of each value that depends on inputs or state, in order of computation.

    Constants and sizes are left out: they are shared, so others may read one of a part.
    """
    depends: set[Value | None] = set(function.params)
    scopes: dict[Value, str] = {}
    for node in function.nodes:
        if not depends.isdisjoint(node.inputs):
            depends.update(node.outputs)
            scopes |= dict.fromkeys(node.outputs, node.meta.scope)
    return scopes


def _scopes(scope: str) -> set[str]:
    """Return the paths of a part and of those around it: a, a.b, a.b.c."""
    return set(accumulate(scope.split("."), "{}.{}".format)) if scope else set()
