"""Pipeline stages: the layers of a function cut into parts of about equal time, one a device.

Nodes stay in their order, so a cut is a position between two nodes. Values that are computed before
it and read after it are sent to the next stage. Arguments with a batch axis reach every stage; what
only constants and sizes decide is computed by each stage that reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.graph import Function, Node, Value
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.passes.clean import drop_dead
from triplane.unified_ir.passes.memory import VIEWS, type_bytes
from triplane.unified_ir.passes.sharding.planner import MARGIN
from triplane.unified_ir.passes.sharding.problem import ShardingProblem
from triplane.unified_ir.passes.sharding.topology import Topology, check_devices

MAX_NODES: Final = 8192
"""Most nodes of a function that is cut: the search compares every pair of positions."""
MAX_MICROBATCHES: Final = 4096
DEFAULT_MICROBATCHES: Final = 4
"""Microbatches for each stage, where nobody says how many: the bubble is below a fifth."""
BACKWARD: Final = 3
"""Time of a backward pass in forward passes: the stage's forward pass again, and twice its work."""
Floats = np.ndarray[Any, np.dtype[np.float64]]
Rows = Callable[[int], Floats]
"""For an end p, a number for a stage of the nodes q..p-1, for each q < p; infinite: impossible."""


@dataclass(frozen=True, slots=True)
class Stage:
    """The nodes first..end-1, and what is predicted of them. layers: operators if outside of any.

    forward_s, sent_bytes: of one microbatch. seconds: of one microbatch with the backward pass, and
    with the transfer of the larger of what it receives and sends.
    """

    first: int
    end: int
    layers: tuple[str, ...]
    forward_s: float
    seconds: float
    parameter_bytes: int
    memory_bytes: int
    sent_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class StagePlan:
    """A function as a pipeline: each batch is computed in microbatches, one stage a device.

    sizes: those of a microbatch. copies: see `training_copies`; 1 for a forward pass alone.
    """

    function: Function
    stages: tuple[Stage, ...]
    microbatches: int
    sizes: Mapping[str, int]
    topology: Topology
    copies: int
    shared: tuple[str, ...]
    """Parameters that several stages read, of which each stage has a copy."""

    @property
    def trains(self) -> bool:
        """Return whether there is a backward pass."""
        return self.copies > 1

    @property
    def bounds(self) -> tuple[int, ...]:
        """Return the positions of the cuts, with both ends."""
        return (0, *(stage.end for stage in self.stages))

    @property
    def bubble(self) -> float:
        """Return the share of time in which a device waits: (S - 1) / (M + S - 1)."""
        cells = [cell for row in self.schedule() for cell in row]
        return cells.count("") / len(cells)

    @property
    def seconds(self) -> float:
        """Return the predicted time of a batch: all stages step together, as the slowest does."""
        steps = self.microbatches + len(self.stages) - 1
        return steps * max(stage.seconds for stage in self.stages)

    def schedule(self) -> list[list[str]]:
        """Return for each stage what it does in each step of time: F1, B1, ... or "" to wait."""
        stages, count = len(self.stages), self.microbatches

        def one(name: str, delay: int) -> list[str]:
            numbers = [t - delay for t in range(count + stages - 1)]
            return [f"{name}{m + 1}" if 0 <= m < count else "" for m in numbers]

        return [
            one("F", s) + (one("B", stages - 1 - s) if self.trains else [])
            for s in range(stages)
        ]  # fmt: skip


def link_seconds(topology: Topology, stages: int, size_bytes: float) -> float:
    """Return the time to send bytes to the next stage."""
    if not size_bytes:
        return 0.0
    link = topology.inside if stages <= topology.devices_per_host else topology.between
    return link.seconds(2, size_bytes)


def microbatches_of(rows: int, wanted: int) -> int:
    """Return the largest number of equal microbatches, up to the wanted one, of so many rows."""
    return max(n for n in range(1, min(rows, wanted) + 1) if rows % n == 0) if rows else 1


def training_copies(slots: int) -> int:
    """Return how many tensors of its size training holds for a parameter with so many slots.

    The update writes weight and slots beside the old ones; a gradient and the sum of gradients.
    """
    return 2 * (1 + slots) + 2


def plan_stages(
    function: Function,
    stages: int,
    microbatches: int,
    *,
    sizes: Mapping[str, int],
    copies: int = 1,
    memory_bytes: int | None = None,
    topology: Topology | None = None,
) -> StagePlan:
    """Return the cut whose slowest stage is fastest; of several, the one that sends least.

    sizes: of one microbatch, by symbol. copies: tensors of its size that a device holds for each
    parameter. memory_bytes: what one device has.
    InvalidInput: there are fewer nodes than stages, or no cut fits into the memory.
    """
    check_devices(stages, "stages")
    if type(microbatches) is not int or not 1 <= microbatches <= MAX_MICROBATCHES:
        raise InvalidInput(
            f"microbatches is a whole number from 1 to {MAX_MICROBATCHES:,}, got {microbatches!r}"
        )
    rates = topology or Topology()
    cuts = Cuts(function, sizes, rates)
    work = int(cuts.works.sum())
    if stages > work:
        raise InvalidInput(
            f"{function.name} has {work} nodes that work on data, too few for {stages} stages"
        )
    costs = _Costs(cuts, stages, microbatches, copies)
    limit = np.inf if memory_bytes is None else memory_bytes / MARGIN
    bounds = best_bounds(
        lambda p: np.where(costs.memory(p) <= limit, costs.seconds(p), np.inf),
        cuts.sent_bytes, stages,
    )  # fmt: skip
    if bounds is None:
        raise InvalidInput(_too_large(costs, stages, memory_bytes or 0))
    return StagePlan(
        function,
        tuple(costs.stage(q, p) for q, p in pairwise(bounds)),
        microbatches, dict(sizes), rates, copies, cuts.shared(bounds),
    )  # fmt: skip


def _too_large(costs: _Costs, stages: int, memory_bytes: int) -> str:
    least = best_bounds(costs.memory, costs.cuts.sent_bytes, stages)
    assert least is not None, "without a limit some cut exists"
    need = max(costs.memory(p)[q] for q, p in pairwise(least)) * MARGIN
    return (
        f"no cut into {stages} stages fits {memory_bytes:,} bytes on each device: the smallest "
        f"needs {round(need):,} with the margin of {MARGIN - 1:.0%}; use more stages, more "
        "microbatches or a smaller batch"
    )


def best_bounds(rows: Rows, sent: Floats, stages: int) -> tuple[int, ...] | None:
    """Return positions 0 = p0 < p1 < ... that minimize the largest row(p[k+1])[p[k]]; None if none.

    Of several, those with the least sum of sent[p] at the cuts.
    """
    largest = _search(rows, stages, np.maximum, len(sent) - 1)
    if largest is None:
        return None
    limit = max(rows(p)[q] for q, p in pairwise(largest))

    def sends(p: int) -> Floats:
        return np.where(rows(p) <= limit, sent[:p], np.inf)

    return _search(sends, stages, np.add, len(sent) - 1)


def _search(rows: Rows, stages: int, combine: Any, n: int) -> tuple[int, ...] | None:
    """Return the bounds whose combined rows are least, by dynamic programming over positions."""
    best = np.full((stages + 1, n + 1), np.inf)
    best[0, 0] = 0.0
    chosen = np.zeros((stages + 1, n + 1), np.int64)
    for p in range(1, n + 1):
        costs = combine(best[:-1, :p], rows(p))
        chosen[1:, p] = costs.argmin(axis=1)
        best[1:, p] = costs.min(axis=1)
    if not np.isfinite(best[stages, n]):
        return None
    bounds = [n]
    for k in range(stages, 0, -1):
        bounds.append(int(chosen[k, bounds[-1]]))
    return tuple(reversed(bounds))


class Cuts:
    """What each position between two nodes of a function sends, and what each node costs."""

    def __init__(self, function: Function, sizes: Mapping[str, int], topology: Topology) -> None:
        if len(function.nodes) > MAX_NODES:
            raise InvalidInput(
                f"{function.name} has {len(function.nodes):,} nodes; at most {MAX_NODES:,} are cut "
                "into stages"
            )
        self.function, self.sizes, self.topology = function, sizes, topology
        self.lives = Lives(function)
        problem = ShardingProblem(function, sizes, (1,), topology)
        n = len(function.nodes)
        self.seconds, self.held = np.zeros(n), np.zeros(n)
        self.works = np.zeros(n, np.int64)
        for i, node in enumerate(function.nodes):
            if i in self.lives.free_nodes:
                continue
            self.works[i] = 1
            if i in problem.variable_of:
                self.seconds[i] = problem.states[problem.variable_of[i]][0].compute_s
            if node.op.name not in VIEWS:
                self.held[i] = sum(self.bytes(v) for v in node.outputs)
        steps = np.zeros(n + 2)
        for value, (born, end) in self.lives.spans.items():
            steps[born + 1] += self.bytes(value)
            steps[end + 1] -= self.bytes(value)
        self.sent_bytes = np.cumsum(steps)[: n + 1]

    def bytes(self, value: Value) -> int:
        """Return the bytes of a value of one microbatch."""
        return type_bytes(value.type, self.sizes)

    @cached_property
    def batch_bytes(self) -> int:
        """Return the bytes of the arguments with a batch axis."""
        return sum(self.bytes(p) for p in self.function.params if is_batch(p))

    def shared(self, bounds: Sequence[int]) -> tuple[str, ...]:
        """Return the parameters that more than one stage reads."""
        ends = np.array(bounds[1:])
        return tuple(
            p.name
            for p, nodes in self.lives.readers.items()
            if len(set(np.searchsorted(ends, nodes, "right"))) > 1
        )


def is_batch(param: Value) -> bool:
    """Return whether an argument has a batch axis; others are state."""
    return bool(param.type.symbols)


class Lives:
    """Where the values of a function are computed and read.

    free: values that only constants and sizes decide. spans: for each other value of a node, its
    node and the last one that reads it (the number of nodes for a result). readers: nodes by
    parameter that is state.
    """

    def __init__(self, function: Function) -> None:
        self.free: set[Value] = set()
        self.free_nodes: set[int] = set()
        self.spans: dict[Value, tuple[int, int]] = {}
        self.readers: dict[Value, list[int]] = {p: [] for p in function.params if not is_batch(p)}
        for i, node in enumerate(function.nodes):
            row = TABLE.get((node.op.domain, node.op.name))
            fixed = all(v is None or v in self.free for v in node.inputs)
            if fixed and not (row is not None and row.nondeterministic):
                self.free.update(node.outputs)
                self.free_nodes.add(i)
                continue
            self._read(node, i)
            self.spans |= dict.fromkeys(node.outputs, (i, i))
        for value in function.results:
            if value in self.spans:
                self.spans[value] = (self.spans[value][0], len(function.nodes))

    def _read(self, node: Node, i: int) -> None:
        for value in node.inputs:
            if value in self.spans:
                self.spans[value] = (self.spans[value][0], i)
            elif value in self.readers:
                self.readers[value].append(i)

    def crossing(self, position: int) -> list[Value]:
        """Return the values that are sent where the function is cut before a node."""
        return [v for v, (born, end) in self.spans.items() if born < position <= end]


class _Costs:
    """Time and memory of the stage of the nodes q..p-1, for one p and every q."""

    def __init__(self, cuts: Cuts, stages: int, microbatches: int, copies: int) -> None:
        self.cuts, self.copies, self.microbatches = cuts, copies, microbatches
        self.passes = 1 + BACKWARD if copies > 1 else 1
        self._work = np.concatenate([[0.0], np.cumsum(cuts.seconds)])
        self._held = np.concatenate([[0.0], np.cumsum(cuts.held)])
        self._count = np.concatenate([[0], np.cumsum(cuts.works)])
        ways = 2 if copies > 1 else 1
        n = len(cuts.seconds)
        self._send = np.array(
            [ways * link_seconds(cuts.topology, stages, x) for x in cuts.sent_bytes]
        )
        self._send[[0, n]] = 0.0
        # Each read of a parameter: its node, the node that read it before (-1: none), its bytes.
        reads = sorted(
            (i, before, float(cuts.bytes(param)))
            for param, nodes in cuts.lives.readers.items()
            for before, i in pairwise([-1, *sorted(set(nodes))])
        )
        table = np.array(reads).reshape(-1, 3)
        self._read_at, self._read_before = table[:, :2].astype(np.int64).T
        self._read_bytes = table[:, 2]

    def seconds(self, p: int) -> Floats:
        """Return the time of a microbatch, both passes and sending included."""
        work = self.passes * (self._work[p] - self._work[:p])
        seconds = work + np.maximum(self._send[:p], self._send[p])
        return np.where(self._count[p] > self._count[:p], seconds, np.inf)

    def parameters(self, p: int) -> Floats:
        """Return the bytes of the parameters that a stage reads, each counted once."""
        k = int(np.searchsorted(self._read_at, p))
        at, before, size = self._read_at[:k], self._read_before[:k], self._read_bytes[:k]
        # Shifted by one, so that a read that has none before is subtracted in a place of no use.
        added = np.bincount(at + 1, size, p + 1) - np.bincount(before + 1, size, p + 1)
        return np.cumsum(added[:0:-1])[::-1]

    def memory(self, p: int) -> Floats:
        """Return the bytes of one device: parameters, inputs of all microbatches, one in work."""
        cuts = self.cuts
        saved = self.microbatches if self.copies > 1 else 1
        batch = cuts.batch_bytes * self.microbatches
        held = self._held[p] - self._held[:p]
        memory = self.copies * self.parameters(p) + saved * cuts.sent_bytes[:p] + held + batch
        return np.where(self._count[p] > self._count[:p], memory, np.inf)

    def stage(self, q: int, p: int) -> Stage:
        """Return what is known of a stage."""
        nodes = self.cuts.function.nodes[q:p]
        is_last = p == len(self.cuts.seconds)
        layers = dict.fromkeys(node.meta.scope for node in nodes if node.meta.scope)
        return Stage(
            q, p,
            tuple(layers or dict.fromkeys(str(node.op) for node in nodes)),
            float(self._work[p] - self._work[q]),
            float(self.seconds(p)[q]),
            int(self.parameters(p)[q]),
            int(self.memory(p)[q]),
            0 if is_last else int(self.cuts.sent_bytes[p]),
        )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class StagePart:
    """The function of one stage.

    Its parameters are the batch, then what the stage before it sends (`received`), then the state
    that it reads. Its results are what it sends on (`sent`), those of the whole for the last stage.
    """

    function: Function
    received: tuple[str, ...]
    sent: tuple[str, ...]
    state: tuple[str, ...]


def parts(function: Function, bounds: Sequence[int]) -> tuple[StagePart, ...]:
    """Return the function of each stage for cuts at these positions."""
    lives = Lives(function)
    names = {
        v: f"value.{i}.{k}"
        for i, node in enumerate(function.nodes)
        for k, v in enumerate(node.outputs)
    }
    last = len(function.nodes)
    return tuple(
        _part(function, lives, names, q, p, is_last=p == last) for q, p in pairwise(bounds)
    )


def _part(
    function: Function, lives: Lives, names: Mapping[Value, str], q: int, p: int, *, is_last: bool
) -> StagePart:
    received = {v: Value(v.type, names[v]) for v in lives.crossing(q)}
    nodes = [
        replace(node, inputs=tuple(received.get(v, v) if v else None for v in node.inputs))
        for i, node in enumerate(function.nodes)
        if q <= i < p or i in lives.free_nodes
    ]
    crossing = () if is_last else tuple(lives.crossing(p))
    results = function.results if is_last else crossing
    sent = tuple(names[v] for v in crossing)
    whole = function.with_(
        params=(*filter(is_batch, function.params), *received.values(), *lives.readers),
        results=[received.get(v, v) for v in results],
        result_names=function.result_names if is_last else sent,
        nodes=nodes,
    )
    whole = drop_dead(whole)
    read = {v for node in whole.nodes for v in node.inputs} | {*whole.results}
    state = tuple(v for v in lives.readers if v in read)
    return StagePart(
        whole.with_(params=(*filter(is_batch, function.params), *received.values(), *state)),
        tuple(v.name for v in received.values()),
        sent,
        tuple(v.name for v in state),
    )
