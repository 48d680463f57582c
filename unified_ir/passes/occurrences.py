"""What repeats in a function of the IR, for people and other tools: as rows and as JSON.

Constants belong to whoever uses them, so they are no nodes here. A node is named by its place in
the function; edges run between nodes of one occurrence.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from triplane.unified_ir.ir.graph import Function, Node
from triplane.unified_ir.passes.repeats import LEAST_NODES, Listing, repeats

Occurrence = dict[str, list[Any]]


def repeated(function: Function, least_nodes: int = LEAST_NODES) -> dict[str, list[Occurrence]]:
    """`{block: [occurrence, ...]}`, the blocks in the order of the graph.

    An occurrence is `{"nodes": [[place, operator, line or None], ...], "edges": [[from, to],
    ...]}`; equal places in the lists of two occurrences of a block stand for each other.
    """
    nodes = [node for node in function.nodes if node.op.name != "Constant"]
    places = {id(node): i for i, node in enumerate(function.nodes)}
    listing = _listed(function, nodes)
    return {
        f"block_{number}": [
            _occurrence(nodes[s : s + block.length], places, listing, s) for s in block.starts
        ]
        for number, block in enumerate(repeats(listing, least_nodes))
    }


def _listed(function: Function, nodes: list[Node]) -> Listing:
    numbers: dict[int, int] = {}
    return Listing(
        labels=[_label(node) for node in nodes],
        inputs=[
            [-1 if v is None else numbers.setdefault(id(v), len(numbers)) for v in node.inputs]
            for node in nodes
        ],
        outputs=[[numbers.setdefault(id(v), len(numbers)) for v in n.outputs] for n in nodes],
        results=frozenset(numbers.setdefault(id(v), len(numbers)) for v in function.results),
    )


def _label(node: Node) -> Hashable:
    """What a node does; None for one with regions."""
    if node.regions:
        return None
    return (node.op, *sorted((name, _hashable(value)) for name, value in node.attrs.items()))


def _hashable(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{value.shape}{value.tobytes()!r}"
    return repr(value)


def _occurrence(nodes: list[Node], places: dict[int, int], listing: Listing, start: int) -> Any:
    record = {
        value: places[id(node)]
        for i, node in enumerate(nodes)
        for value in listing.outputs[start + i]
    }
    edges = [
        [record[value], places[id(node)]]
        for i, node in enumerate(nodes)
        for value in listing.inputs[start + i]
        if value in record
    ]
    rows = [
        [places[id(node)], str(node.op), str(node.meta.location) if node.meta.location else None]
        for node in nodes
    ]
    return {"nodes": rows, "edges": edges}
