"""An Ascend NPU emulated on the CPU at its fast level: the numerics of the cube unit.

The cube multiplies fp16 operands and accumulates in fp32. So each float32 operand of a matrix
product or convolution is rounded to fp16 first, products and sums stay in float32, everything else
is float32. Overflow beyond 65504 becomes infinity, as it does there. Formats, buffer capacities and
cycles are not modelled at this level.
"""

from __future__ import annotations

from collections.abc import Collection

from triplane.unified_ir.engines.onnx import OnnxEngine, OnnxProgram
from triplane.unified_ir.ir.graph import Function, Node, Value
from triplane.unified_ir.ir.types import float16, float32
from triplane.unified_ir.ops.build import expansion, note_contents
from triplane.unified_ir.ops.inline import renewed
from triplane.unified_ir.ops.row import Known
from triplane.unified_ir.ops.table import TABLE


class AscendEngine:
    """See the module."""

    name = "ascend"

    def __init__(self) -> None:
        self._engine = OnnxEngine(kernels=self.name)

    def compile(self, function: Function, *, donate: Collection[str] = ()) -> OnnxProgram:
        """See `Engine`."""
        return self._engine.compile(round_cube_operands(function), donate=donate)


def round_cube_operands(function: Function) -> Function:
    """The function with every float32 cube operand rounded through fp16, regions included."""
    rounding = _Rounding()
    for node in function.nodes:
        rounding.add(node)
    results = tuple(rounding.env.get(r, r) for r in function.results)
    nodes = tuple(rounding.nodes)
    return Function(function.name, function.params, results, function.result_names, nodes)


class _Rounding:
    """The nodes of one function so far, what stands for their values, which were rounded."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.env: dict[Value, Value] = {}
        self.rounded: dict[Value, Value] = {}
        self.contents: dict[Value, Known] = {}

    def add(self, node: Node) -> None:
        """A node with its cube operands rounded; where a rule is lacking, its body's nodes."""
        inputs = [None if v is None else self.env.get(v, v) for v in node.inputs]
        row = TABLE[node.op.domain, node.op.name]
        note_contents(row, node, self.contents)
        hides_products = not row.is_product and row.vjp is None and not node.regions
        meaning = expansion(TABLE, node, self.contents) if hides_products else None
        if meaning is not None:
            self._expand(node, renewed(meaning, f"inner_{len(self.nodes)}"), inputs)
            return
        for i, operand in enumerate(inputs[:2] if row.is_product else []):  # a bias is in fp32
            if operand is not None and operand.type.dtype == float32:
                inputs[i] = self._through_half(operand, node)
        regions = tuple(round_cube_operands(r) for r in node.regions)
        made = Node(node.op, tuple(inputs), node.outputs, node.attrs, regions, node.meta)
        self.nodes.append(made)

    def _expand(self, node: Node, meaning: Function, inputs: list[Value | None]) -> None:
        """A body's nodes in place of the node, since products may hide in it."""
        inner = dict(zip(meaning.params, [v for v in inputs if v is not None], strict=True))
        for part in meaning.nodes:
            outputs = tuple(Value(v.type) for v in part.outputs)
            operands = tuple(None if v is None else inner[v] for v in part.inputs)
            inner.update(zip(part.outputs, outputs, strict=True))
            self.add(Node(part.op, operands, outputs, part.attrs, part.regions, node.meta))
        for out, result in zip(node.outputs, meaning.results, strict=False):
            self.env[out] = self.env.get(inner[result], inner[result])

    def _through_half(self, operand: Value, node: Node) -> Value:
        if operand not in self.rounded:
            cast = TABLE["", "Cast"].id
            half, back = Value(operand.type.with_dtype(float16)), Value(operand.type)
            to_half, to_single = {"to": float16.onnx}, {"to": float32.onnx}
            self.nodes.append(Node(cast, (operand,), (half,), to_half, (), node.meta))
            self.nodes.append(Node(cast, (half,), (back,), to_single, (), node.meta))
            self.rounded[operand] = back
        return self.rounded[operand]
