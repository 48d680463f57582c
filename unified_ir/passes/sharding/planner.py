"""Plan how a function is split over devices: the cheapest strategies that fit their memory.

The planner predicts; it needs no device. Time is what the nodes take, plus the collectives, one
after the other (overlap is not modelled). Memory is checked with a margin, because a compiler's own
buffers are known here by a few rules only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.graph import Function, Split
from triplane.unified_ir.passes.sharding.problem import (
    Crossing,
    MemoryUse,
    ShardingProblem,
    data_parallel,
    strategies_in_code,
)
from triplane.unified_ir.passes.sharding.search import EFFORT, Choices
from triplane.unified_ir.passes.sharding.strategies import (
    NOTHING,
    Layout,
    Strategy,
    Transfer,
    slices,
)
from triplane.unified_ir.passes.sharding.topology import Mesh, Topology, check_devices

MARGIN: Final = 1.25
"""A plan fits if its predicted bytes times this do: a compiler's buffers may be as much larger."""
PENALTIES: Final = 12
"""Prices of a byte that are tried, each four times the last one, until a plan fits."""
REFINEMENTS: Final = 4
"""Halvings of the price between the last that was too low and the first that was enough."""
MAX_REFINED: Final = 2
"""Meshes on which the search makes its whole effort."""
SMALL_EFFORT: Final = EFFORT // 20
"""Effort for plans that are compared, and for each price of a byte."""


@dataclass(frozen=True, slots=True)
class PlannedNode:
    """One node of a plan. own: adding its partial results. moved: what its operands' layouts cost.

    picks: the factor that each mesh axis cuts, "" for none.  whole_s: work of the node uncut.
    is_pinned: its split was decided before planning, as by `shard` in the code.
    """

    index: int
    operator: str
    scope: str
    line: str
    split: Split
    output_split: Split
    picks: tuple[str, ...]
    rule: str
    compute_s: float
    own: Transfer
    moved: Transfer
    collectives: tuple[str, ...]
    output_bytes: int
    whole_s: float
    is_pinned: bool

    @property
    def seconds(self) -> float:
        """Return compute and communication."""
        return self.compute_s + self.own.seconds + self.moved.seconds

    @property
    def sent_bytes(self) -> float:
        """Return the bytes that each device sends for this node."""
        return self.own.sent_bytes + self.moved.sent_bytes


@dataclass(frozen=True, slots=True)
class Alternative:
    """A strategy of one node, with its neighbours as planned. total_s: the time of that plan."""

    split: Split
    output_split: Split
    picks: tuple[str, ...]
    compute_s: float
    own: Transfer
    moved: Transfer
    total_s: float
    is_chosen: bool


@dataclass(frozen=True, slots=True)
class OtherPlan:
    """Another plan in a line: what it is, its mesh, and what it would cost."""

    what: str
    mesh: Mesh
    seconds: float
    total_bytes: int


class ParallelPlan:
    """A strategy for each node, a layout for each parameter, and what they are predicted to cost.

    others: plans that were compared, the cheapest first; the first one is the next best plan.
    """

    def __init__(
        self, problem: ShardingProblem, choices: Choices, others: Iterable[OtherPlan] = ()
    ) -> None:
        self.problem, self.choices = problem, choices
        self.others = tuple(others)
        self.seconds = choices.cost
        self.memory: MemoryUse = problem.memory(choices.states)

    @property
    def mesh(self) -> Mesh:
        """Return the number of devices along each mesh axis."""
        return self.problem.mesh

    @property
    def function(self) -> Function:
        """Return the function that is planned."""
        return self.problem.function

    @property
    def next_best(self) -> OtherPlan | None:
        """Return the cheapest plan that differs; None if there is only one."""
        return self.others[0] if self.others else None

    def strategy(self, index: int) -> Strategy | None:
        """Return the strategy of a node by its index; None for constants and sizes."""
        variable = self.problem.variable_of.get(index)
        if variable is None:
            return None
        return self.problem.states[variable][self.choices.states[variable]]

    def strategies(self) -> Mapping[int, Split]:
        """Return the split of each node by its index: slices of each axis of each operand."""
        return {
            i: self.problem.split(i, s)
            for i in self.problem.variable_of
            if (s := self.strategy(i)) is not None
        }

    def with_strategies(self) -> Function:
        """Return the function with the planned split of each node as its strategy.

        A plan with these strategies has these splits, as long as the sizes divide.
        """
        splits = self.strategies()
        nodes = enumerate(self.function.nodes)
        return self.function.with_(
            nodes=(replace(n, strategy=splits.get(i, n.strategy)) for i, n in nodes)
        )

    def layouts(self) -> Mapping[str, Layout]:
        """Return for each parameter, by name, the tensor axis that each mesh axis cuts, or -1."""
        states = self.choices.states
        return {p.name: self.problem.layout(p, states) for p in self.function.params}

    def result_layouts(self) -> Mapping[str, Layout]:
        """Return for each result, by name, its layout; new state has the layout of the old one."""
        named = zip(self.function.result_names, self.function.results, strict=True)
        own = {name: self.problem.layout(v, self.choices.states) for name, v in named}
        old = self.layouts()
        return own | {name: old[name] for name in self.problem.replaced}

    def output_layouts(self) -> Mapping[int, tuple[Layout, ...]]:
        """Return for each node, by index, the layouts of its outputs, as `layouts` has them."""
        chosen = ((i, self.strategy(i)) for i in self.problem.variable_of)
        return {i: s.outputs for i, s in chosen if s is not None}

    def _state(self, variable: int) -> Strategy:
        return self.problem.states[variable][self.choices.states[variable]]

    @cached_property
    def _moved(self) -> dict[int, list[tuple[Transfer, int]]]:
        """What operands cost that arrive in another layout, by the index of the reading node."""
        problem, moved = self.problem, dict[int, list[tuple[Transfer, int]]]()
        for c in problem.crossings:
            have = self._state(c.source[0]).outputs[c.source[1]]
            want = problem.wanted(c, self._state(c.reader))
            cost = problem.transfer(have, want, c.size_bytes)
            if cost != NOTHING:
                moved.setdefault(c.node, []).append((cost, c.operand))
        return moved

    @cached_property
    def nodes(self) -> tuple[PlannedNode, ...]:
        """The nodes that are planned, in the order of the graph."""
        return tuple(self._planned(i) for i in self.problem.variable_of)

    def _planned(self, index: int) -> PlannedNode:
        node, strategy = self.function.nodes[index], self.strategy(index)
        assert strategy is not None
        moved = [t for t, _ in self._moved.get(index, ())]
        local = sum(self.problem.local_bytes(v, self.choices.states) for v in node.outputs)
        return PlannedNode(
            index,
            str(node.op),
            node.meta.scope,
            str(node.meta.location or ""),
            self.problem.split(index, strategy),
            self._output_split(index, strategy),
            strategy.picks,
            self.problem.factors[index].rule,
            strategy.compute_s,
            strategy.transfer,
            _added(moved),
            strategy.collectives,
            local,
            max(s.compute_s for s in self.problem.states[self.problem.variable_of[index]]),
            index in self.problem.pinned,
        )

    def _output_split(self, index: int, strategy: Strategy) -> Split:
        outputs = self.function.nodes[index].outputs
        return tuple(
            slices(la, len(self.problem.shape(v)), self.mesh)
            for la, v in zip(strategy.outputs, outputs, strict=True)
        )

    @property
    def state_transfer(self) -> Transfer:
        """Return what it costs to give new state the layout of the old one."""
        return _added([t for t, _ in self._moved.get(-1, ())])

    @property
    def compute_s(self) -> float:
        """Return the time without communication."""
        return sum(n.compute_s for n in self.nodes)

    @property
    def sent_bytes(self) -> float:
        """Return the bytes that each device sends."""
        return sum(n.sent_bytes for n in self.nodes) + self.state_transfer.sent_bytes

    def alternatives(self, index: int) -> tuple[Alternative, ...]:
        """Return every strategy of a node with its neighbours as planned, the cheapest first."""
        problem, states = self.problem, list(self.choices.states)
        if index not in problem.variable_of:
            raise InvalidInput(
                f"node {index} has no strategies: constants and sizes are computed on every device"
            )
        variable = problem.variable_of[index]
        chosen, rows = states[variable], []
        near = [c for c in problem.crossings if variable in {c.reader, c.source[0]}]
        own = [problem.states[variable][k].seconds for k in range(len(problem.states[variable]))]
        for k, strategy in enumerate(problem.states[variable]):
            states[variable] = k
            moved = _added([_transfer(problem, c, states) for c in near])
            rows.append((k, strategy, moved, own[k] + moved.seconds))
        base = rows[chosen][3]
        alternatives = [
            Alternative(
                self.problem.split(index, s), self._output_split(index, s), s.picks, s.compute_s,
                s.transfer, moved, self.seconds - base + total, k == chosen,
            )
            for k, s, moved, total in rows
        ]  # fmt: skip
        return tuple(sorted(alternatives, key=lambda a: (a.total_s, not a.is_chosen)))


def _transfer(problem: ShardingProblem, crossing: Crossing, states: Sequence[int]) -> Transfer:
    producer, k = crossing.source
    have = problem.states[producer][states[producer]].outputs[k]
    want = problem.wanted(crossing, problem.states[crossing.reader][states[crossing.reader]])
    return problem.transfer(have, want, crossing.size_bytes)


def _added(transfers: Sequence[Transfer]) -> Transfer:
    return Transfer(sum(t.seconds for t in transfers), sum(t.sent_bytes for t in transfers))


def plan(
    function: Function,
    devices: int,
    *,
    sizes: Mapping[str, int] | None = None,
    memory_bytes: int | None = None,
    topology: Topology | None = None,
    pinned: Mapping[int, Split] | None = None,
) -> ParallelPlan:
    """Return the cheapest plan of a function on a number of devices.

    sizes: a number for each symbol of its types, such as {"N": 32}. memory_bytes: what one device
    has. pinned: nodes, by index, whose split is decided, beside those with a strategy of their own;
    the others are split around them.
    InvalidInput: a size is missing, a node has no such split, or no plan fits; the message has the
    least that one needs.
    """
    check_devices(devices)
    topology, sizes = topology or Topology(), dict(sizes or {})
    pinned = strategies_in_code(function) | dict(pinned or {})
    solved: list[tuple[ShardingProblem, Choices]] = []
    least: list[MemoryUse] = []
    for problem in _problems(function, devices, sizes, topology, pinned):
        choices, smallest = _within(problem, memory_bytes)
        least.append(smallest)
        if choices is not None:
            solved.append((problem, choices))
    if not solved:
        assert memory_bytes is not None
        raise InvalidInput(_too_large(min(least, key=lambda m: m.total), memory_bytes, devices))
    solved.sort(key=lambda pair: pair[1].cost)
    if memory_bytes is None:
        solved = _refined(solved)
    problem, choices = solved[0]
    others = [_other("best on another mesh", p, c) for p, c in solved[1:]]
    others += _compared(problem, choices)
    return ParallelPlan(problem, choices, sorted(others, key=lambda o: o.seconds))


def _refined(
    solved: list[tuple[ShardingProblem, Choices]],
) -> list[tuple[ShardingProblem, Choices]]:
    """Improve the plans that may still be the best one, the most promising ones only."""
    best = solved[0][1].cost
    near = [choices.gap > 0 and choices.cost * (1 - choices.gap) < best for _, choices in solved]
    refined = [
        (problem, problem.network.solve() if is_near and k < MAX_REFINED else choices)
        for k, (is_near, (problem, choices)) in enumerate(zip(near, solved, strict=True))
    ]
    return sorted(refined, key=lambda pair: pair[1].cost)


def _problems(
    function: Function,
    devices: int,
    sizes: Mapping[str, int],
    topology: Topology,
    pinned: Mapping[int, Split] | None,
) -> Iterator[ShardingProblem]:
    """Yield the function on each mesh that has the pinned splits; refuse what none has."""
    meshes = topology.meshes(devices)
    refused: list[InvalidInput] = []
    for mesh in meshes:
        try:
            yield ShardingProblem(function, sizes, mesh, topology, pinned=pinned)
        except InvalidInput as error:
            refused.append(error)
    if len(refused) == len(meshes):
        if not pinned:
            raise refused[-1]
        tried = ", ".join(map(str, meshes))
        raise InvalidInput(
            f"{refused[-1]}; no mesh of {devices} devices ({tried}) has every split that is decided"
        )


def plan_with_layouts(
    function: Function,
    mesh: Mesh,
    layouts: Mapping[str, Layout],
    *,
    sizes: Mapping[str, int] | None = None,
    topology: Topology | None = None,
) -> ParallelPlan:
    """Return the cheapest plan in which these parameters have these layouts.

    layouts: by name, for each mesh axis the tensor axis that is cut along it, or -1 for copies;
    `data_parallel` gives those of data parallelism. InvalidInput: a size does not divide.
    """
    problem = ShardingProblem(function, dict(sizes or {}), mesh, topology or Topology(), layouts)
    return ParallelPlan(problem, problem.network.solve())


def _too_large(least: MemoryUse, limit: int, devices: int) -> str:
    needed = round(least.total * MARGIN)
    return (
        f"no plan for {devices} devices fits {limit:,} bytes each: the smallest one needs "
        f"{needed:,} bytes ({least.arguments:,} of arguments, {least.temporaries:,} of tensors "
        f"alive at once, and a quarter more for the compiler's own buffers); give more memory, "
        "more devices or a smaller batch"
    )


def _within(problem: ShardingProblem, limit: int | None) -> tuple[Choices | None, MemoryUse]:
    """Return the cheapest assignment whose memory fits, and the smallest memory that was seen.

    Memory is given a price that rises until the plan fits (Lagrangian relaxation), so the plan is
    the cheapest one only among those that some price selects.
    """
    best = problem.network.solve(SMALL_EFFORT)
    use = problem.memory(best.states)
    if limit is None or _fits(use, limit):
        return best, use
    smallest, fitting = use, None
    price, low, peaks = best.cost / max(use.total, 1) / 4, 0.0, {use.at}
    for _ in range(PENALTIES):
        choices, use = _priced(problem, price, peaks)
        peaks.add(use.at)
        smallest = min(smallest, use, key=lambda m: m.total)
        if _fits(use, limit):
            fitting = choices
            break
        low, price = price, 4 * price
    for _ in range(REFINEMENTS if fitting is not None else 0):
        middle = (low + price) / 2
        choices, use = _priced(problem, middle, peaks)
        if not _fits(use, limit):
            low = middle
            continue
        price = middle
        fitting = min(fitting, choices, key=lambda c: c.cost) if fitting else choices
    return fitting, smallest


def _fits(use: MemoryUse, limit: int) -> bool:
    return use.total * MARGIN <= limit


def _priced(problem: ShardingProblem, price: float, peaks: set[int]) -> tuple[Choices, MemoryUse]:
    """Return the assignment with the least time plus price times bytes; its cost is its time."""
    extra = {v: price * costs for v, costs in problem.unary_bytes(peaks).items()}
    choices = problem.network.with_unary(extra).solve(SMALL_EFFORT)
    time = problem.network.cost(choices.states)
    timed = Choices(choices.states, time, choices.method, choices.gap)
    return timed, problem.memory(choices.states)


def _other(what: str, problem: ShardingProblem, choices: Choices) -> OtherPlan:
    return OtherPlan(what, problem.mesh, choices.cost, problem.memory(choices.states).total)


def _compared(problem: ShardingProblem, choices: Choices) -> list[OtherPlan]:
    """Return plans to compare with: another split of the costliest node, and the usual two."""
    others = []
    excluded = _excluding(problem, choices)
    if excluded is not None:
        others.append(_other(*excluded))
    function, sizes, topology = problem.function, problem.sizes, problem.topology
    one_axis = (int(np.prod(problem.mesh)),)
    fixed = data_parallel(function, sizes, one_axis)
    for what, layouts in (("data parallel", fixed), ("one device's work on each", None)):
        if layouts is None:
            whole = problem.network.cost([0] * len(problem.states))
            use = problem.memory([0] * len(problem.states))
            others.append(OtherPlan(what, problem.mesh, whole, use.total))
            continue
        usual = ShardingProblem(function, sizes, one_axis, topology, layouts)
        others.append(_other(what, usual, usual.network.solve(SMALL_EFFORT)))
    return [o for o in others if o.seconds > choices.cost * (1 + 1e-9) or o.mesh != problem.mesh]


def _excluding(
    problem: ShardingProblem, choices: Choices
) -> tuple[str, ShardingProblem, Choices] | None:
    """Return the best plan without the chosen strategy of the node that takes the longest."""
    nodes = [(problem.states[v][choices.states[v]].seconds, i, v)
             for i, v in problem.variable_of.items() if len(problem.states[v]) > 1]  # fmt: skip
    if not nodes:
        return None
    _, index, variable = max(nodes, key=lambda n: (n[0], -n[1]))
    penalty = np.zeros(len(problem.states[variable]))
    penalty[choices.states[variable]] = 10 * choices.cost + 1
    other = problem.network.with_unary({variable: penalty}).solve(SMALL_EFFORT)
    node = problem.function.nodes[index]
    cost = problem.network.cost(other.states)
    if other.states[variable] == choices.states[variable]:
        return None
    what = f"another split of {node.op}, node {index}"
    return what, problem, Choices(other.states, cost, other.method, other.gap)
