"""Nodes in an order in which they can run, without those that nothing needs."""

from __future__ import annotations

from collections.abc import Sequence

from onnx import NodeProto

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.onnx.source import subgraphs_of


def needed_in_order(nodes: Sequence[NodeProto], outputs: Sequence[str]) -> list[NodeProto]:
    """Return the nodes that the outputs need, sorted; refuse cycles and names produced twice."""
    giver: dict[str, int] = {}
    for i, node in enumerate(nodes):
        for name in node.output:
            if name and giver.setdefault(name, i) != i:
                raise InvalidInput(f"two nodes produce the name {name[:80]!r}")
    reads = [_reads(node) for node in nodes]
    # Depth first with a stack of its own: a chain of 100,000 nodes would exceed Python's recursion.
    state = [0] * len(nodes)  # 0: unseen, 1: being visited, 2: in order
    order: list[int] = []
    for output in outputs:
        if output not in giver:
            continue
        stack = [(giver[output], iter(reads[giver[output]]))]
        while stack:
            i, rest = stack[-1]
            if state[i] == 2:
                stack.pop()
                continue
            state[i] = 1
            after = next((giver[r] for r in rest if r in giver and state[giver[r]] != 2), None)
            if after is None:
                state[i] = 2
                order.append(i)
                stack.pop()
            elif state[after] == 1:
                raise InvalidInput(f"the nodes {_cycle(nodes, stack, after)} depend on one another")
            else:
                stack.append((after, iter(reads[after])))
    # The file's order is kept if it is valid, so importing does not shuffle a graph.
    is_sorted = all(giver.get(r, i) <= i for i in order for r in reads[i])
    return [nodes[i] for i in (sorted(order) if is_sorted else order)]


def _cycle(nodes: Sequence[NodeProto], stack: Sequence[tuple[int, object]], first: int) -> str:
    inside = [i for i, _ in stack]
    names = [nodes[i].name or nodes[i].op_type for i in inside[inside.index(first) :]]
    return ", ".join(name[:80] for name in names[:4])


def _reads(node: NodeProto) -> list[str]:
    """Return the names that a node reads, also in its inner graphs."""
    names = [name for name in node.input if name]
    for graph in subgraphs_of(node):
        defined = {i.name for i in graph.input} | {t.name for t in graph.initializer}
        inner = [r for n in graph.node for r in _reads(n)] + [o.name for o in graph.output]
        defined |= {o for n in graph.node for o in n.output}
        names += [r for r in inner if r not in defined]
    return names
