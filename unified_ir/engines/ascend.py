"""An Ascend NPU emulated on the CPU at its fast level: the numerics of the cube unit.

The cube multiplies fp16 operands and accumulates in fp32. So each float32 operand of a matrix
product or convolution is rounded to fp16 first, products and sums stay in float32, everything else
is float32. Overflow beyond 65504 becomes infinity, as it does there. Formats, buffer capacities and
cycles are not modelled at this level.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from triplane.unified_ir.engines.onnx import OnnxEngine, OnnxProgram
from triplane.unified_ir.ir.graph import Function, Node, Value
from triplane.unified_ir.ir.types import float16, float32
from triplane.unified_ir.ops.build import expansion
from triplane.unified_ir.ops.inline import renewed
from triplane.unified_ir.ops.row import DOMAIN
from triplane.unified_ir.ops.table import TABLE

CUBE: Final[dict[tuple[str, str], int]] = {
    ("", "MatMul"): 2,
    ("", "Gemm"): 2,
    ("", "Conv"): 2,
    ("", "ConvTranspose"): 2,
    (DOMAIN, "ConvGradWeight"): 2,
}
"""Operators of the cube, and how many leading operands it rounds (a bias is added in fp32)."""

MOVES: Final = frozenset({(DOMAIN, "MaxUnpoolFirst"), (DOMAIN, "MaxSelectFirst")})
"""Rows that move elements: where their bodies copy by a product with 0/1 matrices, on this machine
the vector unit copies, and nothing is rounded. (The copies are compared for equality.)"""


class AscendEngine:
    """See the module."""

    name = "ascend"

    def __init__(self) -> None:
        self._engine = OnnxEngine()

    def compile(self, function: Function, *, donate: Collection[str] = ()) -> OnnxProgram:
        """See `Engine`."""
        return self._engine.compile(round_cube_operands(function), donate=donate)


def round_cube_operands(function: Function) -> Function:
    """The function with every float32 cube operand rounded through fp16, regions included."""
    nodes: list[Node] = []
    rounded: dict[Value, Value] = {}
    env: dict[Value, Value] = {}
    for node in function.nodes:
        _round_node(node, nodes, rounded, env)
    results = tuple(env.get(r, r) for r in function.results)
    return Function(function.name, function.params, results, function.result_names, tuple(nodes))


def _round_node(
    node: Node, nodes: list[Node], rounded: dict[Value, Value], env: dict[Value, Value]
) -> None:
    inputs = [None if v is None else env.get(v, v) for v in node.inputs]
    key = (node.op.domain, node.op.name)
    hides_products = key not in CUBE and key not in MOVES and not node.regions
    if hides_products and (meaning := expansion(TABLE, node)) is not None:
        meaning = renewed(meaning, f"inner_{len(nodes)}")
        _round_expansion(node, meaning, inputs, nodes, rounded, env)
        return
    for i in range(CUBE.get(key, 0)):
        operand = inputs[i]
        if operand is not None and operand.type.dtype == float32:
            inputs[i] = _through_half(operand, node, nodes, rounded)
    regions = tuple(round_cube_operands(r) for r in node.regions)
    nodes.append(Node(node.op, tuple(inputs), node.outputs, node.attrs, regions, node.meta))


def _round_expansion(
    node: Node,
    meaning: Function,
    inputs: list[Value | None],
    nodes: list[Node],
    rounded: dict[Value, Value],
    env: dict[Value, Value],
) -> None:
    """A body's nodes in place of the node, since products may hide in it."""
    inner = dict(zip(meaning.params, [v for v in inputs if v is not None], strict=True))
    for part in meaning.nodes:
        outputs = tuple(Value(v.type) for v in part.outputs)
        operands = tuple(None if v is None else inner[v] for v in part.inputs)
        inner.update(zip(part.outputs, outputs, strict=True))
        copy = Node(part.op, operands, outputs, part.attrs, part.regions, node.meta)
        _round_node(copy, nodes, rounded, env)
    for out, result in zip(node.outputs, meaning.results, strict=False):
        env[out] = env.get(inner[result], inner[result])


def _through_half(
    operand: Value, node: Node, nodes: list[Node], rounded: dict[Value, Value]
) -> Value:
    if operand not in rounded:
        cast = TABLE["", "Cast"].id
        half, back = Value(operand.type.with_dtype(float16)), Value(operand.type)
        nodes.append(Node(cast, (operand,), (half,), {"to": float16.onnx}, (), node.meta))
        nodes.append(Node(cast, (half,), (back,), {"to": float32.onnx}, (), node.meta))
        rounded[operand] = back
    return rounded[operand]
