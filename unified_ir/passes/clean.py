"""Passes that never change a result: common subexpressions, dead nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from triplane.unified_ir.ir.dims import symbols
from triplane.unified_ir.ir.graph import Function, Node, Value
from triplane.unified_ir.ops.inline import introduced
from triplane.unified_ir.ops.table import TABLE


def clean(function: Function) -> Function:
    """Each expression computed once, and only what the results need."""
    return drop_dead(share(function))


def drop_dead(function: Function) -> Function:
    """Without the nodes no result depends on; parameters stay, they are the signature.

    A node also stays whose output is the one place to read a size that another node needs.
    """
    needed: set[Value] = set(function.results)
    opens = any(introduced(node) for node in function.nodes)
    sizes: set[str] = set().union(*(r.type.symbols for r in function.results)) if opens else set()
    kept: list[Node] = []
    for node in reversed(function.nodes):
        if any(v in needed for v in node.outputs) or (opens and sizes & {*introduced(node)}):
            kept.append(node)
            needed.update(v for v in node.inputs if v is not None)
            if opens:
                sizes |= _sizes_of(node)
    return function.with_(nodes=kept[::-1])


def _sizes_of(node: Node) -> set[str]:
    """Symbols that a node's types, sizes and regions mention."""
    dims: Any = node.attrs.get("dims", ())
    sizes = set().union(*(symbols(d) for d in dims), *(v.type.symbols for v in node.outputs))
    return sizes.union(*(_sizes_of(inner) for r in node.regions for inner in r.nodes))


def share(function: Function) -> Function:
    """Equal nodes (same operator, operands, attributes; no regions, no draws) computed once."""
    env: dict[Value, Value] = {}
    seen: dict[Any, Node] = {}
    nodes: list[Node] = []
    for node in function.nodes:
        inputs = tuple(None if v is None else env.get(v, v) for v in node.inputs)
        key = (node.op, inputs, len(node.outputs), attrs_key(node)) if _shared(node) else None
        first = seen.get(key) if key is not None else None
        if first is not None:
            env.update(zip(node.outputs, first.outputs, strict=True))
            continue
        kept = node if inputs == node.inputs else replace(node, inputs=inputs)
        nodes.append(kept)
        if key is not None:
            seen[key] = kept
    return function.with_(nodes=nodes, results=(env.get(r, r) for r in function.results))


def _shared(node: Node) -> bool:
    row = TABLE.get((node.op.domain, node.op.name))
    return not node.regions and not (row is not None and row.nondeterministic)


def attrs_key(node: Node) -> Any:
    """Attributes as a hashable value, arrays by content."""
    return tuple(
        (k, (v.dtype.str, v.shape, v.tobytes()) if isinstance(v, np.ndarray) else v)
        for k, v in node.attrs.items()
    )
