import pytest
from hypothesis import given
from hypothesis import strategies as st

from triplane.cloud.fleet.waves import Count, Percent, cumulative, exceeds, least, wave_of
from triplane.proto.errors import InvalidInput


@pytest.mark.parametrize(
    ("sizes", "nodes", "counts"),
    [
        ((), 7, (7,)),
        ((Percent(5), Percent(25), Percent(100)), 40, (2, 10, 40)),
        ((Percent(5), Percent(25), Percent(100)), 3, (1, 1, 3)),
        ((Percent(7), Percent(100)), 100, (7, 100)),
        ((Count(1), Count(5), Percent(100)), 3, (1, 3, 3)),
        ((Percent(10),), 40, (4,)),
    ],
)
def test_waves_are_cumulative_and_rounded_up(sizes, nodes, counts):
    assert cumulative(sizes, nodes) == counts


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((Percent(0),), "above 0% and at most 100%, got 0%"),
        ((Percent(100.5),), "got 100.5%"),
        ((Percent(float("nan")),), "got nan%"),
        ((Count(0),), "at least one node"),
        ((Percent(50), Percent(20)), "wave 2 is 2 of 10 nodes after 5"),
        ((Percent(1),) * 101, "at most 100 waves"),
    ],
)
def test_waves_that_shrink_or_are_none_are_refused(sizes, message):
    with pytest.raises(InvalidInput, match=message):
        cumulative(sizes, 10)


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=5), st.integers(1, 300))
def test_each_node_is_in_the_first_wave_that_reaches_it(shares, nodes):
    sizes = cumulative([Percent(share) for share in sorted(shares)], nodes)
    waves = [wave_of(i, sizes) for i in range(nodes)]
    for wave, size in enumerate(sizes):
        assert sum(w is not None and w <= wave for w in waves) == size
        assert size >= 1
        assert size >= sorted(shares)[wave] / 100 * nodes - 1e-6


def test_a_share_counts_whole_nodes_without_rounding_errors():
    assert least(0.07, 100) == 7
    assert least(0.9, 10) == 9
    assert not exceeds(7, 0.07, 100)
    assert exceeds(1, 0.0, 10)
    assert not exceeds(0, 0.0, 0)
