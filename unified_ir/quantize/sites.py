"""Which products run on integers, and which tensors must therefore carry a scale.

A *site* is a tensor that is rounded to integers once, where it is made, for all its readers. A node
that only moves or compares elements shares the site of its operand. A ReLU or Clip at 0 vanishes:
with z = q_min the integers cannot go below 0, and maximum and layout commute with that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from triplane.unified_ir.ir.graph import Array, Node, Value
from triplane.unified_ir.ir.types import float32
from triplane.unified_ir.onnx import DYNAMIC_LSTM
from triplane.unified_ir.ops.row import IntegerForm
from triplane.unified_ir.ops.table import TABLE, row_of
from triplane.unified_ir.passes.frozen import Frozen

FACTORS: Final = (1e-6, 1e6)
"""Numbers by which a scale is multiplied without leaving the range of float32."""

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


@dataclass(frozen=True, slots=True, eq=False)
class Gates:
    """Weights of an LSTM, (directions, 4 hidden, inputs) and (directions, 4 hidden, hidden)."""

    w: Array
    r: Array


@dataclass(frozen=True, slots=True)
class Clamp:
    """What a vanished ReLU (top None) or Clip does to a site."""

    low: float
    top: float | None


@dataclass(slots=True)
class Sites:
    """What becomes of each tensor and product.

    root: site of each rounded tensor. clamps: by site. products: None where both operands are
    activations. gates: of each LSTM on integer weights, whose operands are no sites: the runtime
    rounds them by the range that they have in each step. refused: why a product stays in float.
    dropped: clamps that vanish. scaled: by product with a number, the tensor and the number: the
    same integers with another scale.
    """

    root: dict[Value, Value] = field(default_factory=dict)
    clamps: dict[Value, Clamp] = field(default_factory=dict)
    products: dict[Node, WeightProduct | None] = field(default_factory=dict)
    gates: dict[Node, Gates] = field(default_factory=dict)
    refused: dict[Node, str] = field(default_factory=dict)
    dropped: set[Node] = field(default_factory=set)
    scaled: dict[Node, tuple[Value, float]] = field(default_factory=dict)

    @property
    def roots(self) -> list[Value]:
        """The sites, in the order in which they were found."""
        return list(dict.fromkeys(self.root.values()))

    @property
    def integer(self) -> set[Node]:
        """The nodes that multiply on integers."""
        return {*self.products, *self.gates}


def find_sites(frozen: Frozen, operators: Collection[str] = ()) -> Sites:
    """The sites of a function whose nodes are already folded.

    operators: those beyond ai.onnx that the target's runtime has.
    """
    return _Finder(frozen, operators).sites


class _Finder:
    def __init__(self, frozen: Frozen, operators: Collection[str]) -> None:
        self.sites = Sites()
        self.operators = operators
        self.known = frozen.known()
        self.uses = frozen.function.reads()
        self.producer = frozen.function.producers()
        for node in frozen.function.nodes:
            if row_of(node).integer_form is IntegerForm.PRODUCT:
                self.judge(node)
            elif row_of(node).integer_form is IntegerForm.RECURRENT:
                self.judge_gates(node)
        self.wanted = self.find_wanted(frozen.function.nodes)
        for node in frozen.function.nodes:
            self.visit(node)

    def judge(self, node: Node) -> None:
        """Decides whether a product can run on integers."""
        product = _product(node, self.known)
        if isinstance(product, str):
            self.sites.refused[node] = product
        else:
            self.sites.products[node] = product

    def judge_gates(self, node: Node) -> None:
        """Decides whether an LSTM runs on integer weights."""
        gates: Gates | str = "the target's runtime has no LSTM on integers"
        if DYNAMIC_LSTM in self.operators:
            gates = _gates(node, self.known)
        if isinstance(gates, str):
            self.sites.refused[node] = gates
        else:
            self.sites.gates[node] = gates

    def operands(self, node: Node) -> tuple[Value, ...]:
        """Activations of a product."""
        count = 2 if self.sites.products[node] is None else 1
        return tuple(v for v in node.inputs[:count] if v is not None)

    def find_wanted(self, nodes: tuple[Node, ...]) -> set[Value]:
        """Values that some integer product reads, directly or through nodes with integer forms."""
        wanted: set[Value] = set()
        for node in reversed(nodes):
            follows = row_of(node).integer_form in FOLLOWING
            if node in self.sites.products:
                wanted.update(self.operands(node))
            elif follows and wanted.intersection(node.outputs):
                wanted.update(v for v in node.inputs if v is not None)
        return wanted

    def visit(self, node: Node) -> None:
        """Marks the sites around one node."""
        y = node.outputs[0]
        form = row_of(node).integer_form
        if node in self.sites.products:
            for x in self.operands(node):
                self.sites.root.setdefault(x, x)
            if node.op.name == "Conv" or y in self.wanted:
                self.sites.root[y] = y
        elif self.on_site(node) and (
            (form is IntegerForm.COPY and _all_floats(node))
            or (form is IntegerForm.PART and self.wanted.intersection(node.outputs))
        ):
            self.sites.root.update(dict.fromkeys(node.outputs, self.sites.root[self.first(node)]))
        elif form is IntegerForm.MIX and y in self.wanted and self.mixes_sites(node):
            self.sites.root[y] = y
            if (scaled := self.scaled(node)) is not None:
                self.sites.scaled[node] = scaled
        elif form is IntegerForm.CLAMP:
            self.clamp(node)

    def first(self, node: Node) -> Value:
        x = node.inputs[0]
        assert x is not None
        return x

    def on_site(self, node: Node) -> bool:
        return bool(node.inputs) and node.inputs[0] in self.sites.root

    def mixes_sites(self, node: Node) -> bool:
        """Whether a kernel exists, each operand is a site or a constant, and one a site."""
        if any(d != 1 for d in node.attrs.get("dilations") or ()):  # type: ignore[union-attr]
            return False  # QLinearAveragePool has no dilations
        xs = [v for v in node.inputs if v is not None]
        return any(x in self.sites.root for x in xs) and all(
            x in self.sites.root or (x in self.known and self.known[x].dtype == "float32")
            for x in xs
        )

    def scaled(self, node: Node) -> tuple[Value, float] | None:
        """The operand and the factor of a product with a positive number."""
        y = node.outputs[0]
        if node.op.name != "Mul":
            return None
        for x, factor in (node.inputs, node.inputs[::-1]):
            if x in self.sites.root and x.type == y.type and factor in self.known:
                array = self.known[factor]
                if array.size == 1 and FACTORS[0] <= float(array.item()) <= FACTORS[1]:
                    return x, float(array.item())
        return None

    def clamp(self, node: Node) -> None:
        """Drops a ReLU whose operand nobody else reads, back to where the operand is made.

        It goes into the rounding of what makes it, so a product with a number keeps its own.
        """
        x = self.first(node)
        bounds = _bounds(node, self.known)
        if x not in self.sites.root or bounds is None or not self.alone(x):
            return
        root = self.sites.root[x]
        self.sites.clamps[root] = _tighter(self.sites.clamps.get(root), bounds)
        self.sites.dropped.add(node)
        self.sites.scaled.pop(self.producer[root], None)
        self.sites.root[node.outputs[0]] = root

    def alone(self, x: Value) -> bool:
        """Whether each value from a site's making to `x` has one reader, and a node makes it."""
        root = self.sites.root[x]
        while self.uses[x] == 1 and x in self.producer:
            if x is root:
                return True
            if len(self.producer[x].outputs) > 1:
                return False  # its other outputs are of the same site
            x = self.first(self.producer[x])
        return False


def _all_floats(node: Node) -> bool:
    """False for the indices of a MaxPool."""
    return all(v.type.dtype == float32 for v in node.outputs)


def _tighter(a: Clamp | None, b: Clamp) -> Clamp:
    tops = [c.top for c in (a, b) if c is not None and c.top is not None]
    return replace(b, top=min(tops) if tops else None)


def _bounds(node: Node, known: Mapping[Value, Array]) -> Clamp | None:
    """The clamp of a ReLU, or of a Clip from 0 to a constant."""
    if node.op.name == "Relu":
        return Clamp(0.0, None)
    low, top = [*node.inputs[1:], None, None][:2]
    if low is None or low not in known or float(known[low]) != 0.0:
        return None
    if top is None:
        return Clamp(0.0, None)
    return Clamp(0.0, float(known[top])) if top in known else None


def _product(node: Node, known: Mapping[Value, Array]) -> WeightProduct | str | None:
    """How a product is quantized, or why it is not."""
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
    if node.op.name == "Gemm":
        return _gemm(node, known[w], None if bias is None else known[bias])
    return WeightProduct(known[w], 0, None if bias is None else known[bias])


def _gates(node: Node, known: Mapping[Value, Array]) -> Gates | str:
    """The weights of an LSTM, or why it runs in float."""
    x, w, r = node.inputs[:3]
    assert x is not None
    assert w is not None
    assert r is not None
    if x.type.dtype != float32:
        return f"it computes in {x.type.dtype}"
    if w not in known or r not in known:
        return "its weights are computed while it runs"
    held = Gates(known[w], known[r])
    if not held.w.size or not held.r.size:
        return "it has no inputs or no units"
    count = (held.w.size + held.r.size) // len(held.w)
    if count < MIN_WEIGHTS:
        return f"it has {count} weights a direction; fewer than {MIN_WEIGHTS} run faster in float"
    return held


def _gemm(node: Node, w: Array, bias: Array | None) -> WeightProduct | str:
    attrs = node.attrs
    if attrs.get("alpha", 1.0) != 1.0 or attrs.get("beta", 1.0) != 1.0 or attrs.get("transA"):
        return "it scales or transposes its operands"
    axis = 0 if attrs.get("transB") else 1
    if bias is not None and bias.size != w.shape[axis]:
        return f"its bias has shape {bias.shape}, not one number per output"
    return WeightProduct(w, axis, None if bias is None else bias.reshape(-1))
