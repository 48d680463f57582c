"""Choose one state for each variable so that the sum of costs is least.

States that no least assignment needs are left out; then variables are eliminated (`elimination`),
which is exact. What is too interwoven for that, the core, becomes a mixed-integer program; a core
that is too large for the solver is improved in large neighbourhoods, and its gap to a lower bound
is stated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from triplane.proto.errors import InvalidInput, MissingExtra
from triplane.unified_ir.passes.sharding.dominance import undominated
from triplane.unified_ir.passes.sharding.elimination import Costs, CostTable, Elimination

MAX_MILP_ENTRIES: Final = 30_000
"""Most entries of the tables of a mixed-integer program; HiGHS takes seconds for these."""
MILP_SECONDS: Final = 10.0
EFFORT: Final = 200_000_000
"""Entries of joint tables that improving a large core may compute: a few seconds."""
LEAST_WORK: Final = 1_000_000
"""What a round of improving counts at least, so that small cores end, too."""
GOOD_ENOUGH: Final = 0.001
"""Gap to the lower bound, as a share of the core's cost, at which improving ends."""


@dataclass(frozen=True, slots=True)
class Choices:
    """A state for each variable, the sum of costs, and how it was found.

    gap: by how much the cost may exceed the least one, as a share; 0 if it is exact.
    """

    states: tuple[int, ...]
    cost: float
    method: str
    gap: float


@dataclass(slots=True)
class CostNetwork:
    """Variables with a number of states each, and the tables whose sum is minimized."""

    counts: list[int] = field(default_factory=list)
    tables: dict[tuple[int, ...], Costs] = field(default_factory=dict)

    def variable(self, costs: Sequence[float] | Costs) -> int:
        """Add a variable with the costs of its states; return its number."""
        self.counts.append(len(costs))
        self.tables[(len(self.counts) - 1,)] = np.asarray(costs, np.float64)
        return len(self.counts) - 1

    def add(self, a: int, b: int, costs: Costs) -> None:
        """Add costs[state of a, state of b]; tables over one pair are added up."""
        if a == b:
            self.tables[(a,)] = self.tables[(a,)] + np.diagonal(costs)
            return
        scope, table = ((a, b), costs) if a < b else ((b, a), costs.T)
        if table.any():
            there = self.tables.get(scope)
            self.tables[scope] = table if there is None else there + table

    def with_unary(self, extra: Mapping[int, Costs]) -> CostNetwork:
        """Return the network with more costs of states."""
        tables = dict(self.tables)
        for variable, costs in extra.items():
            tables[(variable,)] = tables[(variable,)] + costs
        return CostNetwork(list(self.counts), tables)

    def cost(self, states: Sequence[int]) -> float:
        """Return the sum of the costs of an assignment."""
        return math.fsum(
            float(t[tuple(states[v] for v in scope)]) for scope, t in self.tables.items()
        )

    def solve(self, effort: int = EFFORT) -> Choices:
        """Return the cheapest assignment.

        effort: how many entries of joint tables may be computed to improve what is not exact.
        """
        kept = undominated(self.counts, self.tables)
        choices = _solved(self._only(kept), effort)
        states = tuple(int(k[s]) for k, s in zip(kept, choices.states, strict=True))
        return Choices(states, self.cost(states), choices.method, choices.gap)

    def _only(self, kept: Sequence[NDArray[np.intp]]) -> CostNetwork:
        """Return the network of these states."""
        tables, cut = {}, dict[Any, Costs]()
        for scope, costs in self.tables.items():
            key = (id(costs), *(kept[v].tobytes() for v in scope))
            if key not in cut:
                cut[key] = costs[np.ix_(*(kept[v] for v in scope))]
            tables[scope] = cut[key]
        return CostNetwork([len(k) for k in kept], tables)


def _solved(network: CostNetwork, effort: int) -> Choices:
    solver = Elimination(
        network.counts, [CostTable(scope, costs) for scope, costs in network.tables.items()]
    )
    states = [0] * len(network.counts)
    method, excess = "dynamic programming", 0.0
    if rest := solver.run():
        core = solver.remaining(rest)
        method, excess = improve_core(core, rest, network.counts, states, effort)
    solver.assign(states)
    cost = network.cost(states)
    return Choices(tuple(states), cost, method, excess / cost if cost else 0.0)


def improve_core(
    tables: Sequence[CostTable],
    variables: Sequence[int],
    counts: Sequence[int],
    states: list[int],
    effort: int = EFFORT,
) -> tuple[str, float]:
    """Set the states of the core; return how, and by how much its cost may exceed the least."""
    if sum(t.costs.size for t in tables) <= MAX_MILP_ENTRIES:
        chosen, excess = milp(tables, {v: counts[v] for v in variables})
        for v, state in chosen.items():
            states[v] = state
        return "mixed-integer program", excess
    relaxed = Elimination(counts, tables)
    bound = relaxed.relax(variables)
    relaxed.assign(states)
    best = _cost(tables, states)
    rng = np.random.default_rng(0)  # the same function gives the same plan
    while best - bound > GOOD_ENOUGH * abs(best) and effort > 0:
        tried = list(states)
        part = Elimination(counts, tables)
        part.run_around(tried, variables, rng)
        part.assign(tried)
        effort -= max(part.work, LEAST_WORK)
        cost = _cost(tables, tried)
        if cost < best:
            states[:], best = tried, cost
    return "large neighbourhoods", max(0.0, best - bound)


def _cost(tables: Sequence[CostTable], states: Sequence[int]) -> float:
    return math.fsum(float(t.costs[tuple(states[v] for v in t.scope)]) for t in tables)


def milp(tables: Sequence[CostTable], counts: Mapping[int, int]) -> tuple[dict[int, int], float]:
    """Return the states of least cost, and by how much it may exceed the least where time ran out.

    One binary for each state of a variable and one number for each entry of a table; an entry's
    marginals are the states of its variables.
    """
    optimize, sparse = _scipy()
    offset, columns = {}, 0
    for v, n in counts.items():
        offset[v] = columns
        columns += n
    binaries = columns
    rows: list[NDArray[np.int64]] = []
    cols: list[NDArray[np.int64]] = []
    values: list[NDArray[np.float64]] = []
    bounds: list[float] = []
    objective = [np.zeros(binaries)]

    def constrain(at: Any, sign: Any, right: float) -> None:
        rows.append(np.full(len(at), len(bounds), np.int64))
        cols.append(np.asarray(at, np.int64))
        values.append(np.asarray(sign, np.float64))
        bounds.append(right)

    for v, n in counts.items():
        constrain(offset[v] + np.arange(n), np.ones(n), 1.0)
    for t in tables:
        if len(t.scope) == 1:
            n = counts[t.scope[0]]
            objective[0][offset[t.scope[0]] : offset[t.scope[0]] + n] += t.costs
            continue
        places = columns + np.arange(t.costs.size).reshape(t.costs.shape)
        columns += t.costs.size
        objective.append(t.costs.reshape(-1))
        for axis, v in enumerate(t.scope):
            for state in range(counts[v]):
                at = np.take(places, state, axis).reshape(-1)
                sign = np.append(np.ones(len(at)), -1.0)
                constrain(np.append(at, offset[v] + state), sign, 0.0)
    costs = np.concatenate(objective)
    # HiGHS compares with absolute tolerances, and costs are seconds: the largest becomes 1.
    scale = float(np.abs(costs).max()) or 1.0
    matrix = sparse.csr_matrix(
        (np.concatenate(values), (np.concatenate(rows), np.concatenate(cols))),
        shape=(len(bounds), columns),
    )
    result = optimize.milp(
        costs / scale,
        integrality=(np.arange(columns) < binaries).astype(int),
        bounds=optimize.Bounds(0, 1),
        constraints=optimize.LinearConstraint(matrix, bounds, bounds),
        options={"time_limit": MILP_SECONDS, "mip_rel_gap": 1e-6},
    )
    if result.x is None:
        raise InvalidInput(f"the solver found no plan within {MILP_SECONDS:g} s: {result.message}")
    states = {v: int(result.x[offset[v] : offset[v] + n].argmax()) for v, n in counts.items()}
    return states, float(result.mip_gap or 0.0) * float(result.fun) * scale


def _scipy() -> tuple[Any, Any]:
    """Return scipy.optimize and scipy.sparse, which only graphs of large width need."""
    try:
        from scipy import optimize, sparse
    except ImportError as error:
        raise MissingExtra(
            "this graph is too interwoven for dynamic programming, and the solver for it, scipy, "
            "is not installed; it comes with: pip install 'triplane[xla]'"
        ) from error
    return optimize, sparse
