"""A function on a mesh as a cost network: a variable for each parameter and node.

The states of a parameter are its layouts, those of a node its strategies. A node's table holds its
own time; the table of an edge holds what it costs to change the layout of the value on it. Nodes
that only sizes and attributes decide (constants, shapes) have no variable: each device computes the
part that it needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.dims import evaluate
from triplane.unified_ir.ir.graph import Array, Function, Meta, Node, Split, Value
from triplane.unified_ir.ops.factors import (
    Factors,
    Shape,
    ShapedNode,
    constant,
    factors_of,
)
from triplane.unified_ir.ops.row import Cost, OpKind
from triplane.unified_ir.ops.rows.control.custom_gradients import custom_row
from triplane.unified_ir.ops.sharding import cuts_of
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.passes.clean import attrs_key
from triplane.unified_ir.passes.memory import VIEWS, MemoryRow, alive, type_bytes
from triplane.unified_ir.passes.rewrite import Rewriter
from triplane.unified_ir.passes.sharding.buffers import XlaBuffer, buffer_rows, tensor_rows
from triplane.unified_ir.passes.sharding.loops import LOOPS
from triplane.unified_ir.passes.sharding.search import CostNetwork
from triplane.unified_ir.passes.sharding.strategies import (
    COPIES,
    Layout,
    NodeSize,
    Strategy,
    Transfer,
    layouts,
    reshard,
    share_of,
    slices,
    strategies,
)
from triplane.unified_ir.passes.sharding.topology import Mesh, Topology

Place = tuple[int, int]
"""The variable of the node or parameter that has a value, and which of its outputs it is."""
MAX_NODES: Final = 50_000
MAX_BYTES: Final = 1 << 60
"""Most bytes of one tensor; larger sizes are mistakes."""
UNREAD: Final = {"Barrier": 1}
"""The operand of a row whose values do not matter, in whatever layout."""
SHOWN_SPLITS: Final = 8
"""Splits that an error lists."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of one device: arguments, results, and tensors alive at once; `at` is the peak's node.

    Results that replace an argument of the same name share its memory (`reused`).
    """

    arguments: int
    results: int
    reused: int
    temporaries: int
    at: int

    @property
    def total(self) -> int:
        """Return the bytes of one device at the peak."""
        return self.arguments + self.temporaries


@dataclass(frozen=True, slots=True)
class Crossing:
    """A value that a node, or the caller, reads: from a variable's output to an operand.

    node: the index of the reading node, or -1 for a result that replaces a parameter. reader: its
    variable. operand: the place among its operands; -1 for such a result.
    """

    source: Place
    reader: int
    operand: int
    node: int
    size_bytes: int


class ShardingProblem:
    """A function, a mesh and the costs of every strategy on it."""

    def __init__(
        self,
        function: Function,
        sizes: Mapping[str, int],
        mesh: Mesh,
        topology: Topology,
        fixed: Mapping[str, Layout] | None = None,
        pinned: Mapping[int, Split] | None = None,
    ) -> None:
        """fixed: layouts of some parameters, by name.  pinned: splits of some nodes, by index."""
        if len(function.nodes) > MAX_NODES:
            raise InvalidInput(f"{function.name} has {len(function.nodes):,} nodes; the planner "
                               f"takes at most {MAX_NODES:,}")  # fmt: skip
        self.function, self.sizes, self.mesh, self.topology = function, sizes, mesh, topology
        self.network = CostNetwork()
        self.states: list[tuple[Strategy, ...]] = []
        """The states of each variable; a layout of a parameter is a strategy without operands."""
        self.places: dict[Value, Place] = {}
        self.crossings: list[Crossing] = []
        self.variable_of: dict[int, int] = {}
        """Index of a node -> its variable."""
        self.factors: dict[int, Factors] = {}
        self.pinned = pinned or {}
        self._shapes: dict[Value, Shape] = {}
        self._bytes: dict[Value, int] = {}
        self._constants: dict[Value, Array] = {}
        self._cache: dict[Any, tuple[Factors, tuple[Strategy, ...]]] = {}
        self._matrices: dict[Any, np.ndarray[Any, Any]] = {}
        for p in function.params:
            self._add_param(p, (fixed or {}).get(p.name))
        for i, node in enumerate(function.nodes):
            self._add_node(i, node)
        self._add_results()

    def shape(self, value: Value | None) -> Shape:
        """Return the shape of a value as numbers; () for an absent operand."""
        if value is None:
            return ()
        if value not in self._shapes:
            unknown = sorted(value.type.symbols - self.sizes.keys())
            if unknown:
                raise InvalidInput(
                    f"a plan needs every size as a number, and {value.type} has the size "
                    f"{unknown[0]}, which is not given; sizes are given for "
                    f"{', '.join(self.sizes) or 'none'}"
                )
            self._shapes[value] = tuple(evaluate(d, self.sizes) for d in value.type.shape)
        return self._shapes[value]

    def layout(self, value: Value, states: Sequence[int]) -> Layout:
        """Return the layout of a value; constants are on every device."""
        place = self.places.get(value)
        if place is None:
            return (COPIES,) * len(self.mesh)
        return self.states[place[0]][states[place[0]]].outputs[place[1]]

    def bytes(self, value: Value | None) -> int:
        """Return the bytes of a whole value."""
        if value is None:
            return 0
        if value not in self._bytes:
            size = type_bytes(value.type, self.sizes)
            if size > MAX_BYTES:
                raise InvalidInput(
                    f"a tensor of {value.type} has {size:,} bytes for {dict(self.sizes)}; a plan "
                    f"takes at most {MAX_BYTES:,} a tensor"
                )
            self._bytes[value] = size
        return self._bytes[value]

    def _variable(self, states: tuple[Strategy, ...]) -> int:
        self.states.append(states)
        return self.network.variable([s.seconds for s in states])

    def _add_param(self, param: Value, fixed: Layout | None) -> None:
        choices = layouts(self.shape(param), self.mesh)
        if fixed is not None:
            if fixed not in choices:
                raise InvalidInput(
                    f"parameter {param.name!r} of shape {self.shape(param)} has no layout {fixed} "
                    f"on a mesh of {self.mesh}: each axis must divide evenly"
                )
            choices = (fixed,)
        states = tuple(Strategy((), (), (layout,)) for layout in choices)
        self.places[param] = (self._variable(states), 0)

    def _add_node(self, index: int, node: Node) -> None:
        row = TABLE.get((node.op.domain, node.op.name))
        if (array := constant(node)) is not None:
            self._constants[node.outputs[0]] = array
        if row is None or row.kind is OpKind.SOURCE or not node.outputs:
            return
        known = tuple(None if v is None else self._constants.get(v) for v in node.inputs)
        shapes = tuple(map(self.shape, node.inputs)), tuple(map(self.shape, node.outputs))
        held = tuple(map(self.bytes, node.inputs)), tuple(map(self.bytes, node.outputs))
        key = None if node.regions else (
            node.op, attrs_key(node), shapes, held,
            tuple(None if k is None or k.size > 16 else k.tobytes() for k in known),
        )  # fmt: skip
        if key is None or key not in self._cache:
            loop = LOOPS.get(node.op.name)
            factors = (
                loop(node, self.shape)
                if loop
                else factors_of(ShapedNode(node, row, *shapes, known))
            )
            cost: Cost = row.cost_of(node, self.bytes)
            size = NodeSize(
                factors.flops or cost.flops, *shapes, *held, is_view=node.op.name in VIEWS
            )
            self._cache[key] = factors, strategies(factors, size, self.mesh, self.topology)
        self.factors[index], states = self._cache[key]
        if index in self.pinned:
            states = self._as_pinned(index, states)
        variable = self.variable_of[index] = self._variable(states)
        for k, value in enumerate(node.outputs):
            self.places[value] = (variable, k)
        for k, operand in enumerate(node.inputs):
            if operand in self.places and UNREAD.get(node.op.name) != k:
                self._cross(operand, Crossing(self.places[operand], variable, k, index,
                                              self.bytes(operand)))  # fmt: skip

    def split(self, index: int, strategy: Strategy) -> Split:
        """Return into how many slices a strategy cuts each axis of each operand of a node."""
        ranks = [len(self.shape(v)) for v in self.function.nodes[index].inputs]
        return tuple(
            slices(la, rank, self.mesh) for la, rank in zip(strategy.operands, ranks, strict=True)
        )

    def _as_pinned(self, index: int, states: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
        wanted = self.pinned[index]
        kept = tuple(s for s in states if self.split(index, s) == wanted)
        if not kept:
            node = self.function.nodes[index]
            splits = dict.fromkeys(self.split(index, s) for s in states)
            raise InvalidInput(
                f"{node.op} at {node.meta.location or f'node {index}'} cannot be split as "
                f"{wanted} on a mesh of {self.mesh}; it can be split as "
                f"{', '.join(map(str, list(splits)[:SHOWN_SPLITS]))}"
            )
        return kept

    def _add_results(self) -> None:
        """Add what it costs to give new state the layout of the old one."""
        for name, value in self.replaced.items():
            if value in self.places:
                reader, _ = self.places[self.function.param(name)]
                self._cross(value, Crossing(self.places[value], reader, -1, -1, self.bytes(value)))

    @cached_property
    def replaced(self) -> dict[str, Value]:
        """Results that replace a parameter of the same name and type."""
        params = {p.name: p for p in self.function.params}
        pairs = zip(self.function.result_names, self.function.results, strict=True)
        return {n: v for n, v in pairs if n in params and params[n].type == v.type}

    def _cross(self, value: Value, crossing: Crossing) -> None:
        self.crossings.append(crossing)
        producer, k = crossing.source
        if crossing.reader == producer and crossing.operand == -1 and value in self.function.params:
            return
        sources = tuple(s.outputs[k] for s in self.states[producer])
        targets = tuple(self.wanted(crossing, s) for s in self.states[crossing.reader])
        if len(sources) * len(targets) == 1 and sources == targets:
            return
        key = (sources, targets, crossing.size_bytes)
        if key not in self._matrices:
            self._matrices[key] = self._matrix(sources, targets, crossing.size_bytes)
        self.network.add(producer, crossing.reader, self._matrices[key])

    @staticmethod
    def wanted(crossing: Crossing, state: Strategy) -> Layout:
        """Return the layout in which a reader takes a value."""
        return state.outputs[0] if crossing.operand == -1 else state.operands[crossing.operand]

    def _matrix(
        self, sources: Sequence[Layout], targets: Sequence[Layout], size_bytes: int
    ) -> np.ndarray[Any, Any]:
        """Return the seconds from each layout to each; each pair of layouts is computed once."""
        rows, columns = list(dict.fromkeys(sources)), list(dict.fromkeys(targets))
        table = np.array(
            [[self.transfer(a, b, size_bytes).seconds for b in columns] for a in rows]
        )  # fmt: skip
        at_row = {a: i for i, a in enumerate(rows)}
        at_column = {b: i for i, b in enumerate(columns)}
        return table[np.ix_([at_row[a] for a in sources], [at_column[b] for b in targets])]

    def transfer(self, source: Layout, target: Layout, size_bytes: int) -> Transfer:
        """Return what it costs to change the layout of a value."""
        return reshard(source, target, size_bytes, self.mesh, self.topology)

    def local_bytes(self, value: Value, states: Sequence[int]) -> int:
        """Return the bytes of one device's part of a value."""
        return -(-self.bytes(value) // share_of(self.layout(value, states), self.mesh))

    @cached_property
    def _memory_rows(self) -> list[MemoryRow[XlaBuffer]]:
        return buffer_rows(self.function, self.variable_of)

    @cached_property
    def _buffers(self) -> dict[XlaBuffer, list[Value]]:
        """The values that share each buffer, one after the other or as views."""
        shared: dict[XlaBuffer, list[Value]] = {}
        for buffer, root in alive(self._memory_rows, (), lambda _: 0).roots.items():
            shared.setdefault(root, []).append(buffer.value)
        return shared

    def _buffer_bytes(self, buffer: XlaBuffer, states: Sequence[int]) -> int:
        values = [buffer.value, *self._buffers.get(buffer, ())]
        return max(self.local_bytes(v, states) for v in values)

    def memory(self, states: Sequence[int]) -> MemoryUse:
        """Return the memory of one device under an assignment."""
        function = self.function
        arguments = sum(self.local_bytes(p, states) for p in function.params)
        held = {v: self.local_bytes(v, states) for v in function.results}
        replacing = {XlaBuffer(v) for v in self.replaced.values()}
        reused = sum(held[b.value] for b in replacing)
        live = alive(
            self._memory_rows,
            [*map(XlaBuffer, function.results)],
            lambda b: 0 if b in replacing else self._buffer_bytes(b, states),
        )
        at_node = list(live.bytes_at)
        # An operand that arrives in another layout is a second tensor while its node runs.
        for crossing in self.crossings:
            copied = self._copied_bytes(crossing, states)
            if copied and crossing.node >= 0:
                at_node[crossing.node] += copied
        peak = max(at_node, default=0)
        at = at_node.index(peak) if at_node else 0
        results = sum(held[v] for v in function.results)
        return MemoryUse(arguments, results, reused, peak, at)

    def _copied_bytes(self, crossing: Crossing, states: Sequence[int]) -> int:
        producer, k = crossing.source
        have = self.states[producer][states[producer]].outputs[k]
        want = self.wanted(crossing, self.states[crossing.reader][states[crossing.reader]])
        return 0 if have == want else -(-crossing.size_bytes // share_of(want, self.mesh))

    def alive_at(self, peaks: set[int]) -> dict[Value, float]:
        """Return for each value at how many of these nodes it is in memory, as a share."""
        rows = tensor_rows(self.function, self.variable_of)
        live = alive(rows, [*map(XlaBuffer, self.function.results)], lambda _: 0)
        weights: dict[Value, float] = dict.fromkeys(self.function.params, 1.0)
        reused = set(self.replaced.values())
        for buffer, born in live.born.items():
            last, value = max([born, *live.uses.get(buffer, ())]), buffer.value
            count = sum(born <= peak <= last for peak in peaks)
            if count and (buffer.is_reordered or value not in reused) and value in self.places:
                weights[value] = weights.get(value, 0.0) + count / len(peaks)
        return weights

    def unary_bytes(self, peaks: set[int]) -> dict[int, np.ndarray[Any, Any]]:
        """Return the bytes that each state of a variable holds at these nodes, on average."""
        extra: dict[int, np.ndarray[Any, Any]] = {}
        for value, weight in self.alive_at(peaks).items():
            variable, k = self.places[value]
            whole = weight * self.bytes(value)
            costs = np.array([whole / share_of(s.outputs[k], self.mesh)
                              for s in self.states[variable]])  # fmt: skip
            extra[variable] = extra.get(variable, 0) + costs
        return extra


def strategies_in_code(function: Function) -> dict[int, Split]:
    """Return the strategies that a function's nodes have, by index.

    InvalidInput: a node inside a loop or a condition has one.
    """
    for node in function.nodes:
        inner = next((n for r in node.regions for n in r.walk() if n.strategy), None)
        if inner is not None:
            way = "give a strategy to operators outside of loops and conditions only"
            if node.op == custom_row.id:
                way = (
                    "a cell with a bprop is opened to train or to show a plan; for a plan that is "
                    "kept in a file (--out-model), give a strategy to operators outside of it only"
                )
            raise InvalidInput(
                f"{inner.op} at {inner.meta.location or 'an unknown line'} has the strategy "
                f"{inner.strategy} inside {node.op}, which is split as one node; {way}"
            )
    return {i: node.strategy for i, node in enumerate(function.nodes) if node.strategy}


def with_strategies_outside(function: Function) -> Function:
    """Return the function with the nodes of a cell with a bprop in place of the cell's node.

    Only of cells whose nodes have strategies. So what validates is split as what trains, which has
    opened such cells to differentiate them; the result has lost their gradient.
    """
    return _OpenedCells().rewrite(function)


class _OpenedCells(Rewriter):
    def region(self, function: Function) -> Function:
        """Keep loops and conditions, which are split as one node."""
        return function

    def place_of(self, part: Node, node: Node) -> Meta:
        """Return where the part itself was written, in the cell."""
        return part.meta

    def visit(self, node: Node) -> None:
        """Open a node that has a gradient of its own and strategies inside."""
        own = node.op == custom_row.id and any(n.strategy for n in node.regions[0].walk())
        if own:
            self.spread(node, node.regions[0])
        else:
            self.keep(node)


def with_dividing_strategies(function: Function, sizes: Mapping[str, int]) -> Function:
    """Return the function without the strategies whose slices these sizes do not divide.

    So a smaller last batch is planned freely. Sizes that are numbers were checked when recorded.
    """
    known: dict[Value, Array] = {}
    nodes = []
    for node in function.nodes:
        if (array := constant(node)) is not None:
            known[node.outputs[0]] = array
        kept = not node.strategy or _divides(node, sizes, known)
        nodes.append(node if kept else replace(node, strategy=()))
    return function.with_(nodes=nodes)


def _divides(node: Node, sizes: Mapping[str, int], known: Mapping[Value, Array]) -> bool:
    """Return whether a node's slices are equal, those of its results too."""

    def shape(value: Value | None) -> Shape:
        return () if value is None else tuple(evaluate(d, sizes) for d in value.type.shape)

    operands = tuple(map(shape, node.inputs))
    pairs = zip(chain(*operands), chain(*node.strategy), strict=True)
    if any(size % n for size, n in pairs):
        return False
    row = TABLE.get((node.op.domain, node.op.name))
    if row is None or node.regions:
        return True
    contents = tuple(None if v is None else known.get(v) for v in node.inputs)
    factors = factors_of(ShapedNode(node, row, operands, tuple(map(shape, node.outputs)), contents))
    try:
        cuts = cuts_of(row, factors, node.strategy)
    except InvalidInput:
        return True  # the planner says why
    results = zip(chain(*factors.outputs), chain(*map(shape, node.outputs)), strict=True)
    return not any(size % cuts.get(factor, 1) for factor, size in results)


def data_parallel(function: Function, sizes: Mapping[str, int], mesh: Mesh) -> dict[str, Layout]:
    """Return the layouts of plain data parallelism: batches cut by rows, state on every device."""
    whole = (COPIES,) * len(mesh)
    rows = (0, *(COPIES,) * (len(mesh) - 1))
    parts: dict[str, Layout] = {}
    for p in function.params:
        first = p.type.shape[0] if p.type.shape else None
        is_batch = first is not None and not isinstance(first, int)
        count = evaluate(first, sizes) if is_batch and first is not None else 0
        parts[p.name] = rows if is_batch and count % mesh[0] == 0 else whole
    return parts
