"""The products that run on integers, and the tensors that therefore need a scale.

A *site* is a tensor that is rounded to integers once, where it is computed, for all its readers. A
node that only moves or compares elements shares the site of its operand. A ReLU or Clip at 0 is
dropped: with z = q_min the integers cannot go below 0, and maximum and layout commute with that.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeVar

from triplane.unified_ir.ir.graph import Array, Node, Value
from triplane.unified_ir.ir.types import float32
from triplane.unified_ir.onnx import DYNAMIC_LSTM
from triplane.unified_ir.ops.row import IntegerForm
from triplane.unified_ir.ops.table import TABLE, row_of
from triplane.unified_ir.passes.frozen import Frozen

T = TypeVar("T")

FACTORS: Final = (1e-6, 1e6)
"""Range of the factors by which a scale is multiplied and still fits float32."""

FOLLOWING: Final = frozenset(
    {IntegerForm.COPY, IntegerForm.PART, IntegerForm.MIX, IntegerForm.CLAMP}
)
"""Forms that stay on integers between integer tensors."""

MIN_WEIGHTS: Final = 2**14
"""Fewest weights of a direction of an LSTM on integers: below, rounding the input and the state in
each step costs more than the products save (decision 0043)."""

IN_PARTS: Final = frozenset(
    row.name for row in TABLE.values() if row.integer_form is IntegerForm.IN_PARTS
)
"""Operators without an integer kernel whose parts, sums and products by a constant, have them."""


@dataclass(frozen=True, slots=True, eq=False)
class WeightProduct:
    """A node whose weight is known: `axis` counts output channels; bias: (C,) or None."""

    weight: Array
    axis: int
    bias: Array | None


Gates = tuple[Array, Array]
"""Weights of an LSTM, (directions, 4 hidden, inputs) and (directions, 4 hidden, hidden)."""


@dataclass(slots=True)
class Sites:
    """The integer form of each tensor and product.

    root: site of each rounded tensor. clamps: by site, the largest value after a dropped ReLU
    (infinity) or Clip; the smallest is 0. products: None where both operands are activations.
    gates: of each LSTM on integer weights, whose operands are no sites: the runtime rounds them by
    the range that they have in each step. refused: why a product stays in float. dropped: ReLUs and
    Clips that are left out. scaled: for each product with a number, the tensor and the number; it
    is the same integers with another scale.
    """

    root: dict[Value, Value] = field(default_factory=dict)
    clamps: dict[Value, float] = field(default_factory=dict)
    products: dict[Node, WeightProduct | None] = field(default_factory=dict)
    gates: dict[Node, Gates] = field(default_factory=dict)
    refused: dict[Node, str] = field(default_factory=dict)
    dropped: set[Node] = field(default_factory=set)
    scaled: dict[Node, tuple[Value, float]] = field(default_factory=dict)

    @property
    def roots(self) -> list[Value]:
        """The sites, in the order of the function."""
        return list(dict.fromkeys(self.root.values()))

    @property
    def integer(self) -> set[Node]:
        """The nodes that multiply on integers."""
        return {*self.products, *self.gates}


def find_sites(frozen: Frozen, operators: Collection[str] = ()) -> Sites:
    """Return the sites of a function whose nodes are already folded.

    operators: operators beyond ai.onnx that the target's runtime has.
    """
    return _Finder(frozen, operators).sites


def first_input(node: Node) -> Value:
    """Return the first operand of a node that has one."""
    x = node.inputs[0]
    assert x is not None
    return x


class _Finder:
    def __init__(self, frozen: Frozen, operators: Collection[str]) -> None:
        self.sites = Sites()
        self.known = frozen.known()
        self.uses = frozen.function.reads()
        self.producer = frozen.function.producers()
        # Products first: whether a tensor is wanted in integers depends on its readers, so the
        # second pass needs all of them.
        for node in frozen.function.nodes:
            form = row_of(node).integer_form
            if form is IntegerForm.PRODUCT:
                self.sort(node, _product(node, self.known), self.sites.products)
            elif form is IntegerForm.RECURRENT:
                self.sort(node, _gates(node, self.known, operators), self.sites.gates)
        self.wanted = self.find_wanted(frozen.function.nodes)
        for node in frozen.function.nodes:
            self.visit(node)

    def sort(self, node: Node, product: T | str, integer: dict[Node, T]) -> None:
        """Add a node to those on integers, or to the refused ones where it has a reason instead."""
        if isinstance(product, str):
            self.sites.refused[node] = product
        else:
            integer[node] = product

    def operands(self, node: Node) -> tuple[Value, ...]:
        """Return the activations of a product."""
        count = 2 if self.sites.products[node] is None else 1
        return tuple(v for v in node.inputs[:count] if v is not None)

    def find_wanted(self, nodes: tuple[Node, ...]) -> set[Value]:
        """Return the values that an integer product reads, also through nodes on integers."""
        wanted: set[Value] = set()
        # Backward, so that a chain of nodes between two products is followed to its beginning.
        for node in reversed(nodes):
            if node in self.sites.products:
                wanted.update(self.operands(node))
            elif row_of(node).integer_form in FOLLOWING and wanted.intersection(node.outputs):
                wanted.update(v for v in node.inputs if v is not None)
        return wanted

    def visit(self, node: Node) -> None:
        """Mark the sites around one node."""
        y = node.outputs[0]
        form = row_of(node).integer_form
        if node in self.sites.products:
            for x in self.operands(node):
                self.sites.root.setdefault(x, x)
            # The integer kernel of Conv writes integers only; those of MatMul and Gemm may write
            # floats.
            if node.op.name == "Conv" or y in self.wanted:
                self.sites.root[y] = y
        elif (
            node.inputs
            and node.inputs[0] in self.sites.root
            and (
                # A MaxPool with indices is left out: an output that is no float has no site.
                (form is IntegerForm.COPY and all(v.type.dtype == float32 for v in node.outputs))
                or (form is IntegerForm.PART and self.wanted.intersection(node.outputs))
            )
        ):
            root = self.sites.root[first_input(node)]
            self.sites.root.update(dict.fromkeys(node.outputs, root))
        elif form is IntegerForm.MIX and y in self.wanted and self.mixes_sites(node):
            self.sites.root[y] = y
            if (scaled := self.scaled(node)) is not None:
                self.sites.scaled[node] = scaled
        elif form is IntegerForm.CLAMP:
            self.clamp(node)

    def mixes_sites(self, node: Node) -> bool:
        """Return whether a kernel exists, each operand is a site or constant, and one is a site."""
        if any(d != 1 for d in node.attrs.get("dilations") or ()):  # type: ignore[union-attr]
            return False  # QLinearAveragePool has no dilations
        xs = [v for v in node.inputs if v is not None]
        return any(x in self.sites.root for x in xs) and all(
            x in self.sites.root or (x in self.known and self.known[x].dtype == "float32")
            for x in xs
        )

    def scaled(self, node: Node) -> tuple[Value, float] | None:
        """Return the operand and the factor of a product with a positive number."""
        y = node.outputs[0]
        if node.op.name != "Mul":
            return None
        for x, factor in (node.inputs, node.inputs[::-1]):
            if x in self.sites.root and x.type == y.type and factor in self.known:
                array = self.known[factor]
                if array.size == 1 and FACTORS[0] <= (number := float(array.item())) <= FACTORS[1]:
                    return x, number
        return None

    def clamp(self, node: Node) -> None:
        """Drop a ReLU if the values from its site up to it have no other reader.

        The rounding of the site then clamps, so a product with a number keeps its own rounding.
        """
        x = first_input(node)
        top = _top(node, self.known)
        if x not in self.sites.root or top is None or not self.alone(x):
            return
        root = self.sites.root[x]
        self.sites.clamps[root] = min(top, self.sites.clamps.get(root, math.inf))
        self.sites.dropped.add(node)
        self.sites.scaled.pop(self.producer[root], None)
        self.sites.root[node.outputs[0]] = root

    def alone(self, x: Value) -> bool:
        """Return whether each value from the site to `x` has one reader, and a node computes it."""
        root = self.sites.root[x]
        # Another reader of a value on the way would see values below 0 disappear.
        while self.uses[x] == 1 and x in self.producer:
            if x is root:
                return True
            if len(self.producer[x].outputs) > 1:
                return False  # its other outputs share the site
            x = first_input(self.producer[x])
        return False


def _top(node: Node, known: Mapping[Value, Array]) -> float | None:
    """Return the upper limit of a ReLU, or of a Clip from 0 to a constant; None for others."""
    if node.op.name == "Relu":
        return math.inf
    low, top = [*node.inputs[1:], None, None][:2]
    if low is None or low not in known or float(known[low]) != 0.0:
        return None
    if top is None:
        return math.inf
    return float(known[top]) if top in known else None


def _product(node: Node, known: Mapping[Value, Array]) -> WeightProduct | str | None:
    """Return how a product is quantized, or why it is not."""
    x, w, *rest = node.inputs
    assert x is not None
    assert w is not None
    if x.type.dtype != float32 or w.type.dtype != float32:
        return f"it computes in {x.type.dtype}"
    if x in known:
        return "its first operand is a constant"
    if w not in known:
        return None if node.op.name == "MatMul" else "its weight is computed while it runs"
    if node.op.name == "MatMul":
        if w.type.rank != 2:
            return f"its weight has {w.type.rank} axes; 2 have an integer kernel"
        return WeightProduct(known[w], 1, None)
    bias = rest[0] if rest else None
    if bias is not None and bias not in known:
        return "its bias is computed while it runs"
    product = WeightProduct(known[w], 0, None if bias is None else known[bias])
    return _gemm(node, product) if node.op.name == "Gemm" else product


def _gates(node: Node, known: Mapping[Value, Array], operators: Collection[str]) -> Gates | str:
    """Return the weights of an LSTM, or why it runs in float."""
    if DYNAMIC_LSTM not in operators:
        return "the target's runtime has no LSTM on integers"
    x, w, r = node.inputs[:3]
    assert x is not None
    assert w is not None
    assert r is not None
    if x.type.dtype != float32:
        return f"it computes in {x.type.dtype}"
    if w not in known or r not in known:
        return "its weights are computed while it runs"
    gates = known[w], known[r]
    if not all(array.size for array in gates):
        return "it has no inputs or no units"
    count = sum(array.size for array in gates) // len(gates[0])
    if count < MIN_WEIGHTS:
        return f"it has {count} weights a direction; fewer than {MIN_WEIGHTS} run faster in float"
    return gates


def _gemm(node: Node, product: WeightProduct) -> WeightProduct | str:
    attrs, bias = node.attrs, product.bias
    if attrs.get("alpha", 1.0) != 1.0 or attrs.get("beta", 1.0) != 1.0 or attrs.get("transA"):
        return "it scales or transposes its operands"
    axis = 0 if attrs.get("transB") else 1
    if bias is not None and bias.size != product.weight.shape[axis]:
        return f"its bias has shape {bias.shape}, not one number per output"
    return WeightProduct(product.weight, axis, None if bias is None else bias.reshape(-1))
