"""Rewrites of the forward function that keep every result and make its gradient cheaper."""

from __future__ import annotations

from dataclasses import replace

from triplane.unified_ir.ir.graph import Function, Node, Value
from triplane.unified_ir.passes.rewrite import View, apply_rule, node_of


def cheaper_gradients(function: Function) -> Function:
    """Apply all rewrites of this module."""
    return swish_of_product(pool_before_relu(function))


def swish_of_product(function: Function) -> Function:
    """Rewrite Mul(x, Sigmoid(x)), the exported form of SiLU, as Swish(x) with its cheaper rule."""
    return apply_rule(function, _as_swish)


def _as_swish(view: View, node: Node) -> list[Node] | None:
    for x, s in (node.inputs, node.inputs[::-1]) if node.op.name == "Mul" else ():
        gate = view.node(s, "Sigmoid")
        # Read once only: another reader of the sigmoid would keep it, and nothing would be saved.
        if gate is not None and x is not None and gate.inputs[0] is x:
            return [node_of("Swish", (x,), node.outputs[0], node)]
    return None


def pool_before_relu(function: Function) -> Function:
    """Rewrite MaxPool(Relu(x)) as Relu(MaxPool(x)): equal results, on a k*k times smaller plane.

    The gradients are equal too: if a window's maximum is positive, both pick its first position;
    otherwise both are zero.
    """
    return apply_rule(function, _as_relu_of_pool)


def _as_relu_of_pool(view: View, node: Node) -> list[Node] | None:
    relu = view.node(node.inputs[0], "Relu") if node.op.name == "MaxPool" else None
    # Not with the second output: on windows without a positive value, the indices of a maximum over
    # zeros and over the original values differ.
    if relu is None or len(node.outputs) != 1:
        return None
    raw = Value(node.outputs[0].type)
    pool = replace(node, inputs=relu.inputs, outputs=(raw,))
    return [pool, replace(relu, inputs=(raw,), outputs=node.outputs)]
