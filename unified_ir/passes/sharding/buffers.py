"""The buffers that XLA keeps for a graph, where they differ from its tensors.

Its buffer assignment on a CPU shows three differences; how near the sum comes is in
docs/decisions/0069-planning-across-devices.md:

* A transposition that only products read is part of the products, and takes no memory.
* An elementwise result takes the memory of an operand that nothing reads later.
* Convolutions work in another order of axes than the graph. Their results are held in both orders
  as long as anything reads them, because gradients read both. Parameters that they read are held in
  the other order from the first convolution that reads them to the last.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from triplane.unified_ir.ir.graph import Function, Node, Value
from triplane.unified_ir.ops.row import OpKind
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.passes.memory import VIEWS, Live, MemoryRow, alive

TRANSPOSITION: Final = "Transpose"


@dataclass(frozen=True, slots=True)
class XlaBuffer:
    """The memory of a value, or that of its copy in the order of axes of convolutions."""

    value: Value
    is_reordered: bool = False


def buffer_rows(function: Function, held: Collection[int]) -> list[MemoryRow[XlaBuffer]]:
    """Return what each node reads and allocates. held: the nodes whose outputs take memory."""
    rows = tensor_rows(function, held)
    live = alive(rows, [*map(XlaBuffer, function.results)], lambda _: 0)
    results = set(function.results)
    return [
        _in_place(row, live, i)
        if _kind(node) is OpKind.ELEMENTWISE and results.isdisjoint(node.outputs)
        else row
        for i, (row, node) in enumerate(zip(rows, function.nodes, strict=True))
    ]


def tensor_rows(function: Function, held: Collection[int]) -> list[MemoryRow[XlaBuffer]]:
    """Return the same with a buffer for each elementwise result."""
    folded, params, reordered = _folded(function), set(function.params), set[Value]()
    rows = []
    for i, node in enumerate(function.nodes):
        operands = [v for v in node.inputs if v is not None]
        outputs = list(node.outputs) if i in held else []
        read = [v for v in operands if v not in params or _is_convolution(node)]
        copies = [v for v in _reordered(node, outputs, params) if v not in reordered]
        rows.append(
            MemoryRow(
                [
                    *map(XlaBuffer, operands),
                    *(XlaBuffer(v, is_reordered=True) for v in read if v in reordered),
                ],
                [*map(XlaBuffer, outputs), *(XlaBuffer(v, is_reordered=True) for v in copies)],
                node.op.name in VIEWS or i in folded,
            )
        )
        reordered.update(copies)
    return rows


def _in_place(row: MemoryRow[XlaBuffer], live: Live[XlaBuffer], i: int) -> MemoryRow[XlaBuffer]:
    """Return an elementwise node's row; it is a view of an operand that it reads last, if any."""
    for buffer in row.inputs if row.outputs else ():
        root = live.roots.get(buffer, buffer)
        is_last = root in live.born and max(live.uses[root]) == i
        if is_last and root.value.type == row.outputs[0].value.type:
            return MemoryRow([buffer, *row.inputs], row.outputs, is_view=True)
    return row


def _reordered(node: Node, outputs: Sequence[Value], params: Collection[Value]) -> Iterable[Value]:
    """Return the values that a node needs or gives in the order of axes of convolutions."""
    if not _is_convolution(node):
        return ()
    read = (v for v in node.inputs if v is not None and v in params)
    return dict.fromkeys([*outputs, *read])


def _kind(node: Node) -> OpKind | None:
    row = TABLE.get((node.op.domain, node.op.name))
    return None if row is None else row.kind


def _is_convolution(node: Node) -> bool:
    if _kind(node) is not OpKind.CONTRACTION:
        return False
    return "strides" in TABLE[node.op.domain, node.op.name].attr_specs


def _folded(function: Function) -> set[int]:
    """Return the transpositions that only products read, directly or through others of them."""
    needed, folded = set(function.results), set[int]()
    for i, node in reversed(list(enumerate(function.nodes))):
        if node.op.name == TRANSPOSITION and needed.isdisjoint(node.outputs):
            folded.add(i)
        elif _kind(node) is not OpKind.CONTRACTION or _is_convolution(node):
            needed.update(v for v in node.inputs if v is not None)
    return folded
