"""float16 arithmetic as a machine without float16 kernels can do it: float32, rounded after each.

Left alone, onnxruntime casts around such nodes by itself, and then drops every pair of casts
between two of them: values would neither be rounded nor overflow, unlike on the machine that the
graph is for. Sums inside one operator are in float32, as on a matrix unit.
"""

from __future__ import annotations

from triplane.unified_ir.ir.graph import Function, Node, Value
from triplane.unified_ir.ir.types import float16, float32
from triplane.unified_ir.ops.table import TABLE


def widen_half(function: Function) -> Function:
    """The function with casts around a float32 node for each that computes float16 of float16."""
    if not any(v.type.dtype == float16 for n in function.walk() for v in n.outputs):
        return function
    nodes: list[Node] = []
    wide: dict[Value, Value] = {}
    for node in function.nodes:
        _add(node, nodes, wide)
    return Function(
        function.name, function.params, function.results, function.result_names, tuple(nodes)
    )


def _add(node: Node, nodes: list[Node], wide: dict[Value, Value]) -> None:
    regions = tuple(widen_half(r) for r in node.regions)
    halves = [v for v in node.outputs if v.type.dtype == float16]
    reads = any(v is not None and v.type.dtype == float16 for v in node.inputs)
    if regions or node.op.name == "Cast" or not (halves and reads):
        nodes.append(Node(node.op, node.inputs, node.outputs, node.attrs, regions, node.meta))
        return
    inputs = tuple(None if v is None else _widened(v, node, nodes, wide) for v in node.inputs)
    made = {v: Value(v.type.with_dtype(float32)) for v in halves}
    outputs = tuple(made.get(v, v) for v in node.outputs)
    nodes.append(Node(node.op, inputs, outputs, node.attrs, (), node.meta))
    nodes.extend(_cast(made[v], v, node) for v in halves)


def _widened(value: Value, node: Node, nodes: list[Node], wide: dict[Value, Value]) -> Value:
    if value.type.dtype != float16:
        return value
    if value not in wide:
        wide[value] = Value(value.type.with_dtype(float32))
        nodes.append(_cast(value, wide[value], node))
    return wide[value]


def _cast(given: Value, made: Value, node: Node) -> Node:
    to = {"to": made.type.dtype.onnx}
    return Node(TABLE["", "Cast"].id, (given,), (made,), to, (), node.meta)
