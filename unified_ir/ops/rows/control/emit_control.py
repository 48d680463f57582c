"""Emission of branches and loops as ONNX subgraphs."""

from __future__ import annotations

from typing import Any

import numpy as np

from triplane.unified_ir.ir.graph import Node
from triplane.unified_ir.ops.emission import EmissionContext, first_number


def emit_cond(context: EmissionContext, node: Node) -> None:
    """An If, whose predicate is kept from being folded where another If is inside."""
    predicate, *operands = context.inputs(node)
    if any(n.op == node.op for region in node.regions for n in region.walk()):
        predicate = _open_question(context, node, predicate)
    context.add(
        "If",
        [predicate],
        context.output_names(node),
        then_branch=context.region(node.regions[0], operands, "then"),
        else_branch=context.region(node.regions[1], operands, "else"),
    )


def _open_question(context: EmissionContext, node: Node, predicate: str) -> str:
    """The predicate, joined with an operand in a way that changes nothing.

    Where onnxruntime 1.31 finds the predicates of two nested Ifs constant it puts the inner branch
    in place of its If, then the outer one, and fails: Graph::InlineIfSubgraph takes the nodes in
    the order of their making. A predicate that depends on an operand is no constant.
    """
    for value, name in zip(node.inputs, context.inputs(node), strict=True):
        if value is not None and value.type.dtype.is_float and context.held(name) is None:
            number = first_number(context, name)
            zero = context.constant(np.zeros((), value.type.dtype.numpy))
            positive = context.emit("Greater", number, zero)
            never = context.emit("And", positive, context.emit("Not", positive))
            return context.emit("Or", predicate, never)
    return predicate


def emit_scan(context: EmissionContext, node: Node) -> None:
    """A Scan whose captures are outer names."""
    n, m = int(node.attrs["num_carry"]), int(node.attrs["num_scanned"])  # type: ignore[arg-type]
    names = context.inputs(node)
    backwards = int(bool(node.attrs.get("reverse", 0)))
    stacked = len(node.outputs) - n
    attrs: dict[str, Any] = {"num_scan_inputs": m}
    if backwards:
        attrs["scan_input_directions"] = [1] * m
        if stacked:
            attrs["scan_output_directions"] = [1] * stacked
    body = context.subgraph(node.regions[0], n + m, names[n + m :])
    context.add("Scan", names[: n + m], context.output_names(node), body=body, **attrs)


def emit_loop(context: EmissionContext, node: Node) -> None:
    """A Loop whose captures are outer names."""
    n = int(node.attrs["num_carry"])  # type: ignore[arg-type]
    names = context.inputs(node)
    body = context.subgraph(node.regions[0], 2 + n, names[2 + n :])
    context.add("Loop", names[: 2 + n], context.output_names(node), body=body)
