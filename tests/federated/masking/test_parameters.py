"""Neighbours and thresholds, against enumeration and against the bounds that they promise."""

import math
from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.masking.groups import group_sizes
from triplane.unified_ir.federated.masking.parameters import (
    COMPLETE_UP_TO,
    GRINDING_TRIES,
    MAX_COHORT,
    MaskingParameters,
    _below,
    _most,
    choose_parameters,
)


def choose(devices, **changes):
    settings = {"least": 3, "lost_share": 1 / 3, "colluding_share": 0.05, "failure": 1e-6}
    return choose_parameters(devices, **{**settings, **changes})


def at_least(total, marked, drawn, count):
    """P(at least `count` of the marked are drawn), by its definition."""
    ways = sum(
        math.comb(marked, i) * math.comb(total - marked, drawn - i)
        for i in range(count, min(marked, drawn) + 1)
    )
    return Fraction(ways, math.comb(total, drawn))


@given(st.integers(1, 9), st.data())
def test_tails_are_those_of_drawing_without_replacement(total, data):
    marked = data.draw(st.integers(0, total))
    drawn = data.draw(st.integers(0, total))
    least = data.draw(st.integers(0, total + 1))
    counts = [sum(i < marked for i in c) for c in combinations(range(total), drawn)]
    assert _below(total, marked, drawn, least) == Fraction(
        sum(c < least for c in counts), len(counts)
    )
    failure = data.draw(st.fractions(0, 1))
    bound = _most(total, marked, drawn, failure)
    assert Fraction(sum(c > bound for c in counts), len(counts)) <= failure
    if bound > min(counts):
        assert Fraction(sum(c > bound - 1 for c in counts), len(counts)) > failure


@pytest.mark.parametrize("devices", [65, 100, 500, 1000])
@pytest.mark.parametrize(("lost", "colluding"), [(1 / 3, 0.05), (0.1, 0.1), (0.05, 0.0)])
def test_both_kinds_of_failure_are_as_rare_as_promised(devices, lost, colluding):
    p = choose(devices, lost_share=lost, colluding_share=colluding)
    assert not p.complete
    more = p.colluding_neighbours + 1
    too_many = at_least(devices - 1, p.colluding, p.neighbours, more)
    too_few = 1 - at_least(devices - 1, devices - 1 - p.lost, p.neighbours, p.threshold)
    assert devices * (GRINDING_TRIES * too_many + too_few) <= Fraction(1e-6)
    assert 2 * (p.threshold - p.colluding_neighbours) > p.neighbours
    assert p.neighbours % 2 == 0


@given(st.integers(3, 200), st.floats(0, 0.4), st.floats(0, 0.2))
def test_no_second_survivor_set_and_no_second_secret_can_be_had(devices, lost, colluding):
    try:
        p = choose(devices, lost_share=lost, colluding_share=colluding)
    except InvalidInput:
        return
    assert 2 * p.threshold > p.neighbours + p.colluding_neighbours
    assert 2 * p.quorum > devices + p.colluding
    assert p.colluding_neighbours < p.threshold <= p.neighbours < devices
    assert p.lost <= devices - max(p.quorum, p.least)
    assert p.least >= p.colluding + 2
    assert p.complete or devices > COMPLETE_UP_TO


@pytest.mark.parametrize(
    ("cohort", "groups"), [(24, 4), (100, 5), (200, 4), (600, 6), (1000, 20), (1000, 9)]
)
@pytest.mark.parametrize("share", [0.02, 0.05, 0.1])
def test_colluders_of_no_group_are_more_than_its_parameters_say(cohort, groups, share):
    colluding = math.ceil(share * cohort)
    graphs = Fraction(0)
    for size in group_sizes(cohort, groups):
        p = choose(size, cohort=cohort, colluding_share=share, lost_share=0.0)
        assert p.colluding_cohort == colluding
        assert p.colluding <= min(colluding, size)
        more = GRINDING_TRIES * at_least(cohort, colluding, size, p.colluding + 1)
        assert 2 * groups * more <= Fraction(1e-6)
        # One fewer would not do, for as many groups as the cohort could have.
        fewer = GRINDING_TRIES * at_least(cohort, colluding, size, p.colluding)
        assert 2 * ((cohort - 1) // (size - 1)) * fewer > Fraction(1e-6)
        assert p.least >= p.colluding + 2
        if not p.complete:
            too_many = at_least(size - 1, p.colluding, p.neighbours, p.colluding_neighbours + 1)
            too_few = 1 - at_least(size - 1, size - 1 - p.lost, p.neighbours, p.threshold)
            graphs += size * (GRINDING_TRIES * too_many + too_few)
    assert 2 * graphs <= Fraction(1e-6)


@pytest.mark.long
def test_the_bound_on_a_groups_colluders_is_that_of_scipy():
    p = choose(50, cohort=1000, lost_share=0.0)
    tail = pytest.importorskip("scipy.stats").hypergeom(1000, 50, 50).sf
    groups = 999 // 49
    assert tail(p.colluding) * 2 * groups * GRINDING_TRIES <= 1e-6
    assert tail(p.colluding - 1) * 2 * groups * GRINDING_TRIES > 1e-6


@given(st.integers(3, 200), st.floats(0, 0.4), st.floats(0, 0.2))
def test_a_cohort_of_one_group_has_the_parameters_that_it_always_had(devices, lost, colluding):
    shares = {"lost_share": lost, "colluding_share": colluding}
    try:
        alone = choose(devices, **shares)
    except InvalidInput as error:
        with pytest.raises(InvalidInput) as again:
            choose(devices, cohort=devices, **shares)
        assert str(again.value) == str(error)
        return
    assert choose(devices, cohort=devices, **shares) == alone
    assert alone.colluding == alone.colluding_cohort


def test_a_groups_colluders_grow_with_the_group_and_with_their_share():
    def counts(**changes):
        return [choose(n, cohort=1000, lost_share=0.0, **changes).colluding for n in sizes]

    sizes = (25, 40, 50, 100, 200, 500, 1000)
    few, many = counts(colluding_share=0.02), counts(colluding_share=0.05)
    assert few == sorted(few)
    assert many == sorted(many)
    assert all(a <= b for a, b in zip(few, many, strict=True))
    assert (few[-1], many[-1]) == (20, 50)
    assert counts(colluding_share=0.0) == [0] * len(sizes)


def test_the_parameters_of_a_cohort_are_these():
    # Device and cloud compute them apart, perhaps in different versions: they must not change.
    cohorts = choose(3, lost_share=0.0), choose(1000), choose(1000, lost_share=0.1)
    shape = [(p.neighbours, p.threshold, p.quorum, p.lost, p.colluding) for p in cohorts]
    assert shape == [(2, 2, 3, 0, 1), (572, 337, 526, 333, 50), (178, 136, 526, 100, 50)]


def test_few_losses_and_colluders_need_few_neighbours():
    counts = [choose(1000, lost_share=x, colluding_share=x).neighbours for x in (0.01, 0.05, 0.1)]
    assert counts == sorted(counts)
    assert counts[0] < 80


@pytest.mark.parametrize(
    ("devices", "changes", "message"),
    [
        (2, {"least": 2}, "3 <= least cohort"),
        (5, {"least": 6}, "got least cohort 6 and 5 devices"),
        (MAX_COHORT + 1, {}, "<= 10000"),
        (10, {"lost_share": 1.0}, r"in \[0, 1\)"),
        (10, {"lost_share": float("nan")}, r"in \[0, 1\)"),
        (10, {"colluding_share": -0.1}, r"in \[0, 1\)"),
        (10, {"failure": 0.0}, r"\(0, 1\)"),
        (10, {"lost_share": 0.5}, "cannot tolerate 5 lost and 1 colluding of 10"),
        (100, {"lost_share": 0.3, "colluding_share": 0.45}, "cannot tolerate"),
        (10, {"colluding_share": 0.9}, "at least 11 devices"),
        (5, {"least": 6, "cohort": 30}, "cohort 6 and groups of 5 devices; form fewer groups"),
        (10, {"cohort": 9}, "a group of 10 devices is of a cohort of as many to 10000, got 9"),
        (10, {"cohort": MAX_COHORT + 1}, "got 10001"),
        (
            4,
            {"cohort": 60},
            r"at least 5 devices in each group \(with 3 colluding\), got 4; form fewer groups",
        ),
        (5, {"cohort": 20, "lost_share": 0.4}, "cannot tolerate 2 lost and 1 colluding of 5 devic"),
    ],
)
def test_what_cannot_hold_is_refused(devices, changes, message):
    with pytest.raises(InvalidInput, match=message):
        choose(devices, **changes)


def test_people_read_what_was_chosen():
    assert choose(1000).text().splitlines() == [
        (
            "masking for 1000 devices: every device shares its secrets with neighbours that a hash "
            "of all keys chooses (572); 337 of 572 shares recover a secret"
        ),
        (
            "the cloud learns a sum only over 52 or more devices, after 526 of them have signed "
            "the same list"
        ),
        (
            "holds while at most 333 devices are lost and at most 50 collude with the cloud, "
            "except with probability 1e-06"
        ),
    ]
    assert "with all others (9)" in choose(10).text()
    assert choose(6, cohort=30, lost_share=0.0).text().splitlines() == [
        (
            "masking for groups of 6 of 30 devices: every device shares its secrets with all "
            "others of its group (5); 4 of 5 shares recover a secret"
        ),
        (
            "the cloud learns a sum only over 4 or more devices of a group, after 5 of them have "
            "signed the same list"
        ),
        (
            "holds while at most 0 devices of a group are lost and at most 2 of all 30 (2 in one "
            "group) collude with the cloud, except with probability 1e-06"
        ),
    ]
    assert isinstance(choose(10), MaskingParameters)
