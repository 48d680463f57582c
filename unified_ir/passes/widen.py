"""Arithmetic of 16 bits on a machine without such kernels: float32, rounded after every node.

Otherwise onnxruntime inserts casts around such nodes itself, and then drops every pair of casts
between two of them: values would neither be rounded nor overflow, unlike on the machine that the
graph is for. Sums inside one operator are in float32, as on a matrix unit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from triplane.unified_ir.ir.graph import Function, Node, Value
from triplane.unified_ir.ir.types import bfloat16, float16, float32
from triplane.unified_ir.passes.rewrite import Rewriter

HALF: Final = frozenset({float16, bfloat16})


def widen_half(function: Function) -> Function:
    """Replace each node that computes 16-bit floats from such by a float32 node between casts."""
    halves = any(v.type.dtype in HALF for n in function.walk() for v in n.outputs)
    return _Widening().rewrite(function) if halves else function


class _Widening(Rewriter):
    def region(self, function: Function) -> Function:
        """Rewrite a region; one without 16-bit floats stays the same."""
        return widen_half(function)

    def visit(self, node: Node) -> None:
        """Put a node that reads and returns 16-bit floats between casts to and from float32."""
        halves = [v for v in node.outputs if v.type.dtype in HALF]
        reads = any(v is not None and v.type.dtype in HALF for v in node.inputs)
        # Casts are what rounds, so they stay. A node that only creates or only consumes them has
        # nothing to compute in it.
        if node.regions or node.op.name == "Cast" or not (halves and reads):
            self.keep(node)
            return
        inputs = tuple(
            self.cast(v, float32, node) if v is not None and v.type.dtype in HALF else v
            for v in node.inputs
        )
        wide = {v: Value(v.type.with_dtype(float32)) for v in halves}
        outputs = tuple(wide.get(v, v) for v in node.outputs)
        self.nodes.append(replace(node, inputs=inputs, outputs=outputs))
        for v in halves:
            self.convert(wide[v], v, node)
