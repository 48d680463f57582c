"""The first difference between two functions: the one to encode, and the one decoded from it.

Encoding compares the two before anything is stored, so an encoding that would lose or change
something is refused when it is written.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from triplane.unified_ir.ir.arrays import raw
from triplane.unified_ir.ir.dims import Dim
from triplane.unified_ir.ir.graph import AttrValue, Function, Node, Value
from triplane.unified_ir.ir.types import type_of


def difference(a: Function, b: Function, compared_bytes: int) -> str:
    """Describe the first difference between two functions; "" if they are the same.

    Values are compared by position. Contents of constants above `compared_bytes` are not compared.
    """
    if (a.name, a.param_names, a.result_names) != (b.name, b.param_names, b.result_names):
        return f"the names of function {a.name!r}"
    if _types(a.params) != _types(b.params) or len(a.nodes) != len(b.nodes):
        return f"the parameters or the number of nodes of {a.name!r}"
    ours, theirs = _numbers(a), _numbers(b)
    for i, (x, y) in enumerate(zip(a.nodes, b.nodes, strict=True)):
        if text := _of_nodes(x, y, ours, theirs, compared_bytes):
            return f"node {i} ({x.op}): {text}"
    if [ours[r] for r in a.results] != [theirs[r] for r in b.results]:
        return f"the results of {a.name!r}"
    return ""


def _of_nodes(
    a: Node, b: Node, ours: Mapping[Value, int], theirs: Mapping[Value, int], compared_bytes: int
) -> str:
    if (a.op, a.meta, len(a.regions)) != (b.op, b.meta, len(b.regions)):
        return f"{a.op} {a.meta} becomes {b.op} {b.meta}"
    inputs = [None if v is None else ours[v] for v in a.inputs]
    if inputs != [None if v is None else theirs[v] for v in b.inputs]:
        return "its operands"
    if a.strategy != b.strategy:
        return f"its strategy, {a.strategy} becomes {b.strategy}"
    if _types(a.outputs) != _types(b.outputs):
        return f"its types, {_types(a.outputs)} become {_types(b.outputs)}"
    if a.attrs.keys() != b.attrs.keys():
        return f"its attributes, {sorted(a.attrs)} become {sorted(b.attrs)}"
    for name, value in a.attrs.items():
        if not _same(value, b.attrs[name], compared_bytes):
            return f"attribute {name!r}, {value} becomes {b.attrs[name]}"
    pairs = zip(a.regions, b.regions, strict=True)
    return next((d for f, g in pairs if (d := difference(f, g, compared_bytes))), "")


def _same(a: AttrValue | Dim, b: AttrValue | Dim, compared_bytes: int) -> bool:
    """Return whether two attributes are equal, numbers bit by bit."""
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        alike = type_of(a) == type_of(b)
        return alike and (a.nbytes > compared_bytes or raw(a) == raw(b))
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return False
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(
            _same(x, y, compared_bytes) for x, y in zip(a, b, strict=True)
        )
    if isinstance(a, float) and isinstance(b, float):
        return float.hex(a) == float.hex(b)
    return a == b and isinstance(a, float) == isinstance(b, float)


def _types(values: tuple[Value, ...]) -> list[object]:
    return [v.type for v in values]


def _numbers(function: Function) -> dict[Value, int]:
    values = (v for node in function.nodes for v in node.outputs)
    return {v: i for i, v in enumerate((*function.params, *values))}
