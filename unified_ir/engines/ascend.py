"""An Ascend NPU, emulated on the CPU: the numerics of its cube unit.

The cube multiplies fp16 operands and accumulates in fp32. Therefore each float32 operand of a
matrix product or convolution is rounded to fp16 first; products, sums and everything else stay in
float32. A value beyond 65504 becomes infinity, as on the device. Data formats, buffer sizes and
cycles are not modelled.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from triplane.unified_ir.engines.onnx import OnnxEngine, OnnxProgram
from triplane.unified_ir.ir.graph import Function, Node, Value
from triplane.unified_ir.ir.types import float16, float32
from triplane.unified_ir.passes.rewrite import Rewriter


class AscendEngine:
    """See the module."""

    name = "ascend"

    def __init__(self) -> None:
        self._engine = OnnxEngine(kernels=self.name)

    def compile(self, function: Function, *, donate: Collection[str] = ()) -> OnnxProgram:
        """See `Engine`."""
        return self._engine.compile(round_cube_operands(function), donate=donate)


def round_cube_operands(function: Function) -> Function:
    """Return the function with float32 cube operands rounded through fp16, also in regions."""
    return _Rounding().rewrite(function)


class _Rounding(Rewriter):
    def visit(self, node: Node) -> None:
        """Add a node with rounded cube operands, or the nodes of a body that hides products."""
        row = self.row(node)
        self.note(node)
        # A composed operator (LSTM, attention) is replaced by its body, so that the products inside
        # are rounded too.
        hides_products = not row.is_product and row.vjp is None and not node.regions
        body = self.body(node) if hides_products else None
        if body is not None:
            self.spread(node, body)
        elif row.is_product:
            first, second, *bias = self.inputs(node)  # a bias is added in fp32
            operands = (self._through_half(first, node), self._through_half(second, node), *bias)
            self.nodes.append(replace(node, inputs=operands))
        else:
            self.keep(node)

    def _through_half(self, operand: Value | None, node: Node) -> Value | None:
        if operand is None or operand.type.dtype != float32:
            return operand
        return self.cast(self.cast(operand, float16, node), float32, node)
