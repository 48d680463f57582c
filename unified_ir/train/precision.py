"""Half precision: products in float16 or bfloat16 around float32 weights, and the loss scale.

Matrix products and convolutions, the operators of a cube unit (`engines/ascend.py`), take and give
16 bits; everything between them stays float32, so sums, norms and losses keep their range. The
backward pass is derived from that graph, so its products are of 16 bits as well. In float16 small
gradients would underflow there: the loss is multiplied by a scale first, and the gradients are
divided by it. bfloat16 has the range of float32 and needs no scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import ops
from triplane.unified_ir.ir.graph import Function, Node, Value
from triplane.unified_ir.ir.types import DType, float16, float32
from triplane.unified_ir.ops.tensor import Tensor
from triplane.unified_ir.passes.rewrite import Rewriter

Precision = Literal["float32", "float16", "bfloat16"]
PRECISIONS: Final[tuple[Precision, ...]] = ("float32", "float16", "bfloat16")
LEAST_SCALE: Final = 2.0**-20
"""A loss scale below this cannot save any gradient."""
_LARGEST: Final = float(np.finfo(np.float32).max)


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """Factor of the loss in half precision, with the rule and numbers of PyTorch's GradScaler.

    An update whose gradients are not all finite is skipped and the scale multiplied by `backoff`;
    after `interval` good updates in a row it is multiplied by `growth`.
    """

    start: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000

    def __post_init__(self) -> None:
        if not 0 < self.start < math.inf:
            raise InvalidInput(f"a loss scale must start above 0, got {self.start}")
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
        # A model whose gradients never overflow would otherwise double the scale up to infinity.
        kept = ops.where(grown <= _LARGEST, grown, scale)
        return ops.where(ok, kept, scale * self.backoff), ops.where(grows, 0, good)


def all_finite(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return a bool scalar: whether all elements are finite."""
    # NaN compares as false, so one comparison finds NaN and both infinities.
    bad = [ops.logical_not(ops.abs_(x) <= _LARGEST).cast("float32").sum() for x in tensors.values()]
    return sum(bad[1:], bad[0]) == 0.0


def half(function: Function, dtype: DType = float16) -> Function:
    """Return the function with products of 16 bits; parameters and results keep their types.

    A value is rounded once, even if several products read it.
    """
    return _HalfPrecision(dtype).rewrite(function)


class _HalfPrecision(Rewriter):
    def __init__(self, dtype: DType) -> None:
        super().__init__()
        self._dtype = dtype

    def region(self, function: Function) -> Function:
        """Rewrite a region in the same precision."""
        return _HalfPrecision(self._dtype).rewrite(function, self._tags)

    def visit(self, node: Node) -> None:
        """Put a product between casts; expand an operator whose body has products."""
        if node.outputs[0].type.dtype == float32 and (product := self._half_form(node)):
            self._product(product)
            return
        self.note(node)
        body = None if node.regions else self.body(node)
        if body is not None and any(self.row(n).is_product for n in body.walk()):
            self.spread(node, body)
        else:
            self.keep(node)

    def _half_form(self, node: Node) -> Node | None:
        """Return the node that computes in 16 bits what this one does; None: none does."""
        row = self.row(node)
        if row.is_product:
            return node
        form = row.half_form(node) if row.half_form else None
        return form and replace(node, op=form[0].id, attrs=form[1])

    def _product(self, node: Node) -> None:
        operands = tuple(
            self.cast(v, self._dtype, node) if v is not None and v.type.dtype == float32 else v
            for v in self.inputs(node)
        )
        out = Value(node.outputs[0].type.with_dtype(self._dtype))
        self.nodes.append(replace(node, inputs=operands, outputs=(out,)))
        self.convert(out, node.outputs[0], node)
