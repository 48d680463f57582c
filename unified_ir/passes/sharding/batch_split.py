"""Data parallelism node by node: which values each device has rows of, and what must be added up.

Every value is whole on each device, or cut along one axis, or a partial result that an all-reduce
adds up. Nodes with a cut operand work on one device's part of it, by the planner's rules; all
others are computed whole by every device. What no rule can cut this way is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.dims import Expr, is_symbol
from triplane.unified_ir.ir.graph import Function, Node, Value
from triplane.unified_ir.ops.factors import ADDED, MEANS, NOT_SUMS, constant
from triplane.unified_ir.ops.row import OpKind
from triplane.unified_ir.ops.table import row_of
from triplane.unified_ir.passes.sharding.problem import ShardingProblem, data_parallel
from triplane.unified_ir.passes.sharding.strategies import COPIES, Strategy
from triplane.unified_ir.passes.sharding.topology import Topology

WAY_OUT: Final = "train without buckets, which leaves the split to XLA"


@dataclass(frozen=True, slots=True)
class PartialResult:
    """A value of which each device has a part. ready_s: when, from the start of the function.

    is_mean: the parts are means of equally many elements, so their mean is the result; else their
    sum is. is_awaited: later parts depend on the result, so its all-reduce cannot wait for them.
    """

    value: Value
    node: int
    name: str
    size_bytes: int
    ready_s: float
    is_mean: bool
    is_awaited: bool


@dataclass(frozen=True, slots=True)
class BatchSplit:
    """A function whose batches are split over devices.

    axes: for each value that is cut, along which axis. work: for each node that works on parts, the
    axis along which it takes each operand, or -1 for whole. local_sizes: a number for each symbol
    on one device. seconds: predicted work of one device, without communication.
    """

    function: Function
    devices: int
    sizes: Mapping[str, int]
    axes: Mapping[Value, int]
    work: Mapping[int, tuple[int, ...]]
    partial: tuple[PartialResult, ...]
    local_sizes: Mapping[str, int]
    seconds: float

    def gradients(self) -> list[PartialResult]:
        """Return the results that may share an all-reduce, in the order in which they are ready."""
        return [p for p in self.partial if not p.is_awaited]


def split_batch(
    function: Function, devices: int, *, sizes: Mapping[str, int], topology: Topology | None = None
) -> BatchSplit:
    """Return how a function works on batches that are cut by rows.

    InvalidInput: the rows of no batch divide evenly, or a node needs rows of other devices, such as
    batch normalization; the message names it.
    """
    walk = _Walk(ShardingProblem(function, dict(sizes), (devices,), topology or Topology()))
    for index, node in enumerate(function.nodes):
        walk.visit(index, node)
    walk.check_results()
    return BatchSplit(
        function, devices, dict(sizes), walk.axes, walk.work, walk.partial(), walk.local_sizes,
        walk.now_s,
    )  # fmt: skip


class _Walk:
    """What is known about the values of a function, up to some node."""

    def __init__(self, problem: ShardingProblem) -> None:
        self.problem = problem
        self.axes: dict[Value, int] = {}
        self.work: dict[int, tuple[int, ...]] = {}
        self.now_s = 0.0
        self._parts: dict[Value, tuple[int, float]] = {}
        self._zeros: set[Value] = set()
        self._before: dict[Value, frozenset[Value]] = {}
        cut = data_parallel(problem.function, problem.sizes, problem.mesh)
        self.local_sizes = dict(problem.sizes)
        for p in problem.function.params:
            if cut[p.name][0] != COPIES and is_symbol(p.type.shape[0]):
                self.axes[p] = cut[p.name][0]
                symbol = str(p.type.shape[0])
                self.local_sizes[symbol] = problem.sizes[symbol] // problem.mesh[0]
        if not self.axes:
            named = ", ".join(f"{k}={v}" for k, v in problem.sizes.items())
            raise InvalidInput(
                f"{problem.function.name} has no batch whose rows divide over {problem.mesh[0]} "
                f"devices (sizes: {named}); give a batch size that does"
            )

    def visit(self, index: int, node: Node) -> None:
        """Decide whether a node works on parts, and what its outputs are."""
        operands = [v for v in node.inputs if v is not None]
        waited = frozenset[Value]().union(
            *(self._before.get(v, frozenset()) for v in operands),
            (v for v in operands if v in self._parts),
        )
        for output in node.outputs:
            self._before[output] = waited
        self._note_zeros(node)
        variable = self.problem.variable_of.get(index)
        if not any(v in self.axes for v in operands):
            # The whole node on every device; it comes first among the strategies.
            if variable is not None:
                self.now_s += self.problem.states[variable][0].compute_s
            return
        strategy = self._strategy(index, node)
        self.now_s += strategy.compute_s
        self.work[index] = tuple(layout[0] for layout in strategy.operands)
        for value, layout in zip(node.outputs, strategy.outputs, strict=True):
            if layout[0] != COPIES:
                self.axes[value] = layout[0]
            elif node.op.name not in ADDED:
                self._parts[value] = index, self.now_s

    def _note_zeros(self, node: Node) -> None:
        """Note whether the outputs are zeros: a constant, or zeros that are moved."""
        array = constant(node)
        moved = row_of(node).kind is OpKind.MOVEMENT and node.inputs[0] in self._zeros
        if moved:
            # Another operand may be the value of a pad, or an array that is joined.
            dtype = node.outputs[0].type.dtype
            others = (v for v in node.inputs if v is not None and v.type.dtype == dtype)
            moved = all(v in self._zeros for v in others)
        if moved or (array is not None and not np.any(array)):
            self._zeros.update(node.outputs)

    def _strategy(self, index: int, node: Node) -> Strategy:
        """Return the strategy that takes the operands as they are, or slices of whole ones."""
        alike = not node.regions and not _reads_sizes(node)
        if index in self.problem.variable_of and alike:
            states = self.problem.states[self.problem.variable_of[index]]
            fitting = (s for s in states if s.picks[0] and self._fits(node, s))
            if (strategy := next(fitting, None)) is not None:
                return strategy
        raise self._refused(node)

    def _fits(self, node: Node, strategy: Strategy) -> bool:
        """Return whether a strategy takes the operands, and its partial results are added."""
        operands = list(zip(node.inputs, strategy.operands, strict=True))
        if any(v in self.axes and layout[0] != self.axes[v] for v, layout in operands):
            return False
        if not strategy.collectives or node.op.name in ADDED:
            return True
        # A whole operand, such as a bias, would be added by each device; that of a reduction is
        # its axes.
        added = operands[:1] if row_of(node).kind is OpKind.REDUCTION else operands
        repeated = any(
            v is not None and layout[0] == COPIES and v not in self._zeros for v, layout in added
        )
        # A mean of integers is rounded, so means of means are other numbers.
        rounded = node.op.name in MEANS and not node.outputs[0].type.dtype.is_float
        summed = set(strategy.collectives) == {"all-reduce"} and node.op.name not in NOT_SUMS
        return summed and not repeated and not rounded

    def _refused(self, node: Node) -> InvalidInput:
        place = f" (at {node.meta.location})" if node.meta.location else ""
        return InvalidInput(
            f"{node.op}{place} cannot work on {self.problem.mesh[0]} parts of a batch without the "
            f"rows of the other devices, so its gradients have no buckets; {WAY_OUT}"
        )

    def check_results(self) -> None:
        """Refuse results that stay cut: each result is whole on every device."""
        function = self.problem.function
        for name, value in zip(function.result_names, function.results, strict=True):
            if value in self.axes:
                raise InvalidInput(
                    f"the result {name!r} of {function.name} has a row for each sample; buckets "
                    "are for training steps, whose results are state and means"
                )

    def partial(self) -> tuple[PartialResult, ...]:
        """Return the partial results in the order in which they are ready."""
        awaited = frozenset[Value]().union(*(self._before[v] for v in self._parts))
        nodes, bytes_of = self.problem.function.nodes, self.problem.bytes
        return tuple(
            PartialResult(
                value, index, _named(nodes[index]), bytes_of(value), ready_s,
                nodes[index].op.name in MEANS, value in awaited,
            )
            for value, (index, ready_s) in self._parts.items()
        )  # fmt: skip


def _named(node: Node) -> str:
    layer = node.meta.scope.removeprefix("grad").removeprefix(".")
    return f"{layer or 'loss'}: {node.op.name}"


def _reads_sizes(node: Node) -> bool:
    """Return whether attributes of a node have sizes, which would be those of one device."""
    return any(
        isinstance(value, tuple) and any(isinstance(d, Expr) for d in value)
        for value in node.attrs.values()
    )


def is_shape_of_result(node: Node, source: Node) -> bool:
    """Return whether what another node reads from sizes is the shape of a node's result.

    A device then needs the shape of its own part, as `Reshape` and `Expand` do.
    """
    if row_of(node).kind is not OpKind.MOVEMENT or row_of(source).kind is not OpKind.SOURCE:
        return False
    shape = node.outputs[0].type.shape
    return any(isinstance(x, tuple) and x == shape for x in source.attrs.values())
