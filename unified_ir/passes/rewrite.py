"""Rewriting a function: node by node (`Rewriter`), or where a rule finds a pattern (`apply_rule`).

Both return a new function with the old signature. Values that stay keep their identity, so a value
of the old function can be looked up in the new one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count, filterfalse

import numpy as np

from triplane.unified_ir.ir.graph import AttrValue, Function, Meta, Node, Value
from triplane.unified_ir.ir.types import DType
from triplane.unified_ir.ops.build import expansion, note_contents
from triplane.unified_ir.ops.inline import introduced_sizes, with_new_sizes
from triplane.unified_ir.ops.row import Known
from triplane.unified_ir.ops.table import TABLE, row_of
from triplane.unified_ir.passes.clean import drop_dead


class Rewriter:
    """Builds the nodes of one new function; a subclass overrides `visit` to replace nodes."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.env: dict[Value, Value] = {}
        """Replacements for values of nodes that were replaced."""
        self.contents: dict[Value, Known] = {}
        self._casts: dict[tuple[Value, DType], Value] = {}
        self._tags: Iterator[str] = iter(())

    def visit(self, node: Node) -> None:
        """Add the nodes that replace `node`; here the node itself."""
        self.keep(node)

    def rewrite(self, function: Function, tags: Iterator[str] | None = None) -> Function:
        """Return the function made of the nodes that `visit` adds.

        tags: unused beginnings for names of sizes; by default, those that the function leaves.
        """
        self._tags = tags or _unused_tags(function)
        for node in function.nodes:
            self.visit(node)
        results = (self.env.get(r, r) for r in function.results)
        return function.with_(results=results, nodes=self.nodes)

    def region(self, function: Function) -> Function:
        """Rewrite a region in the same way."""
        # A new rewriter of the same class: regions are closed, so no replacement crosses their
        # border. Names of sizes do, so the tags are shared.
        return type(self)().rewrite(function, self._tags)

    def inputs(self, node: Node) -> list[Value | None]:
        """Return a node's operands in the new function."""
        return [None if v is None else self.env.get(v, v) for v in node.inputs]

    def keep(self, node: Node) -> None:
        """Keep the node, on its operands in the new function and with rewritten regions."""
        regions = tuple(map(self.region, node.regions))
        self.nodes.append(replace(node, inputs=tuple(self.inputs(node)), regions=regions))

    row = staticmethod(row_of)

    def body(self, node: Node) -> Function | None:
        """Return the node's body, a function of other rows; None if it has none."""
        return expansion(TABLE, node, self.contents)

    def note(self, node: Node) -> None:
        """Remember contents that bodies of later nodes read."""
        note_contents(row_of(node), node, self.contents)

    def spread(self, node: Node, body: Function) -> None:
        """Visit a body's nodes in place of the node."""
        # Bodies are recorded once and cached, so sizes that nodes in them introduce get new names
        # for each use: two data-dependent sizes of one name would count as equal.
        body = with_new_sizes(body, next(self._tags))
        present = [v for v in self.inputs(node) if v is not None]
        inner = dict(zip(body.params, present, strict=True))
        for part in body.nodes:
            outputs = tuple(Value(v.type) for v in part.outputs)
            operands = tuple(None if v is None else inner[v] for v in part.inputs)
            inner.update(zip(part.outputs, outputs, strict=True))
            meta = self.place_of(part, node)
            self.visit(replace(part, inputs=operands, outputs=outputs, meta=meta))
        for out, result in zip(node.outputs, body.results, strict=False):
            # `visit` may have replaced the value that stands for the result.
            self.env[out] = self.env.get(inner[result], inner[result])

    def place_of(self, part: Node, node: Node) -> Meta:
        """Return where a node of the body of `node` was written: by default where `node` was."""
        # A body that is recorded once has the place of its first use.
        return node.meta

    def cast(self, value: Value, dtype: DType, origin: Node) -> Value:
        """Return the value in another element type, converted once however many nodes read it."""
        if (value, dtype) not in self._casts:
            self._casts[value, dtype] = Value(value.type.with_dtype(dtype))
            self.convert(value, self._casts[value, dtype], origin)
        return self._casts[value, dtype]

    def convert(self, value: Value, output: Value, origin: Node) -> None:
        """Add the Cast from `value` to `output`."""
        self.nodes.append(node_of("Cast", (value,), output, origin, to=output.type.dtype.onnx))


def _unused_tags(function: Function) -> Iterator[str]:
    introduced = (name for node in function.walk() for name in introduced_sizes(node))
    taken = {name.rpartition("_")[0] for name in introduced}
    # Not `inner_`, which emission uses for the bodies that it opens later.
    return filterfalse(taken.__contains__, map("body_{}".format, count()))


def node_of(
    op: str, inputs: tuple[Value, ...], output: Value, origin: Node, **attrs: AttrValue
) -> Node:
    """Return a node of an ONNX operator with one output, located where `origin` is."""
    return Node(TABLE["", op].id, inputs, (output,), attrs, (), origin.meta)


@dataclass(frozen=True, slots=True)
class View:
    """A function's nodes by the values they produce, and how often each value is read."""

    producer: Mapping[Value, Node]
    count: Mapping[Value, int]

    def node(self, value: Value | None, op: str) -> Node | None:
        """Return the node `op` that produces `value`, if `value` is read only once."""
        # A node with other readers has to stay, so replacing it together with its user saves
        # nothing.
        producer = None if value is None or self.count[value] != 1 else self.producer.get(value)
        return producer if producer is not None and producer.op.name == op else None

    def scalar(self, value: Value | None) -> float | None:
        """Return the number in a constant scalar; None if `value` is no constant scalar."""
        producer = None if value is None else self.producer.get(value)
        if producer is None or producer.op.name != "Constant" or producer.outputs[0].type.rank:
            return None
        return float(np.asarray(producer.attrs["value"]))


Rule = Callable[[View, Node], list[Node] | None]
"""(the function, one of its nodes) -> nodes that replace it; None if the rule does not apply."""


def apply_rule(function: Function, rule: Rule) -> Function:
    """Apply a rule to every node of the function, and drop the nodes that this leaves dead."""
    # Rules see the old function only, so the order of nodes does not change what they find.
    view = View(function.producers(), function.reads())
    parts = [rule(view, node) for node in function.nodes]
    if all(part is None for part in parts):
        return function
    pairs = zip(function.nodes, parts, strict=True)
    return drop_dead(
        function.with_(
            nodes=(n for node, part in pairs for n in ([node] if part is None else part))
        )
    )
