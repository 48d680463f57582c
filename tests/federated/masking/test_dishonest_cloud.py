"""A cloud that does not follow the protocol: each attempt is refused on the device."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.federated.masking.rounds import (
    BASE,
    MemoryStore,
    Round,
    device_name,
    identity_key,
    terms,
    vectors_of,
    verifier,
)

from triplane.proto.errors import Conflict, InvalidInput, TriplaneError
from triplane.unified_ir.federated.masking import (
    EcdsaSigner,
    MaskingDevice,
)
from triplane.unified_ir.federated.masking.messages import (
    Advertisement,
    MaskingCohort,
    ShareDelivery,
    SurvivorSet,
    UnmaskRequest,
)

OTHER_BASE = BASE[::-1]


def integers(round_):
    return lambda i: vectors_of(round_.terms.fields, i)


def masked(n=8, **changes):
    """A round in which every device has sent its masked input."""
    round_ = Round(n, terms(**changes))
    round_.advertise()
    round_.share(range(n))
    round_.mask(range(n), integers(round_))
    return round_


def request_for(round_, position, signatures):
    """An unmask request with these signatures and genuine receipts."""
    receipts = round_.cloud._receipts
    return UnmaskRequest(signatures=signatures, receipts=dict(receipts))


def assert_revealed_nothing(round_, position):
    assert "unmask" not in round_.devices[position]._answers


def test_different_survivors_for_different_devices():
    round_ = masked()
    all_but = {x: SurvivorSet(positions=tuple(i for i in range(8) if i != x)) for x in (0, 7)}
    signatures = {}
    for i in range(1, 7):
        signatures[i] = round_.devices[i].sign(all_but[0 if i < 4 else 7]).signature
    for i in range(1, 7):
        with pytest.raises(InvalidInput, match="shows 3 valid signatures of 6; no share"):
            round_.devices[i].unmask(request_for(round_, i, signatures))
        assert_revealed_nothing(round_, i)


def test_a_second_list_of_survivors():
    round_ = masked()
    device = round_.devices[3]
    device.sign(round_.survivors)
    with pytest.raises(Conflict, match="one list of survivors in a round"):
        device.sign(SurvivorSet(positions=tuple(range(7))))
    round_.sign(range(8))
    first = device.unmask(round_.requests[3])
    with pytest.raises(Conflict, match="one list of survivors in a round"):
        device.sign(SurvivorSet(positions=tuple(range(7))))
    # Another request changes nothing about what was revealed.
    assert device.unmask(UnmaskRequest(signatures={}, receipts={})) == first


@settings(max_examples=25)
@given(st.lists(st.sets(st.integers(0, 4), min_size=3), min_size=1, max_size=4))
@pytest.mark.long
def test_no_device_ever_reveals_both_shares_of_another(offers):
    round_ = masked(5)
    revealed = []
    for offer in offers:
        survivors = SurvivorSet(positions=tuple(sorted(offer)))
        signatures = {}
        for i, device in enumerate(round_.devices):
            try:
                signatures[i] = device.sign(survivors).signature
            except TriplaneError:
                continue
        for i, device in enumerate(round_.devices):
            try:
                revealed.append(device.unmask(request_for(round_, i, signatures)))
            except TriplaneError:
                continue
    self_masks = {i for r in revealed for i in r.self_masks}
    mask_keys = {i for r in revealed for i in r.mask_keys}
    assert not self_masks & mask_keys


def test_a_second_cohort_in_the_same_round():
    round_ = Round(6)
    round_.advertise()
    round_.devices[0].share(round_.cohort)
    smaller = MaskingCohort(advertisements=round_.cohort.advertisements[:5])
    with pytest.raises(Conflict, match="one cohort in a round"):
        round_.devices[0].share(smaller)


@pytest.mark.parametrize("changes", [{}, {"attempt": 1}, {"round": 9}, {"lost_share": 0.2}])
def test_the_same_base_state_with_another_cohort(changes):
    first = masked(5)
    with pytest.raises(Conflict, match="once for each run and base state") as refused:
        Round(4, terms(**changes), stores=first.stores[:4])
    assert "it did so in round 1, attempt 0" in str(refused.value)
    Round(4, terms(base=OTHER_BASE), stores=first.stores[:4])
    Round(4, terms(run="run-2"), stores=first.stores[:4])


def test_two_attempts_at_once():
    stores = [MemoryStore() for _ in range(4)]
    rounds = [Round(4, terms(attempt=i), stores=stores) for i in range(2)]
    for round_ in rounds:
        round_.advertise()
        round_.share(range(4))
    rounds[0].mask(range(4), integers(rounds[0]))
    with pytest.raises(Conflict, match="once for each run and base state"):
        rounds[1].mask(range(4), integers(rounds[1]))


def test_two_attempts_at_the_same_time():
    # Both have checked the ledger before either of them writes to it.
    stores = [MemoryStore() for _ in range(4)]
    rounds = [Round(4, terms(attempt=i), stores=stores) for i in range(2)]
    for round_ in rounds:
        round_.advertise()
        round_.share(range(4))
    stores[0].meanwhile = lambda: rounds[1].mask(range(4), integers(rounds[1]))
    with pytest.raises(Conflict, match="once for each run and base state"):
        rounds[0].devices[0].mask(rounds[0].deliveries[0], vectors_of(rounds[0].terms.fields, 0))
    assert [ledger.entries["run-1", BASE.hex()].attempt for ledger in stores[0].saved] == [1]


def test_two_lists_of_survivors_at_the_same_time():
    round_ = masked()
    device = round_.devices[0]
    fewer = SurvivorSet(positions=tuple(range(7)))
    round_.stores[0].meanwhile = lambda: device.sign(round_.survivors)
    with pytest.raises(Conflict, match="one list of survivors in a round"):
        device.sign(fewer)


def test_two_runs_at_the_same_time_lose_no_entry():
    stores = [MemoryStore() for _ in range(4)]
    rounds = [Round(4, terms(run=f"run-{i}"), stores=stores) for i in range(2)]
    for round_ in rounds:
        round_.advertise()
        round_.share(range(4))
    stores[0].meanwhile = lambda: rounds[1].mask(range(4), integers(rounds[1]))
    rounds[0].devices[0].mask(rounds[0].deliveries[0], vectors_of(rounds[0].terms.fields, 0))
    assert sorted(run for run, _ in stores[0].load().entries) == ["run-0", "run-1"]


def test_a_ledger_that_went_missing():
    round_ = masked()
    round_.stores[0].saved.clear()
    with pytest.raises(Conflict, match="does not contain this round's contribution"):
        round_.devices[0].sign(round_.survivors)


def test_a_ledger_of_another_session():
    round_ = masked()
    entry = replace(round_.stores[1].load().entries["run-1", BASE.hex()], session="00" * 32)
    round_.stores[0].update(lambda ledger: ledger.with_(round_.terms, entry))
    with pytest.raises(Conflict, match="does not contain this round's contribution"):
        round_.devices[0].sign(round_.survivors)


def test_a_second_list_after_a_signature_that_failed():
    # What the ledger says was signed counts, whether or not the signature left the device.
    round_ = masked()
    device = round_.devices[0]
    device._signer, signer = None, device._signer
    with pytest.raises(AttributeError):
        device.sign(round_.survivors)
    device._signer = signer
    with pytest.raises(Conflict, match="one list of survivors in a round"):
        device.sign(SurvivorSet(positions=tuple(range(7))))
    device.sign(round_.survivors)


@pytest.mark.parametrize("size", [2, 10_001])
def test_a_cohort_of_another_size_costs_no_verification(size):
    round_ = Round(4)
    own = round_.advertise().advertisements[0]
    device = round_.devices[0]
    device._verifier = None
    with pytest.raises(InvalidInput, match=f"and {size} devices"):
        device.share(MaskingCohort(advertisements=(own,) * size))


def test_replayed_keys_of_an_earlier_round():
    earlier, round_ = Round(4), Round(4, terms(attempt=1))
    old, new = earlier.advertise(), round_.advertise()
    with pytest.raises(InvalidInput, match="with the keys that it advertised"):
        round_.devices[0].share(old)
    mixed = (new.advertisements[0], *old.advertisements[1:])
    with pytest.raises(InvalidInput, match=r"'device-00001' are not signed .* attempt 1"):
        round_.devices[0].share(MaskingCohort(advertisements=mixed))


def test_replayed_signatures_of_another_round():
    earlier, round_ = masked(), masked(base=OTHER_BASE)
    old = {i: earlier.devices[i].sign(earlier.survivors).signature for i in range(8)}
    round_.devices[0].sign(round_.survivors)
    with pytest.raises(InvalidInput, match="shows 0 valid signatures of 8"):
        round_.devices[0].unmask(request_for(round_, 0, old))


def test_one_signature_under_many_positions():
    round_ = masked()
    own = round_.devices[0].sign(round_.survivors).signature
    with pytest.raises(InvalidInput, match="shows 1 valid signatures of 8"):
        round_.devices[0].unmask(request_for(round_, 0, dict.fromkeys(range(8), own)))


def test_too_small_a_cohort():
    round_ = Round(5, terms(least=4))
    round_.advertise()
    smaller = MaskingCohort(advertisements=round_.cohort.advertisements[:3])
    with pytest.raises(InvalidInput, match="least cohort 4 and 3 devices"):
        round_.devices[0].share(smaller)


def test_too_few_sharers():
    round_ = Round(8, terms(least=6))
    round_.advertise()
    delivery = round_.share(range(8))[0]
    few = (0, 1, 2, 3, 4)
    sealed = {i: delivery.sealed[i] for i in few[1:]}
    with pytest.raises(InvalidInput, match=r"sharers must be at least 6 devices.* lists 5"):
        round_.devices[0].mask(
            ShareDelivery(sharers=few, sealed=sealed), vectors_of(round_.terms.fields, 0)
        )


@pytest.mark.parametrize(
    ("changes", "positions", "message"),
    [
        ({"least": 6}, (0, 1, 2, 3, 4), "at least 6 devices, the cloud lists 5"),
        ({}, (0, 1, 2, 3), "must contain 4 of this device's 7 neighbours, the cloud lists 3"),
        ({}, (1, 2, 3, 4, 5), "do not contain this device, 'device-00000'"),
        ({}, (0, 2, 1, 3, 4), "rise strictly"),
        ({}, (0, 1, 1, 3, 4, 5), "rise strictly"),
        ({}, (0, 1, 2, 3, 4, 8), r"within \[0, 8\)"),
        ({}, (-1, 0, 1, 2, 3, 4), "rise strictly"),
    ],
)
def test_too_few_or_impossible_survivors(changes, positions, message):
    round_ = masked(**changes)
    with pytest.raises(InvalidInput, match=message):
        round_.devices[0].sign(SurvivorSet(positions=positions))


def test_survivors_that_did_not_share():
    round_ = Round(8)
    round_.advertise()
    round_.share(range(7))
    round_.mask(range(7), integers(round_))
    with pytest.raises(InvalidInput, match=r"\[7\] did not"):
        round_.devices[0].sign(SurvivorSet(positions=tuple(range(8))))


def test_survivors_without_a_masked_input():
    round_ = Round(8)
    round_.advertise()
    round_.share(range(8))
    round_.mask(range(7), integers(round_))
    claimed = SurvivorSet(positions=tuple(range(8)))
    signatures = {i: round_.devices[i].sign(claimed).signature for i in range(7)}
    with pytest.raises(InvalidInput, match=r"lists 'device-00007' \(7\) .* no valid signature"):
        round_.devices[0].unmask(request_for(round_, 0, signatures))


def test_different_sharers_for_different_devices():
    # Device 0 masks with fewer neighbours than the others believe.
    round_ = Round(8)
    round_.advertise()
    deliveries = round_.share(range(8))
    few = tuple(range(6))
    own = ShareDelivery(sharers=few, sealed={i: deliveries[0].sealed[i] for i in few[1:]})
    receipt = round_.devices[0].mask(own, vectors_of(round_.terms.fields, 0)).signature
    for i in range(1, 8):
        round_.devices[i].mask(deliveries[i], vectors_of(round_.terms.fields, i))
    everyone = SurvivorSet(positions=tuple(range(8)))
    signatures = {i: round_.devices[i].sign(everyone).signature for i in range(1, 8)}
    with pytest.raises(InvalidInput, match=r"lists 'device-00000' \(0\) .* same sharers"):
        round_.devices[1].unmask(UnmaskRequest(signatures=signatures, receipts={0: receipt}))


def test_signatures_of_devices_with_other_sharers_do_not_count():
    # All sign the same survivors, but three of them believe that device 7 never shared.
    round_ = Round(8)
    round_.advertise()
    deliveries = round_.share(range(8))
    few = tuple(range(7))
    for i in range(7):
        own = {j: s for j, s in deliveries[i].sealed.items() if j in few}
        delivery = ShareDelivery(sharers=few, sealed=own) if i < 3 else deliveries[i]
        round_.devices[i].mask(delivery, vectors_of(round_.terms.fields, i))
    survivors = SurvivorSet(positions=few)
    signatures = {i: round_.devices[i].sign(survivors).signature for i in few}
    with pytest.raises(InvalidInput, match="shows 4 valid signatures of 7; no share"):
        round_.devices[3].unmask(UnmaskRequest(signatures=signatures, receipts={}))


def test_a_key_that_the_cloud_replaced():
    round_ = Round(4)
    listed, other = round_.advertise().advertisements, Round(4).devices[3].advertise()
    for key in ("encryption_key", "mask_key"):
        replaced = replace(listed[3], **{key: getattr(other, key)})
        with pytest.raises(InvalidInput, match="'device-00003' are not signed"):
            round_.devices[0].share(MaskingCohort(advertisements=(*listed[:3], replaced)))


def test_withheld_shares():
    round_ = Round(8)
    round_.advertise()
    delivery = round_.share(range(8))[0]
    sealed = {i: s for i, s in delivery.sealed.items() if i != 5}
    with pytest.raises(InvalidInput, match=r"they differ in \[5\]"):
        round_.devices[0].mask(replace(delivery, sealed=sealed), vectors_of(round_.terms.fields, 0))


def test_exchanged_shares_are_not_revealed_for_another_device():
    round_ = Round(8)
    round_.advertise()
    deliveries = round_.share(range(8))
    sealed = dict(deliveries[0].sealed)
    sealed[1], sealed[2] = sealed[2], sealed[1]
    deliveries[0] = replace(deliveries[0], sealed=sealed)
    round_.mask(range(8), integers(round_))
    round_.sign(range(8))
    revealed = round_.devices[0].unmask(round_.requests[0])
    assert sorted(revealed.self_masks) == [3, 4, 5, 6, 7]
    assert not revealed.mask_keys


def test_an_invented_device():
    round_ = Round(4)
    round_.advertise()
    invented = MaskingDevice(
        round_.terms,
        device_name(9),
        signer=EcdsaSigner(identity_key(9)),
        verifier=verifier(10),
        store=MemoryStore(),
    ).advertise()
    cohort = MaskingCohort(advertisements=(*round_.cohort.advertisements, invented))
    with pytest.raises(InvalidInput, match="'device-00009' are not signed by its identity key"):
        round_.devices[0].share(cohort)


def test_other_terms_for_other_devices():
    # A smaller least cohort, or more losses, would give another graph and other thresholds.
    round_ = Round(6)
    round_.advertise()
    for changes in ({"least": 4}, {"lost_share": 0.1}, {"colluding_share": 0.1}, {"failure": 0.1}):
        other = Round(6, terms(**changes)).devices[0].advertise()
        cohort = MaskingCohort(advertisements=(other, *round_.cohort.advertisements[1:]))
        with pytest.raises(InvalidInput, match="not signed"):
            round_.devices[1].share(cohort)


def signed_with(round_, number, **keys):
    """An advertisement of a device that colludes, with keys that the cloud chose."""
    honest = round_.devices[number].advertise()
    chosen = replace(honest, **keys)
    signature = EcdsaSigner(identity_key(number)).sign(chosen.signed_bytes(round_.terms))
    return replace(chosen, signature=signature)


@pytest.mark.parametrize("key", ["encryption_key", "mask_key"])
def test_a_colluding_device_with_a_key_of_low_order(key):
    round_ = Round(4)
    low = signed_with(round_, 3, **{key: bytes(32)})
    with pytest.raises(InvalidInput, match="low order"):
        round_.cloud.add_keys(low)
    round_.advertise()
    cohort = MaskingCohort(advertisements=(*round_.cohort.advertisements[:3], low))
    if key == "encryption_key":
        with pytest.raises(InvalidInput, match="low order"):
            round_.devices[0].share(cohort)
        return
    devices = round_.devices[:3]
    sealed = {i: devices[i].share(cohort).sealed for i in range(3)}
    with pytest.raises(InvalidInput, match="low order"):
        # The colluding device says that it shared, too.
        devices[0].mask(
            ShareDelivery(
                sharers=(0, 1, 2, 3), sealed={1: sealed[1][0], 2: sealed[2][0], 3: sealed[1][0]}
            ),
            vectors_of(round_.terms.fields, 0),
        )


def test_a_colluding_device_with_the_keys_of_another():
    round_ = Round(4)
    cohort = round_.advertise()
    copied = signed_with(round_, 3, mask_key=cohort.advertisements[0].mask_key)
    other = Round(4)
    other.cloud.add_keys(cohort.advertisements[0])
    with pytest.raises(InvalidInput, match="'device-00003' advertised one that is in use already"):
        other.cloud.add_keys(copied)
    with pytest.raises(InvalidInput, match="every round key is used once"):
        round_.devices[1].share(MaskingCohort(advertisements=(*cohort.advertisements[:3], copied)))


@pytest.mark.parametrize("second", [lambda x: x | 1 << 255, lambda x: 2**255 - 19 + x % 19])
@pytest.mark.parametrize("key", ["encryption_key", "mask_key"])
def test_a_colluding_device_with_a_key_in_a_second_encoding(key, second):
    # X25519 ignores the highest bit and reduces modulo p; such a key would pass for another one,
    # and no private key that is recovered of shares would match it.
    round_ = Round(4)
    cohort = round_.advertise()
    number = int.from_bytes(getattr(cohort.advertisements[0], key), "little")
    copied = signed_with(round_, 3, **{key: second(number).to_bytes(32, "little")})
    other = Round(4)
    with pytest.raises(InvalidInput, match=r"of 'device-00003' is not below 2\^255 - 19"):
        other.cloud.add_keys(copied)
    with pytest.raises(InvalidInput, match=r"of 'device-00003' is not below 2\^255 - 19"):
        round_.devices[1].share(MaskingCohort(advertisements=(*cohort.advertisements[:3], copied)))


@pytest.mark.parametrize("order", [(0, 1, 2, 2), (1, 0, 2, 3), (0, 1, 2, 3, 3), (0, 0, 1, 2, 3)])
def test_a_cohort_lists_each_device_once_in_order(order):
    round_ = Round(4)
    listed = round_.advertise().advertisements
    with pytest.raises(InvalidInput, match="each device once, in the order"):
        round_.devices[0].share(MaskingCohort(advertisements=tuple(listed[i] for i in order)))


@pytest.mark.parametrize("name", ["", "a" * 65, "a b", "../x", "ä", "-a", "\ud800", "a\n"])
def test_hostile_names_of_devices(name):
    round_ = Round(4)
    hostile = Advertisement(
        device=name, encryption_key=bytes(32), mask_key=bytes(32), signature=bytes(70)
    )
    with pytest.raises(InvalidInput, match="1 to 64 letters"):
        round_.cloud.add_keys(hostile)
    cohort = MaskingCohort(advertisements=(hostile, *round_.advertise().advertisements))
    with pytest.raises(InvalidInput, match="1 to 64 letters"):
        round_.devices[0].share(cohort)
