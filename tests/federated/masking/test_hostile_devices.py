"""Hostile bytes from a device: the cloud refuses them, and the round of the others goes on."""

from dataclasses import replace

import pytest
from tests.federated.masking.rounds import Round, sum_of, terms, vectors_of

from triplane.proto.errors import Conflict, InvalidInput, Unavailable
from triplane.unified_ir.federated.masking.shamir import PRIME


@pytest.fixture
def round_():
    return Round(5)


def integers(round_):
    return lambda i: vectors_of(round_.terms.fields, i)


def to_inputs(round_):
    round_.advertise()
    round_.share(range(5))
    return round_


def to_reveals(round_):
    to_inputs(round_).mask(range(5), integers(round_))
    round_.sign(range(5))
    return round_


def assert_goes_on(round_):
    sums = round_.unmask(range(5))
    assert sums[0].tolist() == sum_of(round_.terms.fields, range(5))[0].tolist()


@pytest.mark.parametrize("size", [0, 31, 33, 1_000_000])
@pytest.mark.parametrize("key", ["encryption_key", "mask_key"])
def test_keys_of_another_length(round_, key, size):
    advertisement = replace(round_.devices[0].advertise(), **{key: bytes(size)})
    with pytest.raises(InvalidInput, match=f"has 32 bytes, got {size}"):
        round_.cloud.add_keys(advertisement)


def test_keys_under_the_name_of_another_device(round_):
    advertisement = replace(round_.devices[0].advertise(), device="device-00001")
    with pytest.raises(InvalidInput, match="'device-00001' are not signed"):
        round_.cloud.add_keys(advertisement)


@pytest.mark.parametrize("change", ["missing", "extra", "short", "long", "commitment", "position"])
def test_hostile_shares(round_, change):
    round_.advertise()
    shares = round_.devices[0].share(round_.cohort)
    sealed = dict(shares.sealed)
    changes: dict[str, dict] = {
        "missing": {"sealed": {i: sealed[i] for i in (1, 2)}},
        "extra": {"sealed": {**sealed, 0: sealed[1]}},
        "short": {"sealed": {**sealed, 1: sealed[1][:-1]}},
        "long": {"sealed": {**sealed, 1: sealed[1] * 2}},
        "commitment": {"commitment": bytes(31)},
        "position": {"position": 5},
    }
    with pytest.raises(InvalidInput, match=r"neighbours, got|has \d+ bytes|within|are in"):
        round_.cloud.add_shares(replace(shares, **changes[change]))
    round_.share(range(5))
    round_.mask(range(5), integers(round_))
    round_.sign(range(5))
    assert_goes_on(round_)


def shared_with_garbage(round_, receivers):
    """Device 0 seals garbage for these neighbours."""
    round_.advertise()
    for i in range(5):
        shares = round_.devices[i].share(round_.cohort)
        if i == 0:
            garbage = {j: bytes(len(shares.sealed[j])) for j in receivers}
            shares = replace(shares, sealed={**shares.sealed, **garbage})
        round_.cloud.add_shares(shares)
    round_.deliveries = round_.cloud.delivery()


def inputs_of(round_, reports=None):
    """Take the masked inputs; reports: what devices say they could not open, if they lie."""
    for i in range(5):
        masked = round_.devices[i].mask(round_.deliveries[i], integers(round_)(i))
        if i in (reports or {}):
            masked = replace(masked, unopened=reports[i])
        round_.cloud.add_input(masked)


def test_garbage_for_most_neighbours_ends_the_round_before_a_share_is_revealed(round_):
    shared_with_garbage(round_, (1, 2, 4))
    inputs_of(round_)
    with pytest.raises(Unavailable) as ended:
        round_.cloud.survivors()
    assert str(ended.value) == (
        "3 neighbours of 'device-00000' (0) must open the shares that it sealed for them, and 1 of "
        "4 did; its shares did not open at 'device-00001' (1), 'device-00002' (2), 'device-00004' "
        "(4): it sealed garbage for most of its neighbours"
    )
    assert round_.cloud.liars() == {
        0: "3 of its 4 neighbours could not open the shares that it sealed for them"
    }


def test_garbage_for_one_neighbour_is_tolerated_and_that_neighbour_reveals_none(round_):
    shared_with_garbage(round_, (1,))
    inputs_of(round_)
    round_.survivors = round_.cloud.survivors()
    round_.sign(range(5))
    assert sorted(round_.devices[1].unmask(round_.requests[1]).self_masks) == [2, 3, 4]
    assert_goes_on(round_)


def test_a_pair_is_named_where_shares_lack_at_the_end(round_):
    shared_with_garbage(round_, (1,))
    inputs_of(round_)
    round_.survivors = round_.cloud.survivors()
    round_.sign(range(5))
    with pytest.raises(Unavailable, match=r"self mask of 'device-00000' \(0\) and 2 were") as ended:
        round_.unmask(range(4))
    assert "did not open at 'device-00001' (1): either it or they are at fault" in str(ended.value)
    assert round_.cloud.liars() == {}


def test_a_device_that_accuses_all_others_changes_nothing_for_them(round_):
    to_inputs(round_)
    inputs_of(round_, {2: (0, 1, 3, 4)})
    assert list(round_.cloud.liars()) == [2]
    round_.survivors = round_.cloud.survivors()
    round_.sign(range(5))
    assert_goes_on(round_)


def test_devices_that_accuse_one_end_the_round_as_by_silence_and_are_named_with_it(round_):
    to_inputs(round_)
    inputs_of(round_, {1: (0,), 2: (0,)})
    with pytest.raises(Unavailable) as ended:
        round_.cloud.survivors()
    assert "at 'device-00001' (1), 'device-00002' (2): either it or they" in str(ended.value)
    assert round_.cloud.liars() == {}, "half of the neighbours are no majority"


@pytest.mark.parametrize(
    ("report", "text"),
    [
        ((0,), "was sent no shares of"),
        ((4,), "was sent no shares of"),
        ((1, 1), "rise strictly"),
        ((2, 1), "rise strictly"),
        ((5,), "rise strictly"),
        ((-1,), "rise strictly"),
    ],
)
def test_a_report_about_itself_or_about_a_device_that_did_not_share(round_, report, text):
    round_.advertise()
    round_.share(range(4))
    genuine = round_.devices[0].mask(round_.deliveries[0], vectors_of(round_.terms.fields, 0))
    with pytest.raises(InvalidInput, match=text):
        round_.cloud.add_input(replace(genuine, unopened=report))
    round_.mask(range(4), integers(round_))
    round_.sign(range(4))
    sums = round_.unmask(range(4))
    assert sums[0].tolist() == sum_of(round_.terms.fields, range(4))[0].tolist()


@pytest.mark.parametrize("data", [b"", b"\0", bytes(10_000)])
def test_hostile_inputs_leave_the_sum_as_it_was(round_, data):
    to_inputs(round_)
    genuine = round_.devices[0].mask(round_.deliveries[0], vectors_of(round_.terms.fields, 0))
    with pytest.raises(InvalidInput, match="a masked vector has 69 bytes here, got"):
        round_.cloud.add_input(replace(genuine, data=data))
    with pytest.raises(InvalidInput, match="unused bits"):
        round_.cloud.add_input(replace(genuine, data=b"\xff" * 69))
    with pytest.raises(InvalidInput, match="the signature of 'device-00001'"):
        round_.cloud.add_input(replace(genuine, position=1))
    with pytest.raises(InvalidInput, match="not valid"):
        round_.cloud.add_input(replace(genuine, signature=b"0"))
    round_.mask(range(5), integers(round_))
    with pytest.raises(Conflict, match="takes signatures now"):
        round_.cloud.add_input(genuine)
    round_.sign(range(5))
    assert_goes_on(round_)


def test_a_second_masked_input(round_):
    to_inputs(round_)
    genuine = round_.devices[0].mask(round_.deliveries[0], vectors_of(round_.terms.fields, 0))
    round_.cloud.add_input(genuine)
    with pytest.raises(Conflict, match=r"'device-00000' \(0\) sent another masked input"):
        round_.cloud.add_input(replace(genuine, data=bytes(len(genuine.data))))


def test_a_masked_input_of_a_device_that_did_not_share(round_):
    round_.advertise()
    round_.share(range(4))
    genuine = round_.devices[0].mask(round_.deliveries[0], vectors_of(round_.terms.fields, 0))
    with pytest.raises(InvalidInput, match="did not share its secrets"):
        round_.cloud.add_input(replace(genuine, position=4))


def test_signatures_and_shares_of_a_device_that_is_lost(round_):
    to_inputs(round_).mask(range(4), integers(round_))
    signature = round_.devices[0].sign(round_.survivors)
    with pytest.raises(InvalidInput, match="so it is no survivor"):
        round_.cloud.add_signature(replace(signature, position=4))
    with pytest.raises(InvalidInput, match="the signature of 'device-00001'"):
        round_.cloud.add_signature(replace(signature, position=1))


@pytest.mark.parametrize("share", [b"", bytes(32), PRIME.to_bytes(33, "big")])
def test_hostile_revealed_shares(round_, share):
    to_reveals(round_)
    revealed = round_.devices[0].unmask(round_.requests[0])
    with pytest.raises(InvalidInput, match="a share has 33 bytes"):
        round_.cloud.add_reveal(replace(revealed, self_masks={**revealed.self_masks, 1: share}))
    for changed in (
        {"mask_keys": {1: bytes(33)}},
        {"self_masks": {0: bytes(33)}},
        {"self_masks": {99: bytes(33)}},
    ):
        with pytest.raises(InvalidInput, match="it sent others"):
            round_.cloud.add_reveal(replace(revealed, **changed))
    with pytest.raises(InvalidInput, match="positions are in"):
        round_.cloud.add_reveal(replace(revealed, position=-1))
    round_.cloud.add_reveal(revealed)
    with pytest.raises(Conflict, match="revealed other shares before"):
        round_.cloud.add_reveal(replace(revealed, self_masks={}))
    assert_goes_on(round_)


@pytest.mark.parametrize(
    "changes",
    [
        {"run": ""},
        {"run": "a/b"},
        {"base": bytes(31)},
        {"round": -1},
        {"round": 2**40},
        {"group": -1},
        {"least": 2},
        {"least": 10_001},
        {"fields": ()},
        {"fields": ((1, 8),) * 65},
        {"fields": ((0, 8),)},
    ],
)
def test_terms_have_limits(changes):
    with pytest.raises(InvalidInput):
        terms(**changes)
