"""Half precision: products in float16 around float32 weights, and the loss scale.

Matrix products and convolutions, the operators of a cube unit (`engines/ascend.py`), take and give
float16; everything between them stays float32, so sums, norms and losses keep their range. The
backward pass is derived from that graph, so its products are in float16 as well, where small
gradients would underflow: the loss is multiplied by a scale first, and the gradients are divided by
it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import ops
from triplane.unified_ir.ir.graph import Function, Node, Value
from triplane.unified_ir.ir.types import float16, float32
from triplane.unified_ir.ops.build import expansion, note_contents
from triplane.unified_ir.ops.inline import renewed
from triplane.unified_ir.ops.row import Known
from triplane.unified_ir.ops.table import TABLE, row_of
from triplane.unified_ir.ops.tensor import Tensor

Precision = Literal["float32", "float16"]
PRECISIONS: Final[tuple[Precision, ...]] = ("float32", "float16")
LEAST_SCALE: Final = 2.0**-20
"""A loss scale below this cannot save any gradient."""
_LARGEST: Final = float(np.finfo(np.float32).max)


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """Factor of the loss in half precision; PyTorch's GradScaler's rule and numbers.

    An update whose gradients are not all finite is skipped and the scale multiplied by `backoff`;
    after `interval` good updates in a row it is multiplied by `growth`.
    """

    start: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000

    def __post_init__(self) -> None:
        if not 0 < self.start < math.inf:
            raise InvalidInput(f"a loss scale starts above 0, got {self.start}")
        if not (1 <= self.growth < math.inf and 0 < self.backoff <= 1 and self.interval >= 1):
            raise InvalidInput(
                "a loss scale needs growth >= 1, 0 < backoff <= 1 and interval >= 1, got "
                f"{self.growth}, {self.backoff}, {self.interval}"
            )

    def after(self, ok: Tensor, scale: Tensor, good: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next scale and number of good updates in a row."""
        good = ops.where(ok, good + 1, 0)
        grows = good >= self.interval
        grown = ops.where(grows, scale * self.growth, scale)
        kept = ops.where(grown <= _LARGEST, grown, scale)
        return ops.where(ok, kept, scale * self.backoff), ops.where(grows, 0, good)


def fixed_scale(scale: float) -> LossScale:
    """A constant scale; updates that overflow are skipped as well."""
    return LossScale(start=scale, growth=1.0, backoff=1.0)


def all_finite(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return a bool scalar: whether all elements are finite."""
    bad = [ops.logical_not(ops.abs_(x) <= _LARGEST).cast("float32").sum() for x in tensors.values()]
    return sum(bad[1:], bad[0]) == 0.0


def half(function: Function) -> Function:
    """Return the function with products in float16; parameters and results keep their types.

    A value is rounded once however many products read it.
    """
    return _HalfPrecision(function).converted()


class _HalfPrecision:
    """One function or region under rewriting."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.nodes: list[Node] = []
        self.env: dict[Value, Value] = {}
        self.rounded: dict[Value, Value] = {}
        self.contents: dict[Value, Known] = {}

    def converted(self) -> Function:
        """Return the rewritten function."""
        f = self.function
        for node in f.nodes:
            self._add(node)
        results = tuple(self.env.get(r, r) for r in f.results)
        return Function(f.name, f.params, results, f.result_names, tuple(self.nodes))

    def _add(self, node: Node) -> None:
        inputs = tuple(None if v is None else self.env.get(v, v) for v in node.inputs)
        if row_of(node).is_product and node.outputs[0].type.dtype == float32:
            self._product(node, inputs)
            return
        note_contents(row_of(node), node, self.contents)
        meaning = None if node.regions else expansion(TABLE, node, self.contents)
        if meaning is not None and any(row_of(n).is_product for n in meaning.walk()):
            self._spread(node, renewed(meaning, f"inner_{len(self.nodes)}"), inputs)
            return
        regions = tuple(half(r) for r in node.regions)
        self.nodes.append(Node(node.op, inputs, node.outputs, node.attrs, regions, node.meta))

    def _product(self, node: Node, inputs: tuple[Value | None, ...]) -> None:
        operands = tuple(
            self._half(v, node) if v is not None and v.type.dtype == float32 else v for v in inputs
        )
        out = Value(node.outputs[0].type.with_dtype(float16))
        self.nodes.append(Node(node.op, operands, (out,), node.attrs, (), node.meta))
        self.nodes.append(_cast(out, node.outputs[0], node))

    def _spread(self, node: Node, meaning: Function, inputs: tuple[Value | None, ...]) -> None:
        """Replace a node by the nodes of its body, which may contain products."""
        inner = dict(zip(meaning.params, [v for v in inputs if v is not None], strict=True))
        for part in meaning.nodes:
            outputs = tuple(Value(v.type) for v in part.outputs)
            operands = tuple(None if v is None else inner[v] for v in part.inputs)
            inner.update(zip(part.outputs, outputs, strict=True))
            self._add(Node(part.op, operands, outputs, part.attrs, part.regions, node.meta))
        for out, result in zip(node.outputs, meaning.results, strict=False):
            self.env[out] = self.env.get(inner[result], inner[result])

    def _half(self, value: Value, node: Node) -> Value:
        if value not in self.rounded:
            self.rounded[value] = Value(value.type.with_dtype(float16))
            self.nodes.append(_cast(value, self.rounded[value], node))
        return self.rounded[value]


def _cast(source: Value, target: Value, node: Node) -> Node:
    to = {"to": target.type.dtype.onnx}
    return Node(TABLE["", "Cast"].id, (source,), (target,), to, (), node.meta)
