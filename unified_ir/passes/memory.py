"""Bytes of the tensors that are alive while a graph runs node by node, in its own order.

A tensor lives from the node that produces it to the last node that reads it, a result to the end. A
view of its operand (Reshape and the like) takes no memory of its own. Parameters and constants
belong to the caller and do not count, and neither does memory inside kernels or regions.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.dims import evaluate
from triplane.unified_ir.ir.graph import Function, Node, Value
from triplane.unified_ir.ir.types import TensorType
from triplane.unified_ir.ops.table import TABLE

VIEWS: Final = frozenset(row.name for row in TABLE.values() if row.preserves_elements)
"""Operators whose first output shares the memory of their first operand."""
CONSTANT: Final = "Constant"

V = TypeVar("V", bound=Hashable)


@dataclass(frozen=True, slots=True)
class MemoryRow(Generic[V]):
    """One node; `is_view`: its first output is a view of its first input."""

    inputs: Sequence[V]
    outputs: Sequence[V]
    is_view: bool = False


@dataclass(frozen=True, slots=True)
class Live(Generic[V]):
    """Memory alive during each node: its operands, its outputs, and all that later nodes read."""

    bytes_at: tuple[int, ...]
    roots: Mapping[V, V]
    """Value -> the value whose memory it is."""
    uses: Mapping[V, Sequence[int]]
    """Root -> the nodes that read its memory, also through views; the node count for a result."""
    born: Mapping[V, int]
    """Root -> the node that allocates it."""
    made_by: Mapping[V, int]
    """Value -> the node that produces it, views included."""

    @property
    def peak_bytes(self) -> int:
        """The most bytes that are alive at once."""
        return max(self.bytes_at, default=0)

    @property
    def peak_at(self) -> int:
        """The first node during which the peak is reached."""
        return self.bytes_at.index(self.peak_bytes) if self.bytes_at else 0


def alive(rows: Sequence[MemoryRow[V]], results: Sequence[V], size: Callable[[V], int]) -> Live[V]:
    """Return the live bytes of any graph.  size: bytes of a value."""
    roots: dict[V, V] = {}
    uses: dict[V, list[int]] = defaultdict(list)
    born: dict[V, int] = {}
    for i, row in enumerate(rows):
        # Parameters and constants have no root in `born`, so their reads are recorded but never
        # counted.
        taken = [roots.get(v, v) for v in row.inputs]
        for root in taken:
            uses[root].append(i)
        for k, value in enumerate(row.outputs):
            if k == 0 and taken and row.is_view:
                roots[value] = taken[0]
            else:
                born[value] = i
    for value in results:
        uses[roots.get(value, value)].append(len(rows))
    # +size at the node that allocates a value and -size after its last use; the running sum gives
    # the live bytes in time linear in nodes and values. Results end at len(rows) + 1.
    change = [0] * (len(rows) + 2)
    for value, i in born.items():
        held = size(value)
        change[i] += held
        change[max([i, *uses.get(value, ())]) + 1] -= held
    bytes_at, now = [], 0
    for i in range(len(rows)):
        now += change[i]
        bytes_at.append(now)
    made_by = {v: i for i, row in enumerate(rows) for v in row.outputs}
    return Live(tuple(bytes_at), roots, uses, born, made_by)


def type_bytes(t: TensorType, sizes: Mapping[str, int]) -> int:
    """Return the bytes of a tensor whose symbols have the given sizes."""
    unknown = sorted(t.symbols - sizes.keys())
    if unknown:
        raise InvalidInput(
            f"the size of {', '.join(unknown)} in {t} is not known before a run, and neither is "
            f"the memory it takes; sizes are given for {', '.join(sizes) or 'none'}"
        )
    elements = math.prod(evaluate(dim, sizes) for dim in t.shape)
    # Rounded up to bytes: elements of 2 and 4 bits are packed.
    return -(-elements * t.dtype.bits // 8)


def live(nodes: Sequence[Node], results: Sequence[Value], sizes: Mapping[str, int]) -> Live[Value]:
    """Return the live bytes of a list of nodes.  sizes: by symbol, such as {"N": 32}."""
    rows = [
        MemoryRow(
            tuple(v for v in node.inputs if v is not None),
            () if node.op.name == CONSTANT else node.outputs,
            node.op.name in VIEWS,
        )
        for node in nodes
    ]
    return alive(rows, results, lambda value: type_bytes(value.type, sizes))


def least_bytes(function: Function, sizes: Mapping[str, int]) -> int:
    """Return a bound for every order and recomputation: the tensors of one node, or all results."""
    alive_bytes = live(function.nodes, function.results, sizes)

    def held(values: Sequence[Value | None]) -> int:
        # A node that reads a tensor and a view of it holds that memory once.
        distinct = {alive_bytes.roots.get(v, v) for v in values if v is not None}
        return sum(type_bytes(v.type, sizes) for v in distinct if v in alive_bytes.born)

    nodes = max((held([*node.inputs, *node.outputs]) for node in function.nodes), default=0)
    return max(nodes, held(function.results))
