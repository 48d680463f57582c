"""Rewriting a function: node by node (`Rewriter`), or where a rule finds a pattern (`rewritten`).

Both give a new function with the old signature. Values that stay keep their identity, so whoever
holds one of the old function finds it in the new one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from triplane.unified_ir.ir.graph import AttrValue, Function, Node, Value
from triplane.unified_ir.ir.types import DType
from triplane.unified_ir.ops.build import expansion, note_contents
from triplane.unified_ir.ops.inline import renewed
from triplane.unified_ir.ops.row import Known, Op
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.passes.clean import drop_dead


class Rewriter:
    """The nodes of one new function so far. A subclass says in `visit` what becomes of a node."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.env: dict[Value, Value] = {}
        """What stands for values of nodes that were replaced."""
        self.contents: dict[Value, Known] = {}
        self._casts: dict[tuple[Value, DType], Value] = {}

    def visit(self, node: Node) -> None:
        """Adds what becomes of a node; here the node itself."""
        self.keep(node)

    def rewrite(self, function: Function) -> Function:
        """The function of the nodes that `visit` adds."""
        for node in function.nodes:
            self.visit(node)
        results = (self.env.get(r, r) for r in function.results)
        return function.with_(results=results, nodes=self.nodes)

    def region(self, function: Function) -> Function:
        """A region, rewritten in the same way."""
        return type(self)().rewrite(function)

    def inputs(self, node: Node) -> list[Value | None]:
        """What stands for a node's operands."""
        return [None if v is None else self.env.get(v, v) for v in node.inputs]

    def keep(self, node: Node) -> None:
        """The node on what stands for its operands, its regions rewritten."""
        regions = tuple(self.region(r) for r in node.regions)
        self.nodes.append(replace(node, inputs=tuple(self.inputs(node)), regions=regions))

    def row(self, node: Node) -> Op:
        """The row of a node's operator."""
        return TABLE[node.op.domain, node.op.name]

    def body(self, node: Node) -> Function | None:
        """A node of a body as a function of other rows, None where it has no other form."""
        return expansion(TABLE, node, self.contents)

    def note(self, node: Node) -> None:
        """Remembers contents that bodies of later nodes read."""
        note_contents(self.row(node), node, self.contents)

    def spread(self, node: Node, body: Function) -> None:
        """A body's nodes in place of the node, each of them visited."""
        body = renewed(body, f"inner_{len(self.nodes)}")
        present = [v for v in self.inputs(node) if v is not None]
        inner = dict(zip(body.params, present, strict=True))
        for part in body.nodes:
            outputs = tuple(Value(v.type) for v in part.outputs)
            operands = tuple(None if v is None else inner[v] for v in part.inputs)
            inner.update(zip(part.outputs, outputs, strict=True))
            self.visit(replace(part, inputs=operands, outputs=outputs, meta=node.meta))
        for out, result in zip(node.outputs, body.results, strict=False):
            self.env[out] = self.env.get(inner[result], inner[result])

    def cast(self, value: Value, dtype: DType, origin: Node) -> Value:
        """The value in another element type, converted once however many nodes read it."""
        if (value, dtype) not in self._casts:
            self._casts[value, dtype] = Value(value.type.with_dtype(dtype))
            self.convert(value, self._casts[value, dtype], origin)
        return self._casts[value, dtype]

    def convert(self, value: Value, output: Value, origin: Node) -> None:
        """Adds the Cast that makes `output` of `value`."""
        self.nodes.append(node_of("Cast", (value,), output, origin, to=output.type.dtype.onnx))


def node_of(
    op: str, inputs: tuple[Value, ...], output: Value, origin: Node, **attrs: AttrValue
) -> Node:
    """A node of an ONNX operator with one output, at the place of another node."""
    return Node(TABLE["", op].id, inputs, (output,), attrs, (), origin.meta)


@dataclass(frozen=True, slots=True)
class View:
    """A function's nodes by what they produce, with use counts."""

    producer: Mapping[Value, Node]
    count: Mapping[Value, int]

    def node(self, value: Value | None, op: str) -> Node | None:
        """The node `op` that makes `value`, if nothing else reads it."""
        producer = self.producer.get(value) if value is not None else None
        alone = producer is not None and value is not None and self.count[value] == 1
        return producer if alone and producer is not None and producer.op.name == op else None

    def scalar(self, value: Value | None) -> float | None:
        """The value of a constant scalar."""
        producer = self.producer.get(value) if value is not None else None
        if (
            producer is None
            or producer.op.name != "Constant"
            or producer.outputs[0].type.shape != ()
        ):
            return None
        return float(np.asarray(producer.attrs["value"]))


Rule = Callable[[View, Node], list[Node] | None]
"""(the function, one of its nodes) -> nodes in its place, None where the rule does not apply."""


def rewritten(function: Function, rule: Rule) -> Function:
    """The function with what the rule puts in place of nodes, without nodes that this left dead."""
    view = View(function.producers(), function.reads())
    parts = [rule(view, node) for node in function.nodes]
    if all(part is None for part in parts):
        return function
    nodes: list[Node] = []
    for node, part in zip(function.nodes, parts, strict=True):
        nodes.extend([node] if part is None else part)
    return drop_dead(function.with_(nodes=nodes))
