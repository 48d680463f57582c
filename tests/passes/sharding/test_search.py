"""The search: exact against enumeration, and within 5 percent where it has to fall back."""

import numpy as np
import pytest
from tests.passes.sharding.drawn_graphs import drawn_function, least_by_enumeration

from triplane.proto.errors import MissingExtra
from triplane.unified_ir.passes.sharding import Topology, elimination, search
from triplane.unified_ir.passes.sharding.dominance import undominated
from triplane.unified_ir.passes.sharding.problem import ShardingProblem
from triplane.unified_ir.passes.sharding.search import CostNetwork

GRAPHS = 200
MOST_ASSIGNMENTS = 2_000_000


def problems(count=GRAPHS):
    """Problems that are small enough to enumerate, on 4, 6 and 7 devices."""
    seed = 0
    while count:
        seed += 1
        mesh = ((4,), (2, 2), (6,), (2, 3), (7,))[seed % 5]
        problem = ShardingProblem(drawn_function(seed), {}, mesh, Topology(flops_per_s=1e9))
        if np.prod([float(n) for n in problem.network.counts]) <= MOST_ASSIGNMENTS:
            count -= 1
            yield problem.network


def drawn_network(rng, variables=7, states=3):
    """Random costs on every pair: as interwoven as it can be."""
    network = CostNetwork()
    for _ in range(variables):
        network.variable(rng.random(states))
    for a in range(variables):
        for b in range(a):
            network.add(a, b, rng.random((states, states)))
    return network


def test_plans_of_200_graphs_are_the_best_ones():
    equal = 0
    for network in problems():
        least, choices = least_by_enumeration(network), network.solve()
        assert choices.cost == pytest.approx(network.cost(choices.states), abs=0)
        assert choices.cost <= 1.05 * least
        equal += choices.cost <= least * (1 + 1e-9)
    assert equal == GRAPHS  # dynamic programming is exact on all of them


def test_interwoven_networks_need_the_solver_and_are_exact(monkeypatch):
    monkeypatch.setattr(elimination, "MAX_TABLE", 30)
    for seed in range(5):
        network = drawn_network(np.random.default_rng(seed))
        choices = network.solve()
        assert choices.method == "mixed-integer program"
        assert choices.cost == pytest.approx(least_by_enumeration(network), rel=1e-5)


def test_a_core_that_is_too_large_keeps_its_bound(monkeypatch):
    monkeypatch.setattr(elimination, "MAX_TABLE", 30)
    monkeypatch.setattr(search, "MAX_MILP_ENTRIES", 0)
    equal = 0
    for seed in range(12):
        network = drawn_network(np.random.default_rng(seed))
        choices, least = network.solve(), least_by_enumeration(network)
        assert choices.method == "large neighbourhoods"
        assert choices.cost * (1 - choices.gap) <= least * (1 + 1e-9)
        assert least <= choices.cost * (1 + 1e-9)
        assert choices.cost <= 1.05 * least
        equal += choices.cost <= least * (1 + 1e-9)
    assert equal >= 6


def test_the_same_network_gives_the_same_choice(monkeypatch):
    monkeypatch.setattr(elimination, "MAX_TABLE", 30)
    monkeypatch.setattr(search, "MAX_MILP_ENTRIES", 0)
    found = [drawn_network(np.random.default_rng(3)).solve() for _ in range(2)]
    assert found[0] == found[1]


def test_dominated_states_are_never_needed():
    for seed in range(50):
        rng = np.random.default_rng(seed)
        network = drawn_network(rng, variables=5, states=4)
        for v in range(5):  # a large own cost makes some states useless
            network.tables[(v,)][rng.integers(4)] += 3
        kept = undominated(network.counts, network.tables)
        rest = CostNetwork(
            [len(k) for k in kept],
            {s: t[np.ix_(*(kept[v] for v in s))] for s, t in network.tables.items()},
        )
        assert least_by_enumeration(rest) == pytest.approx(least_by_enumeration(network))
        assert sum(rest.counts) < sum(network.counts)


def test_equal_states_leave_one():
    network = CostNetwork()
    network.variable([1.0, 1.0, 1.0])
    assert undominated(network.counts, network.tables)[0].tolist() == [0]


def test_without_scipy_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(elimination, "MAX_TABLE", 30)
    monkeypatch.setitem(__import__("sys").modules, "scipy", None)
    with pytest.raises(MissingExtra, match=r"pip install 'triplane\[xla\]'"):
        drawn_network(np.random.default_rng(0)).solve()
