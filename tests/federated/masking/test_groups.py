"""Groups of a cohort: a partition that follows from the digest alone, the same for everybody."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.masking.groups import group_sizes, groups_of


def digest(number):
    return hashlib.sha256(str(number).encode()).digest()


@given(st.integers(1, 12), st.integers(0, 40), st.integers(0, 99))
def test_each_device_is_in_one_group_of_nearly_equal_size(groups, more, seed):
    devices = 3 * groups + more
    partition = groups_of(digest(seed), devices, groups)
    assert sorted(i for group in partition for i in group) == list(range(devices))
    assert all(list(group) == sorted(group) for group in partition)
    sizes = [len(group) for group in partition]
    assert tuple(sizes) == group_sizes(devices, groups)
    assert max(sizes) - min(sizes) <= 1


def test_a_digest_gives_these_groups():
    # Device and cloud derive them apart, perhaps in different versions.
    assert groups_of(digest(1), 11, 3) == ((0, 1, 4, 7), (2, 6, 9, 10), (3, 5, 8))


def test_two_devices_meet_as_often_as_chance_has_it():
    tries = 3000
    met = sum(
        any({0, 11} <= set(group) for group in groups_of(digest(i), 12, 3)) for i in range(tries)
    )
    chance = 3 / 11
    assert abs(met - tries * chance) < 5 * (tries * chance * (1 - chance)) ** 0.5


@pytest.mark.parametrize(("devices", "groups"), [(11, 4), (5, 2), (0, 2), (9, 0), (9, -1)])
def test_groups_that_cannot_be_masked_are_refused(devices, groups):
    words = f"{devices} devices make 1 to {max(1, devices // 3)} of them, got {groups} groups"
    with pytest.raises(InvalidInput, match=words):
        group_sizes(devices, groups)
    with pytest.raises(InvalidInput, match="ask more devices, or form fewer groups"):
        groups_of(digest(0), devices, groups)
