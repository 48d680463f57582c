"""Passes that never change a result: share common subexpressions, drop dead nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from triplane.unified_ir.ir.dims import symbols
from triplane.unified_ir.ir.graph import Function, Node, Value
from triplane.unified_ir.ops.inline import introduced_sizes
from triplane.unified_ir.ops.table import TABLE


def clean(function: Function) -> Function:
    """Compute each expression once, and only what the results need."""
    return drop_dead(share(function))


def drop_dead(function: Function) -> Function:
    """Drop the nodes that no result depends on; parameters stay, because they are the signature.

    A node also stays if its output is the only place to read a size that another node needs.
    """
    needed: set[Value] = set(function.results)
    # A data-dependent size, such as the number of rows of NonZero, is defined only by the value
    # that first has it; types of later nodes mention it without reading that value.
    opens = any(introduced_sizes(node) for node in function.nodes)
    sizes: set[str] = set().union(*(r.type.symbols for r in function.results)) if opens else set()
    kept: list[Node] = []
    for node in reversed(function.nodes):
        if any(v in needed for v in node.outputs) or (opens and sizes & {*introduced_sizes(node)}):
            kept.append(node)
            needed.update(v for v in node.inputs if v is not None)
            if opens:
                sizes |= _sizes_of(node)
    return function.with_(nodes=kept[::-1])


def _sizes_of(node: Node) -> set[str]:
    """Return the symbols that a node's types, sizes and regions mention."""
    dims: Any = node.attrs.get("dims", ())
    sizes = set().union(*(symbols(d) for d in dims), *(v.type.symbols for v in node.outputs))
    return sizes.union(*(_sizes_of(inner) for r in node.regions for inner in r.nodes))


def share(function: Function) -> Function:
    """Compute equal nodes (operator, operands, attributes) once, except random ones and regions."""
    env: dict[Value, Value] = {}
    seen: dict[Any, Node] = {}
    nodes: list[Node] = []
    for node in function.nodes:
        inputs = tuple(None if v is None else env.get(v, v) for v in node.inputs)
        kept = first = node if inputs == node.inputs else replace(node, inputs=inputs)
        row = TABLE.get((node.op.domain, node.op.name))
        if not node.regions and not (row is not None and row.nondeterministic):
            # The number of outputs belongs to the key, because an operator may compute less if its
            # optional outputs are not asked for. Nodes with regions are left alone.
            key = node.op, inputs, len(node.outputs), attrs_key(node), node.strategy
            first = seen.setdefault(key, kept)
        if first is kept:
            nodes.append(kept)
        else:
            env.update(zip(node.outputs, first.outputs, strict=True))
    return function.with_(nodes=nodes, results=(env.get(r, r) for r in function.results))


def attrs_key(node: Node) -> Any:
    """Return a node's attributes as a hashable value, arrays by content."""
    # By bytes, not by ==: -0.0 and 0.0 are different constants, and a NaN is equal to itself.
    return tuple(
        (k, (v.dtype.str, v.shape, v.tobytes()) if isinstance(v, np.ndarray) else v)
        for k, v in node.attrs.items()
    )
