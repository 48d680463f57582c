"""Fusions for a runtime whose Gemm is Y = alpha A B + beta C (onnxruntime's among them).

They save passes over large weights: an update `w - lr * (a^T b)` becomes one Gemm that reads `w` as
its C, a momentum `m v + a^T b` likewise. Results differ from the unfused ones by rounding only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from triplane.unified_ir.ir.dims import Dim
from triplane.unified_ir.ir.graph import AttrValue, Function, Node, Value
from triplane.unified_ir.ir.types import TensorSpec, float32, int64
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.passes.clean import drop_dead, with_nodes
from triplane.unified_ir.passes.planes import merge_planes
from triplane.unified_ir.passes.simplify import uses

LARGE_SIDE: Final = 512
"""From this many rows and columns on, a weight matrix goes to the left of its product."""


def fuse(function: Function) -> Function:
    """All fusions of this module, and tiny planes of a batch as one."""
    return merge_planes(large_weights_left(fuse_updates(function)))


@dataclass(frozen=True, slots=True)
class _View:
    """A function's nodes by what they produce, with use counts."""

    producer: Mapping[Value, Node]
    count: Mapping[Value, int]

    def node(self, value: Value | None, op: str) -> Node | None:
        """The node `op` that makes `value`, if nothing else reads it."""
        made = self.producer.get(value) if value is not None else None
        alone = made is not None and value is not None and self.count[value] == 1
        return made if alone and made is not None and made.op.name == op else None

    def scalar(self, value: Value | None) -> float | None:
        """The value of a constant scalar."""
        made = self.producer.get(value) if value is not None else None
        if made is None or made.op.name != "Constant" or made.outputs[0].type.shape != ():
            return None
        return float(np.asarray(made.attrs["value"]))


def _view(function: Function) -> _View:
    producer = {v: node for node in function.nodes for v in node.outputs}
    return _View(producer, uses(function))


def fuse_updates(function: Function) -> Function:
    """Sub(w, Mul(Gemm(a, b), lr)) and Add(Mul(v, m), Gemm(a, b)) with constant lr and m."""
    return _rewrite(function, lambda view, node: _as_update(view, node) or _as_momentum(view, node))


def _rewrite(function: Function, rule: Callable[[_View, Node], list[Node] | None]) -> Function:
    view = _view(function)
    nodes: list[Node] = []
    changed = False
    for node in function.nodes:
        made = rule(view, node)
        changed = changed or made is not None
        nodes.extend([node] if made is None else made)
    if not changed:
        return function
    return drop_dead(with_nodes(function, nodes, function.results))


def _plain_gemm(view: _View, value: Value | None) -> Node | None:
    """A Gemm without C whose result is read once; float32, which is what its attributes hold."""
    found = view.node(value, "Gemm")
    plain = found is not None and len(found.inputs) == 2
    return found if plain and value is not None and value.type.dtype == float32 else None


def _as_update(view: _View, node: Node) -> list[Node] | None:
    if node.op.name != "Sub":
        return None
    weight, step = node.inputs
    scaled = view.node(step, "Mul")
    if scaled is None or weight is None:
        return None
    for gradient, rate in (scaled.inputs, scaled.inputs[::-1]):
        product, lr = _plain_gemm(view, gradient), view.scalar(rate)
        if product is not None and lr is not None and _alike(product, weight, node):
            return [_onto(product, weight, node, alpha=-lr, beta=1.0)]
    return None


def _as_momentum(view: _View, node: Node) -> list[Node] | None:
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
                return [_onto(product, velocity, node, alpha=1.0, beta=m)]
    return None


def _as_momentum_of_matrix(
    product: Node, reshaped: Node, velocity: Value, node: Node, m: float
) -> list[Node]:
    """A product that is reshaped to the velocity's type, such as a 1 x 1 kernel's gradient."""
    matrix = product.outputs[0].type
    sizes = Value(TensorSpec((2,), int64))
    flat, moved = Value(matrix), Value(matrix)
    at = Node(product.op, product.inputs, (moved,), product.attrs, (), node.meta)
    shape: dict[str, AttrValue] = {"value": np.array(matrix.concrete({}))}
    return [
        Node(TABLE["", "Constant"].id, (), (sizes,), shape, (), node.meta),
        Node(reshaped.op, (velocity, sizes), (flat,), reshaped.attrs, (), node.meta),
        _onto(product, flat, at, alpha=1.0, beta=m),
        Node(reshaped.op, (moved, reshaped.inputs[1]), node.outputs, reshaped.attrs, (), node.meta),
    ]


def _alike(product: Node, base: Value, node: Node) -> bool:
    """Whether nothing broadcasts but, at most, factors."""
    return product.outputs[0].type == base.type == node.outputs[0].type


def _onto(product: Node, base: Value, node: Node, *, alpha: float, beta: float) -> Node:
    """The Gemm `product` scaled by alpha and added to beta * base, as the outputs of `node`."""
    scale = float(product.attrs.get("alpha", 1.0)) * alpha  # type: ignore[arg-type]
    attrs = {**product.attrs, "alpha": scale, "beta": beta}
    inputs = (*product.inputs, base)
    return Node(product.op, inputs, node.outputs, dict(sorted(attrs.items())), (), node.meta)


def large_weights_left(function: Function) -> Function:
    """Gemm(x, w, b) with a large w, transposed or not -> Transpose(op(w) x^T) + b.

    A matrix product packs its right operand; with a small batch, packing the weights costs as much
    as the product, and as the left operand they are read in place.
    """
    return _rewrite(function, _weight_left)


def _weight_left(view: _View, node: Node) -> list[Node] | None:
    if node.op.name != "Gemm" or node.attrs.keys() - {"transB"}:
        return None
    x, w = node.inputs[0], node.inputs[1]
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if x is None or w is None or not _large(w.type.shape) or w in view.producer:
        return None
    made: list[Node] = []
    if not node.attrs.get("transB"):
        w = _transposed(made, w, node)
    (y,) = node.outputs
    product = Value(y.type.with_shape(y.type.shape[::-1]))
    made.append(_node("MatMul", (w, _transposed(made, x, node)), product, node))
    if bias is None:
        made.append(_node("Transpose", (product,), y, node))
    else:
        made.append(_node("Add", (_transposed(made, product, node), bias), y, node))
    return made


def _transposed(made: list[Node], x: Value, origin: Node) -> Value:
    flipped = Value(x.type.with_shape(x.type.shape[::-1]))
    made.append(_node("Transpose", (x,), flipped, origin))
    return flipped


def _large(shape: tuple[Dim, ...]) -> bool:
    return all(isinstance(d, int) and d >= LARGE_SIDE for d in shape)


def _node(op: str, inputs: tuple[Value, ...], output: Value, origin: Node) -> Node:
    attrs: dict[str, AttrValue] = {"perm": (1, 0)} if op == "Transpose" else {}
    return Node(TABLE["", op].id, inputs, (output,), attrs, (), origin.meta)
