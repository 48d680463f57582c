"""Eliminate variables from a sum of cost tables: min-plus dynamic programming.

Variables go one by one, the one with the smallest joint table first (Bertele and Brioschi 1972). It
is exact; on chains and series-parallel graphs tables have at most three variables. Tables of equal
content are one object, so the tables of a block that repeats are computed once.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

MAX_TABLE: Final = 1 << 21
"""Most entries of a joint table."""

Costs = NDArray[np.float64]


@dataclass(frozen=True, eq=False, slots=True)
class CostTable:
    """Costs over some variables, in increasing order; one axis each."""

    scope: tuple[int, ...]
    costs: Costs


class Elimination:
    """One elimination; `assign` gives the states once it has run."""

    def __init__(self, counts: Sequence[int], tables: Iterable[CostTable]) -> None:
        """counts: the number of states of each variable."""
        self.counts = counts
        self.touching: dict[int, list[CostTable]] = {}
        self._steps: list[tuple[int, list[CostTable]]] = []
        self._memo: dict[Any, Costs] = {}
        self._interned: dict[Any, Costs] = {}
        self._constant = 0.0
        self.work = 0
        """Entries of all joint tables so far: a measure of effort that machines agree on."""
        for table in tables:
            self._attach(CostTable(table.scope, self._one(table.costs)))

    def _one(self, costs: Costs) -> Costs:
        """Return the one array with this content."""
        return self._interned.setdefault((costs.shape, costs.tobytes()), costs)

    def _attach(self, table: CostTable) -> None:
        if not table.scope:
            self._constant += float(table.costs)
        for v in table.scope:
            self.touching.setdefault(v, []).append(table)

    def _joint(self, tables: Iterable[CostTable]) -> tuple[tuple[int, ...], int]:
        scope = tuple(sorted({u for t in tables for u in t.scope}))
        return scope, math.prod(self.counts[u] for u in scope)

    def run(self) -> list[int]:
        """Eliminate while joint tables are small enough; return the variables that remain."""
        heap = [(self._joint(tables)[1], v) for v, tables in self.touching.items()]
        heapq.heapify(heap)
        while heap:
            size, v = heapq.heappop(heap)
            if v not in self.touching:
                continue
            scope, now = self._joint(self.touching[v])
            if now != size:
                heapq.heappush(heap, (now, v))
                continue
            if size > MAX_TABLE:
                break
            self._eliminate(v, [self.touching[v]])
            for u in scope:
                if u in self.touching:
                    heapq.heappush(heap, (self._joint(self.touching[u])[1], u))
        return sorted(self.touching)

    def remaining(self, variables: Iterable[int]) -> list[CostTable]:
        """Return the tables over variables that are not eliminated."""
        return list({id(t): t for v in variables for t in self.touching[v]}.values())

    def relax(self, variables: Sequence[int]) -> float:
        """Eliminate everything; return a lower bound of the least sum.

        A joint table that is too large is split: the variable may then choose a state in each part,
        so the sum of the minima is a bound (mini-buckets, Dechter and Rish 2003).
        """
        while left := [v for v in variables if v in self.touching]:
            v = min(left, key=lambda u: self._joint(self.touching[u])[1])
            self._eliminate(v, self._parts(self.touching[v]))
        return self._constant

    def _parts(self, tables: list[CostTable]) -> list[list[CostTable]]:
        parts: list[list[CostTable]] = []
        for table in sorted(tables, key=lambda t: -t.costs.size):
            for part in parts:
                if self._joint([*part, table])[1] <= MAX_TABLE:
                    part.append(table)
                    break
            else:
                parts.append([table])
        return parts

    def run_around(
        self, states: Sequence[int], variables: Sequence[int], rng: np.random.Generator
    ) -> None:
        """Eliminate everything, with as few variables as needed kept in their present states."""
        order = dict(zip(variables, rng.permutation(len(variables)).tolist(), strict=True))
        while rest := self.run():
            # A variable with many neighbours opens the most when it is fixed; among those, chance
            # decides, so that each round fixes others.
            busy = sorted(rest, key=lambda v: -len(self._joint(self.touching[v])[0]))
            v = min(busy[: max(4, len(busy) // 3)], key=lambda u: order[u])
            self._fix(v, states[v])

    def _fix(self, v: int, state: int) -> None:
        tables = self.touching.pop(v)
        for t in tables:
            for u in t.scope:
                if u != v:
                    self.touching[u] = [x for x in self.touching[u] if x is not t]
            rest = tuple(u for u in t.scope if u != v)
            left: Costs = np.asarray(t.costs.take(state, t.scope.index(v)))
            self._attach(CostTable(rest, self._one(left)))

    def _eliminate(self, v: int, parts: list[list[CostTable]]) -> None:
        self._steps.append((v, self.touching.pop(v)))
        for part in parts:
            scope, _ = self._joint(part)
            rest = tuple(u for u in scope if u != v)
            for u in rest:
                gone = set(map(id, part))
                self.touching[u] = [t for t in self.touching[u] if id(t) not in gone]
            self._attach(CostTable(rest, self._minimum(v, scope, part)))

    def _minimum(self, v: int, scope: tuple[int, ...], tables: list[CostTable]) -> Costs:
        axis = scope.index(v)
        # The key has places instead of variables: equal blocks elsewhere share the result.
        key = (axis, len(scope), tuple(sorted(
            (tuple(scope.index(u) for u in t.scope), id(t.costs)) for t in tables
        )))  # fmt: skip
        if key not in self._memo:
            joint = np.zeros([self.counts[u] for u in scope])
            self.work += joint.size * len(tables)
            for t in tables:
                joint += _spread(t, scope)
            self._memo[key] = self._one(joint.min(axis))
        return self._memo[key]

    def assign(self, states: list[int]) -> None:
        """Set the states of the eliminated variables, the last one first."""
        for v, tables in reversed(self._steps):
            costs = np.zeros(self.counts[v])
            for t in tables:
                costs += t.costs[tuple(slice(None) if u == v else states[u] for u in t.scope)]
            states[v] = int(costs.argmin())


def _spread(table: CostTable, scope: tuple[int, ...]) -> Costs:
    """Return the costs with an axis for each variable of `scope`."""
    shape = [1] * len(scope)
    for u, n in zip(table.scope, table.costs.shape, strict=True):
        shape[scope.index(u)] = n
    return table.costs.reshape(shape)
