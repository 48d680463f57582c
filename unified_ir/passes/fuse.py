"""Fusions for a runtime whose Gemm is Y = alpha A B + beta C (onnxruntime's among them).

They save passes over large weights: an update `w - lr * (a^T b)` becomes one Gemm that reads `w` as
its C, and so does a momentum `m v + a^T b`. Results differ from the unfused ones by rounding only.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from triplane.unified_ir.ir.graph import Function, Node, Value
from triplane.unified_ir.ir.types import TensorSpec, float32, int64
from triplane.unified_ir.passes.planes import merge_planes
from triplane.unified_ir.passes.rewrite import View, apply_rule, node_of

LARGE_SIDE: Final = 512
"""A weight matrix with at least this many rows and columns becomes the left operand."""


def fuse(function: Function) -> Function:
    """Apply all fusions of this module, and merge the tiny planes of a batch."""
    return merge_planes(large_weights_left(fuse_updates(function)))


def fuse_updates(function: Function) -> Function:
    """Fuse Sub(w, Mul(Gemm(a, b), lr)) and Add(Mul(v, m), Gemm(a, b)), lr and m being constants."""
    return apply_rule(
        function, lambda view, node: _as_update(view, node) or _as_momentum(view, node)
    )


def _plain_gemm(view: View, value: Value | None) -> Node | None:
    """Return the Gemm without C that produces the float32 `value`, if nothing else reads it."""
    product = view.node(value, "Gemm")
    plain = product is not None and len(product.inputs) == 2
    # ONNX declares alpha and beta as float (32 bits), so a float64 rate would lose digits in them.
    # A product with other readers is computed anyway, and fusing it would do the work twice.
    return product if plain and value is not None and value.type.dtype == float32 else None


def _as_update(view: View, node: Node) -> list[Node] | None:
    if node.op.name != "Sub":
        return None
    weight, step = node.inputs
    scaled = view.node(step, "Mul")
    if scaled is None or weight is None:
        return None
    for gradient, rate in (scaled.inputs, scaled.inputs[::-1]):
        product, lr = _plain_gemm(view, gradient), view.scalar(rate)
        if product is not None and lr is not None and _alike(product, weight, node):
            # w - lr (a b) = -lr (a b) + 1 w
            return [_onto(product, weight, node, alpha=-lr, beta=1.0)]
    return None


def _as_momentum(view: View, node: Node) -> list[Node] | None:
    if node.op.name != "Add":
        return None
    for kept, gradient in (node.inputs, node.inputs[::-1]):
        decayed, reshaped = view.node(kept, "Mul"), view.node(gradient, "Reshape")
        product = _plain_gemm(view, gradient if reshaped is None else reshaped.inputs[0])
        if decayed is None or product is None:
            continue
        for velocity, factor in (decayed.inputs, decayed.inputs[::-1]):
            m = view.scalar(factor)
            if m is None or velocity is None:
                continue
            if reshaped is not None:
                alike = reshaped.outputs[0].type == velocity.type == node.outputs[0].type
                if alike and not product.outputs[0].type.symbols:
                    return _as_momentum_of_matrix(product, reshaped, velocity, node, m)
                continue
            if _alike(product, velocity, node):
                # m v + a b = 1 (a b) + m v
                return [_onto(product, velocity, node, alpha=1.0, beta=m)]
    return None


def _as_momentum_of_matrix(
    product: Node, reshaped: Node, velocity: Value, node: Node, m: float
) -> list[Node]:
    """Fuse a product that is reshaped to the velocity's type, such as a 1 x 1 kernel's gradient."""
    matrix = product.outputs[0].type
    sizes = Value(TensorSpec((2,), int64))
    flat, moved = Value(matrix), Value(matrix)
    # The Gemm works on matrices, so the velocity is flattened for it and the result gets its shape
    # back. Reshape copies nothing; both sizes are static.
    at = replace(product, outputs=(moved,), meta=node.meta)
    return [
        node_of("Constant", (), sizes, node, value=np.array(matrix.concrete({}))),
        Node(reshaped.op, (velocity, sizes), (flat,), reshaped.attrs, (), node.meta),
        _onto(product, flat, at, alpha=1.0, beta=m),
        Node(reshaped.op, (moved, reshaped.inputs[1]), node.outputs, reshaped.attrs, (), node.meta),
    ]


def _alike(product: Node, base: Value, node: Node) -> bool:
    """Return whether nothing broadcasts, except possibly factors."""
    # Gemm broadcasts C but not the product, and Sub and Add broadcast both; equal types exclude
    # both.
    return product.outputs[0].type == base.type == node.outputs[0].type


def _onto(product: Node, base: Value, node: Node, *, alpha: float, beta: float) -> Node:
    """Return the Gemm alpha * product + beta * base, with the outputs of `node`."""
    scale = float(product.attrs.get("alpha", 1.0)) * alpha  # type: ignore[arg-type]
    attrs = {**product.attrs, "alpha": scale, "beta": beta}
    inputs = (*product.inputs, base)
    return Node(product.op, inputs, node.outputs, dict(sorted(attrs.items())), (), node.meta)


def large_weights_left(function: Function) -> Function:
    """Rewrite Gemm(x, w, b) with a large w, transposed or not, as Transpose(op(w) x^T) + b.

    A matrix product packs its right operand. With a small batch, packing the weights costs as much
    as the product itself; as the left operand they are read in place.
    """
    return apply_rule(function, _weight_left)


def _weight_left(view: View, node: Node) -> list[Node] | None:
    if node.op.name != "Gemm" or node.attrs.keys() - {"transB"}:
        return None
    x, w = node.inputs[0], node.inputs[1]
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    # Only parameters, which are read in place; the result of a node is no weight.
    if x is None or w is None or w in view.producer:
        return None
    if not all(isinstance(d, int) and d >= LARGE_SIDE for d in w.type.shape):
        return None
    nodes: list[Node] = []
    if not node.attrs.get("transB"):
        w = _transposed(nodes, w, node)
    (y,) = node.outputs
    # op(w) is (N, K) and x is (M, K), so the product is y transposed: (N, M).
    product = Value(y.type.with_shape(y.type.shape[::-1]))
    nodes.append(node_of("MatMul", (w, _transposed(nodes, x, node)), product, node))
    if bias is None:
        nodes.append(node_of("Transpose", (product,), y, node, perm=(1, 0)))
    else:
        nodes.append(node_of("Add", (_transposed(nodes, product, node), bias), y, node))
    return nodes


def _transposed(nodes: list[Node], x: Value, origin: Node) -> Value:
    flipped = Value(x.type.with_shape(x.type.shape[::-1]))
    nodes.append(node_of("Transpose", (x,), flipped, origin, perm=(1, 0)))
    return flipped
