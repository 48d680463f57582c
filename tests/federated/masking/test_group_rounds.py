"""Rounds whose cohort is masked in groups: exact sums, losses, and clouds that mix groups."""

import hashlib
import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.federated.masking.rounds import (
    PHASES,
    Round,
    device_name,
    sum_of,
    terms,
    vectors_of,
)

from triplane.proto.errors import Conflict, InvalidInput, Unavailable
from triplane.unified_ir.federated.masking.messages import MaskingCohort, SealedShares
from triplane.unified_ir.federated.masking.session import group_sessions

DEVICES = 12


class GroupRound(Round):
    """A round in groups; a phase returns what each group's cloud said, by its number."""

    def __init__(self, n=DEVICES, groups=3, **changes):
        super().__init__(n, terms(**{"groups": groups, "lost_share": 0.25, **changes}))
        self.failed: dict[int, str] = {}
        self.sums: dict = {}
        self.asked: dict = {}

    @property
    def groups(self):
        return dict(enumerate(self.cloud.groups, 1))

    def members(self, number):
        """Numbers of the devices of a group."""
        return [int(name[-5:]) for name in self.groups[number].session.devices]

    def through(self, lost=None, until=None):
        """All phases before `until`; `lost` has the devices that are gone from each phase on."""
        gone: set[int] = set()
        self.advertise()
        for phase in itertools.takewhile(lambda p: p != until, PHASES):
            gone |= set((lost or {}).get(phase, ()))
            for number, group in self.groups.items():
                if number not in self.failed:
                    left = [i for i in self.members(number) if i not in gone]
                    self.play(phase, number, group, left)
        return self

    def play(self, phase, number, group, left):
        take, end = {
            "share": (group.add_shares, group.delivery),
            "mask": (group.add_input, group.survivors),
            "sign": (group.add_signature, group.requests),
            "unmask": (group.add_reveal, group.sum),
        }[phase]
        for i in left:
            take(self.answer(phase, number, i))
        try:
            self.asked[phase, number] = end()
        except Unavailable as error:
            self.failed[number] = str(error)
        if phase == "unmask" and number not in self.failed:
            self.sums[number] = self.asked[phase, number]

    def answer(self, phase, number, i):
        device = self.devices[i]
        if phase == "share":
            return device.share(self.cohort)
        before = self.asked[PHASES[PHASES.index(phase) - 1], number]
        position = self.groups[number].session.devices.index(device_name(i))
        if phase == "mask":
            return device.mask(before[position], vectors_of(self.terms.fields, i))
        return device.sign(before) if phase == "sign" else device.unmask(before[position])


def test_each_group_gives_the_exact_sum_of_its_devices():
    round_ = GroupRound(13, 4).through()
    everybody = sorted(i for number in round_.groups for i in round_.members(number))
    assert everybody == list(range(13))
    assert [len(round_.members(number)) for number in round_.groups] == [4, 3, 3, 3]
    for number, found in round_.sums.items():
        assert all(map(np.array_equal, found, sum_of(round_.terms.fields, round_.members(number))))
    assert sorted(round_.sums) == [1, 2, 3, 4]


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_a_group_is_exact_or_fails_whatever_is_lost_in_the_others(data):
    round_ = GroupRound(lost_share=0.25)
    lost = {p: data.draw(st.sets(st.integers(0, DEVICES - 1), max_size=3)) for p in PHASES}
    round_.through(lost)
    for number in round_.groups:
        inside = set(round_.members(number))
        gone = {p: inside & lost[p] for p in PHASES}
        assert (number in round_.sums) != (number in round_.failed)
        if number in round_.sums:
            left = inside - gone["share"] - gone["mask"]
            assert len(left) >= 3
            expected = sum_of(round_.terms.fields, sorted(left))
            assert all(map(np.array_equal, round_.sums[number], expected))
        if len(set().union(*gone.values())) <= 1:
            assert number in round_.sums, "one of four may be lost in any phase"


def test_devices_that_are_lost_spoil_their_own_group_only():
    round_ = GroupRound()
    round_.advertise()
    lost = set(round_.members(2)[:2])
    for phase, (number, group) in itertools.product(PHASES, round_.groups.items()):
        if number not in round_.failed:
            left = set(round_.members(number)) - (lost if phase == "mask" else set())
            round_.play(phase, number, group, sorted(left))
    assert set(round_.failed) == {2}
    assert "at least 3 of 4 devices must have sent a masked input, 2 did" in round_.failed[2]
    assert set(round_.sums) == {1, 3}


def test_the_groups_follow_from_all_keys_and_from_nothing_else():
    round_ = GroupRound()
    cohort = round_.advertise()

    def groups(cohort, **changes):
        return [s.devices for s in group_sessions(replace(round_.terms, **changes), cohort)]

    forged = [replace(a, signature=b"other") for a in cohort.advertisements]
    assert groups(cohort) == groups(MaskingCohort(advertisements=tuple(forged)))
    assert groups(cohort) == [g.session.devices for g in round_.cloud.groups]
    assert groups(cohort) != groups(cohort, attempt=1)
    other = GroupRound().advertise()
    assert groups(cohort) != groups(other), "of other keys"
    assert len({s.digest for s in group_sessions(round_.terms, cohort)}) == 3


def test_a_cohort_without_groups_signs_the_bytes_that_it_always_signed():
    alone = terms()
    assert hashlib.sha256(alone.encode()).hexdigest() == DIGEST
    assert replace(alone, groups=2).encode() != alone.encode()
    assert replace(alone, groups=2, group=1).encode() != replace(alone, groups=2).encode()


DIGEST = "4bcaaa554c50a07614cf43e6b02f3256a24afb477b55aab99ba18d2f1767de42"


@pytest.mark.parametrize(
    ("groups", "group"), [(0, 0), (1, 1), (3, 4), (3, -1), (10_001, 0), (-2, 0)]
)
def test_groups_that_do_not_exist_are_refused(groups, group):
    with pytest.raises(InvalidInput, match=f"got group {group} of {groups}"):
        terms(groups=groups, group=group)


@pytest.mark.parametrize(("groups", "least", "message"), [
    (5, 3, "12 devices make 1 to 4 of them, got 5 groups"),
    (4, 4, "got least cohort 4 and groups of 3 devices"),
])  # fmt: skip
def test_a_device_refuses_groups_below_the_least_cohort(groups, least, message):
    round_ = GroupRound(groups=groups, least=least)
    advertisements = tuple(d.advertise() for d in round_.devices)
    with pytest.raises(InvalidInput, match=message):
        round_.devices[0].share(MaskingCohort(advertisements=advertisements))


def test_keys_are_signed_for_the_number_of_groups():
    round_, other = GroupRound(groups=3), GroupRound(groups=4)
    other.cohort = MaskingCohort(
        advertisements=(other.devices[0].advertise(), *round_.advertise().advertisements[1:])
    )
    with pytest.raises(InvalidInput, match="not signed by its identity key"):
        other.devices[0].share(other.cohort)


def test_a_device_that_is_shown_a_second_cohort_stays_in_its_group():
    round_ = GroupRound(DEVICES + 1)
    everybody = tuple(d.advertise() for d in round_.devices)
    device = round_.devices[0]
    first = device.share(MaskingCohort(advertisements=everybody[:-1]))
    with pytest.raises(Conflict, match="a device accepts one cohort in a round"):
        device.share(MaskingCohort(advertisements=(*everybody[:-2], everybody[-1])))
    assert device.share(MaskingCohort(advertisements=everybody[:-1])) == first


def test_devices_with_different_cohorts_cannot_read_each_others_shares():
    """Though the members of their own group may be the same."""
    round_ = GroupRound(DEVICES + 1)
    everybody = tuple(d.advertise() for d in round_.devices)
    whole = MaskingCohort(advertisements=everybody[:-1])
    swapped = MaskingCohort(advertisements=(*everybody[:-2], everybody[-1]))
    sessions = {s.digest for c in (whole, swapped) for s in group_sessions(round_.terms, c)}
    assert len(sessions) == 6
    (first, *_) = group_sessions(round_.terms, whole)
    alone = type(first)(first.terms, MaskingCohort(advertisements=first.advertisements), size=12)
    assert alone.digest != first.digest, "the groups of all devices decide the keys of each"


def test_a_cloud_that_mixes_groups_gets_no_share():
    """The others' lists have the same form, so it is the signatures that tell."""
    round_ = GroupRound().through(until="sign")
    mine, other = round_.members(1), round_.members(2)
    lists = {n: round_.asked["mask", n] for n in (1, 2)}
    assert lists[1] == lists[2], "positions 0 to 3 in both"
    for number, members in ((1, mine), (2, other)):
        for i in members:
            round_.groups[number].add_signature(round_.devices[i].sign(lists[number]))
    requests = {n: round_.groups[n].requests() for n in (1, 2)}
    device = round_.devices[mine[0]]
    with pytest.raises(InvalidInput, match="the cloud shows 0 valid signatures of 4; no share is"):
        device.unmask(requests[2][0])
    mixed = replace(requests[1][0], receipts=requests[2][0].receipts)
    with pytest.raises(InvalidInput, match="shows no valid signature of its masked input"):
        device.unmask(mixed)
    assert device.unmask(requests[1][0]).self_masks


def test_a_cloud_that_forms_other_groups_unmasks_nothing():
    """A device cannot read the shares of another group, and signs for its own group."""
    round_ = GroupRound()
    round_.advertise()
    mine, other = round_.members(1), round_.members(2)
    sealed = {i: round_.devices[i].share(round_.cohort) for i in (*mine, *other)}
    device = round_.devices[mine[0]]
    for i in mine:
        round_.groups[1].add_shares(sealed[i])
    for i in other:
        round_.groups[2].add_shares(sealed[i])
    delivery = round_.groups[1].delivery()[0]
    theirs = round_.groups[2].delivery()[0]
    masked = device.mask(theirs, vectors_of(round_.terms.fields, 0))
    with pytest.raises(InvalidInput, match="is not valid for this round and its devices"):
        round_.groups[2].add_input(masked)
    with pytest.raises(Conflict, match="a device accepts one list of sharers"):
        device.mask(delivery, vectors_of(round_.terms.fields, 0))


def test_a_device_with_neighbours_of_another_group_is_refused_by_the_cloud():
    round_ = GroupRound(13, 3)
    round_.advertise()
    big = round_.members(1)
    assert len(big) == 5
    shares = round_.devices[big[0]].share(round_.cohort)
    moved = SealedShares(position=0, commitment=shares.commitment, sealed=shares.sealed)
    with pytest.raises(InvalidInput, match="must share with its 3 neighbours, got 4"):
        round_.groups[2].add_shares(moved)
