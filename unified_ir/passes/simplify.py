"""Rewrites of the forward function that keep every result and make its gradient cheaper."""

from __future__ import annotations

from collections import Counter

from triplane.unified_ir.ir.graph import Function, Node, Value
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.passes.clean import with_nodes


def uses(function: Function) -> Counter[Value]:
    """How often each value is read, results included."""
    count: Counter[Value] = Counter(v for node in function.nodes for v in node.inputs if v)
    count.update(function.results)
    return count


def cheaper_gradients(function: Function) -> Function:
    """All rewrites of this module."""
    return swish_of_product(pool_before_relu(function))


def swish_of_product(function: Function) -> Function:
    """Mul(x, Sigmoid(x)) -> Swish(x), as exporters write SiLU: its own rule takes fewer passes."""
    count = uses(function)
    producer = {v: node for node in function.nodes for v in node.outputs}
    nodes: list[Node] = []
    dropped: set[Node] = set()
    for node in function.nodes:
        for x, s in (node.inputs, node.inputs[::-1]) if node.op.name == "Mul" else ():
            gate = producer.get(s) if s is not None and count[s] == 1 else None
            if gate is not None and gate.op.name == "Sigmoid" and gate.inputs[0] is x:
                node = Node(TABLE["", "Swish"].id, (x,), node.outputs, {}, (), node.meta)
                dropped.add(gate)
                break
        nodes.append(node)
    kept = [n for n in nodes if n not in dropped]
    return with_nodes(function, kept, function.results) if dropped else function


def pool_before_relu(function: Function) -> Function:
    """MaxPool(Relu(x)) -> Relu(MaxPool(x)): equal for every x, on a plane k*k times smaller.

    Equal in the gradient too: where a window's maximum is positive both pick its first position,
    elsewhere both give zero.
    """
    count = uses(function)
    producer = {v: node for node in function.nodes for v in node.outputs}
    nodes: list[Node] = []
    moved: set[Value] = set()
    for node in function.nodes:
        relu = (
            producer.get(node.inputs[0]) if node.op.name == "MaxPool" and node.inputs[0] else None
        )
        if relu is None or relu.op.name != "Relu" or len(node.outputs) != 1:
            nodes.append(node)
            continue
        if count[relu.outputs[0]] != 1:
            nodes.append(node)
            continue
        (pooled,) = node.outputs
        raw = Value(pooled.type)
        nodes.append(Node(node.op, relu.inputs, (raw,), node.attrs, (), node.meta))
        nodes.append(Node(relu.op, (raw,), (pooled,), relu.attrs, (), relu.meta))
        moved.add(relu.outputs[0])
    kept = [n for n in nodes if not (n.op.name == "Relu" and n.outputs[0] in moved)]
    return with_nodes(function, kept, function.results) if moved else function
