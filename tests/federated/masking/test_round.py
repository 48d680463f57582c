"""Rounds of honest devices: the exact sum of the survivors, whoever is lost and whenever."""

from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.federated.masking.rounds import (
    PHASES,
    MemoryStore,
    Round,
    device_name,
    sum_of,
    terms,
    vectors_of,
)

from triplane.proto.errors import Conflict, Corrupt, InvalidInput, TriplaneError, Unavailable
from triplane.unified_ir.federated.masking import MaskingPhase, cloud
from triplane.unified_ir.federated.masking.shamir import join_shares

FIELDS = ((1000, 8), (3, 33), (1, 20))


def integers(round_):
    return lambda i: vectors_of(round_.terms.fields, i)


def assert_sum_of(round_, sums, members):
    for got, expected in zip(sums, sum_of(round_.terms.fields, members), strict=True):
        np.testing.assert_array_equal(got, expected)
    assert round_.cloud.contributors == tuple(device_name(i) for i in sorted(members))
    assert round_.cloud.phase is MaskingPhase.DONE


@pytest.mark.parametrize("phase", PHASES)
def test_a_third_may_be_lost_in_any_phase(phase):
    round_ = Round(12, terms(FIELDS))
    lost = {1, 4, 6, 11}
    sums = round_.run(integers(round_), {phase: lost})
    counted = set(range(12)) - lost if phase in {"share", "mask"} else set(range(12))
    assert_sum_of(round_, sums, counted)


def test_three_devices_are_enough():
    round_ = Round(3)
    assert_sum_of(round_, round_.run(integers(round_)), {0, 1, 2})


@pytest.mark.long
def test_a_sparse_graph_gives_the_exact_sum_too():
    round_ = Round(80, terms(lost_share=0.1, colluding_share=0.05))
    lost = {"share": {0, 7}, "mask": {20, 21, 22}, "sign": {40}, "unmask": {60, 79}}
    sums = round_.run(integers(round_), lost)
    assert not round_.cloud.session.parameters.complete
    assert_sum_of(round_, sums, set(range(80)) - {0, 7, 20, 21, 22})


@pytest.mark.long
@settings(max_examples=30)
@given(st.data())
def test_the_sum_is_exact_or_a_threshold_is_named(data):
    n = data.draw(st.integers(3, 9))
    lost = {phase: data.draw(st.sets(st.integers(0, n - 1), max_size=n // 2)) for phase in PHASES}
    round_ = Round(n)
    counted = set(range(n)) - lost["share"] - lost["mask"]
    gone = set().union(*lost.values())
    try:
        sums = round_.run(integers(round_), lost)
    except Unavailable as error:
        assert any(f"{i} " in str(error) for i in range(n + 1))
        assert len(gone) > round_.cloud.session.parameters.lost
    else:
        assert_sum_of(round_, sums, counted)


@pytest.mark.long
@settings(max_examples=30)
@given(st.data())
def test_replays_reorderings_and_rejoins_change_nothing(data):
    n = 5
    round_ = Round(n)
    old = [round_.devices[i].advertise() for i in range(n)]
    messages = [round_.cloud.add_keys]
    members = data.draw(st.permutations(range(n)))
    round_.advertise(members)
    round_.share(data.draw(st.permutations(range(n))))
    round_.mask(data.draw(st.permutations(range(n))), integers(round_))
    # A device that was restarted has no secrets of this round and must not contribute again.
    restarted = data.draw(st.integers(0, n - 1))
    with pytest.raises(Conflict, match="contributes once"):
        round_.device(restarted)
    # Every device is asked for everything again, in any order, and every message comes twice.
    for step in data.draw(st.permutations(["share", "mask", "keys", "sharing"])):
        for i in range(n):
            device = round_.devices[i]
            if step == "share":
                assert device.share(round_.cohort) == device.share(round_.cohort)
            elif step == "mask":
                again = device.mask(round_.deliveries[i], vectors_of(round_.terms.fields, 99))
                assert again == device.mask(round_.deliveries[i], [])
            elif step == "keys":
                with pytest.raises(Conflict, match="takes signatures now"):
                    messages[0](old[i])
            else:
                with pytest.raises(Conflict, match="takes signatures now"):
                    round_.cloud.add_shares(device.share(round_.cohort))
    alive = [i for i in range(n) if i != restarted]
    round_.sign(alive + alive)
    assert_sum_of(round_, round_.unmask(alive + alive), set(range(n)))


def test_a_repeated_message_counts_once():
    round_ = Round(4)
    round_.advertise([0, 1, 2, 3, 3, 2])
    round_.share([0, 1, 2, 3, 0])
    round_.mask([0, 1, 2, 3, 1, 1], integers(round_))
    round_.sign([0, 1, 2, 2, 3])
    assert_sum_of(round_, round_.unmask([0, 0, 1, 2, 3]), {0, 1, 2, 3})


def test_a_second_different_message_is_a_conflict():
    round_, other = Round(4), Round(4)
    round_.advertise(range(4))
    with pytest.raises(Conflict, match="takes shares now"):
        round_.cloud.add_keys(other.devices[0].advertise())
    restarted = Round(4)
    restarted.cloud.add_keys(restarted.devices[0].advertise())
    with pytest.raises(Conflict, match="'device-00000' advertised other keys"):
        restarted.cloud.add_keys(other.devices[0].advertise())


@pytest.mark.parametrize(
    ("phase", "message"),
    [
        ("share", "at least 7 of 12 devices must have shared their secrets, 6 did"),
        ("mask", "at least 7 of 12 devices must have sent a masked input, 6 did"),
        ("sign", "7 survivors must sign the list of survivors, 6 of 12 did"),
        ("unmask", "6 shares recover the self mask of 'device-00006' .6. and 5 were revealed"),
    ],
)
def test_too_many_losses_name_the_threshold(phase, message):
    round_ = Round(12)
    gone = range(5 if phase == "unmask" else 6)
    members = range(12)
    alive = {"unmask": range(6, 12)}.get(phase, [i for i in members if i not in gone])
    with pytest.raises(Unavailable, match=message):
        round_.run(integers(round_), {phase: set(members) - set(alive)})


def test_too_few_neighbours_of_a_device_are_named():
    round_ = Round(5)
    with pytest.raises(
        Unavailable,
        match="3 neighbours of every device must have shared their secrets; for 3 devices fewer",
    ):
        round_.run(integers(round_), {"share": {1, 2}})


def test_the_least_cohort_is_named_where_it_is_more_than_half():
    round_ = Round(12, terms(least=10))
    with pytest.raises(Unavailable, match=r"at least 10 of 12 devices .* 9 did"):
        round_.run(integers(round_), {"mask": {1, 2, 3}})


def test_too_small_a_cohort_is_named():
    round_ = Round(4, terms(least=5))
    with pytest.raises(Unavailable, match="least cohort 5 and 4 devices"):
        round_.advertise()


def test_all_requests_share_one_table_of_signatures():
    # A copy for each of 10,000 survivors would need gigabytes.
    round_ = Round(4)
    with pytest.raises(Unavailable):
        round_.run(integers(round_), {"unmask": set(range(4))})
    assert len({id(request.signatures) for request in round_.requests.values()}) == 1


def test_late_shares_can_still_be_revealed():
    round_ = Round(6)
    with pytest.raises(Unavailable, match="shares recover"):
        round_.run(integers(round_), {"unmask": {0, 1, 2, 3}})
    assert_sum_of(round_, round_.unmask([0, 1, 2, 3, 4, 5]), set(range(6)))


def test_the_sum_comes_once():
    round_ = Round(3)
    round_.run(integers(round_))
    with pytest.raises(Conflict, match="takes done now"):
        round_.cloud.sum()


def lying(revealed, kind):
    shares = {i: bytes(32) + b"\x01" for i in getattr(revealed, kind)}
    other = "mask_keys" if kind == "self_masks" else "self_masks"
    return type(revealed)(
        position=revealed.position, **{kind: shares, other: getattr(revealed, other)}
    )


@pytest.mark.parametrize("kind", ["self_masks", "mask_keys"])
@pytest.mark.parametrize("liars", [1, 5])
def test_wrong_shares_are_noticed_and_a_few_do_no_harm(kind, liars):
    round_ = Round(12)
    with pytest.raises(Unavailable):
        round_.run(integers(round_), {"mask": {2}, "unmask": set(range(12))})
    for i in set(range(12)) - {2}:
        revealed = round_.devices[i].unmask(round_.requests[i])
        honest = i > liars + (liars > 1)
        round_.cloud.add_reveal(revealed if honest else lying(revealed, kind))
    if liars == 1:
        assert_sum_of(round_, round_.cloud.sum(), set(range(12)) - {2})
    else:
        with pytest.raises(Corrupt, match=r"cannot be recovered of 1\d shares"):
            round_.cloud.sum()


@pytest.mark.parametrize("liars", [(0, 6), (4, 9), (10, 11)])
def test_liars_among_the_revealers_are_outvoted_wherever_they_stand(liars, monkeypatch):
    join = Mock(side_effect=join_shares)
    monkeypatch.setattr(cloud, "join_shares", join)
    round_ = Round(12)
    with pytest.raises(Unavailable):
        round_.run(integers(round_), {"mask": {2}, "unmask": set(range(12))})
    for i in set(range(12)) - {2}:
        revealed = round_.devices[i].unmask(round_.requests[i])
        for kind in ("self_masks", "mask_keys") if i in liars else ():
            revealed = lying(revealed, kind)
        round_.cloud.add_reveal(revealed)
    assert_sum_of(round_, round_.cloud.sum(), set(range(12)) - {2})
    # Once known, a liar costs no more tries: 12 secrets, and a second one for each liar.
    assert join.call_count <= 12 + len(liars)


def test_a_liar_in_a_small_cohort_is_worked_around():
    # One share more than the threshold: no code corrects it, but the commitment decides.
    round_ = Round(5)
    with pytest.raises(Unavailable):
        round_.run(integers(round_), {"unmask": set(range(5))})
    for i in range(5):
        revealed = round_.devices[i].unmask(round_.requests[i])
        round_.cloud.add_reveal(lying(revealed, "self_masks") if i == 1 else revealed)
    assert_sum_of(round_, round_.cloud.sum(), set(range(5)))


def test_a_device_whose_disk_is_full_says_nothing():
    stores = [MemoryStore() for _ in range(4)]
    round_ = Round(4, stores=stores)
    round_.advertise()
    round_.share(range(4))
    stores[0].fail = True
    with pytest.raises(OSError, match="disk full"):
        round_.devices[0].mask(round_.deliveries[0], vectors_of(round_.terms.fields, 0))
    stores[0].fail = False
    round_.mask(range(4), integers(round_))
    stores[0].fail = True
    with pytest.raises(OSError, match="disk full"):
        round_.devices[0].sign(round_.survivors)
    stores[0].fail = False
    round_.sign(range(4))
    assert_sum_of(round_, round_.unmask(range(4)), {0, 1, 2, 3})


def test_steps_come_in_their_order():
    round_ = Round(3)
    for step, arguments in (("mask", (None, [])), ("sign", (None,)), ("unmask", (None,))):
        with pytest.raises(Conflict, match="share, mask, sign, unmask in this order"):
            getattr(round_.devices[0], step)(*arguments)


def test_wrong_vectors_of_the_owner_are_refused_before_anything_is_kept():
    round_ = Round(3)
    round_.advertise()
    round_.share(range(3))
    with pytest.raises(InvalidInput, match=r"in \[0, 256\), got 0 to 256"):
        round_.devices[0].mask(round_.deliveries[0], [np.array([0] * 49 + [256])])
    assert round_.stores[0].saved == []
    round_.mask(range(3), integers(round_))


def test_every_error_has_a_family():
    # The families are what the wire can carry; see proto/status.py.
    assert all(issubclass(e, TriplaneError) for e in (Conflict, Corrupt, InvalidInput, Unavailable))
