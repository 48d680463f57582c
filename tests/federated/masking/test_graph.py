"""The graph of neighbours: regular, symmetric, and connected as the thresholds assume."""

import hashlib
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triplane.unified_ir.federated.masking.graph import NeighbourGraph


def digest(number):
    return hashlib.sha256(str(number).encode()).digest()


@given(st.integers(3, 60), st.data(), st.integers(0, 99))
def test_every_device_has_k_neighbours_and_is_theirs(n, data, seed):
    k = data.draw(st.sampled_from([*range(2, n - 1, 2), n - 1]))
    graph = NeighbourGraph(n, k, digest(seed))
    edges = {(i, j) for i in range(n) for j in graph.neighbours(i)}
    assert Counter(i for i, _ in edges) == dict.fromkeys(range(n), k)
    assert edges == {(j, i) for i, j in edges}
    assert all(i != j and 0 <= j < n for i, j in edges)


def connected(members, graph):
    reached, waiting = set(), [min(members)]
    while waiting:
        i = waiting.pop()
        if i not in reached:
            reached.add(i)
            waiting += [j for j in graph.neighbours(i) if j in members]
    return reached == members


@given(st.data())
def test_survivors_with_more_than_half_their_neighbours_are_connected(data):
    # The reason for 2 (t - c) > k: whichever devices a cloud declares lost, no part is cut off.
    n, k = 30, data.draw(st.sampled_from([4, 6, 8, 10]))
    graph = NeighbourGraph(n, k, digest(data.draw(st.integers(0, 9))))
    members = data.draw(st.sets(st.integers(0, n - 1), min_size=8))
    while short := {i for i in members if sum(j in members for j in graph.neighbours(i)) <= k // 2}:
        members = members - short
    if members:
        assert connected(members, graph)


def test_the_graph_follows_from_the_digest():
    first = NeighbourGraph(20, 4, digest(1))
    assert first.neighbours(0) == NeighbourGraph(20, 4, digest(1)).neighbours(0)
    assert any(
        first.neighbours(i) != NeighbourGraph(20, 4, digest(2)).neighbours(i) for i in range(20)
    )


@pytest.mark.parametrize(("position", "neighbours"), [(0, (2, 7, 9, 10)), (19, (3, 4, 9, 14))])
def test_a_digest_gives_this_graph(position, neighbours):
    # Device and cloud derive it apart, perhaps in different versions.
    assert NeighbourGraph(20, 4, digest(1)).neighbours(position) == neighbours
