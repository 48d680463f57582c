"""Repeated blocks of an IR function in a form for people and other tools, ready for JSON.

Constants belong to the nodes that read them, so they are not listed. A node is identified by its
place in the function; edges connect nodes of one occurrence.
"""

from __future__ import annotations

from typing import Any

from triplane.unified_ir.ir.graph import Function, Node
from triplane.unified_ir.passes.clean import attrs_key
from triplane.unified_ir.passes.repeats import LEAST_NODES, Listing, repeats

Occurrence = dict[str, list[Any]]


def repeated(function: Function, least_nodes: int = LEAST_NODES) -> dict[str, list[Occurrence]]:
    """Return `{block: [occurrence, ...]}`, the blocks in the order of the graph.

    An occurrence is `{"nodes": [[place, operator, line or None], ...], "edges": [[from, to],
    ...]}`; equal places in the lists of two occurrences of a block correspond to each other.
    """
    nodes = [node for node in function.nodes if node.op.name != "Constant"]
    places = {id(node): i for i, node in enumerate(function.nodes)}
    labels = [None if n.regions else (n.op, *sorted(attrs_key(n))) for n in nodes]
    listing, _ = Listing.of(
        labels, (n.inputs for n in nodes), (n.outputs for n in nodes), function.results
    )
    return {
        f"block_{number}": [
            _occurrence(nodes[s : s + block.length], places, listing, s) for s in block.starts
        ]
        for number, block in enumerate(repeats(listing, least_nodes))
    }


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
