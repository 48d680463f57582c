"""The cohort of a masked round in the cloud, with answers of any bytes."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from tests.federated.masking.rounds import MemoryStore, identity_key, public_der

from triplane.cloud.federation.masked_cohort import FIELD_OF, GivenAnswer, MaskedCohort
from triplane.cloud.federation.masked_spec import FewestLeft
from triplane.proto import federation_pb2 as pb
from triplane.proto.errors import Corrupt
from triplane.unified_ir.federated.core.masked_step import STEPS, MaskedStep
from triplane.unified_ir.federated.masking import (
    EcdsaSigner,
    EcdsaVerifier,
    EncodedSection,
    MaskingDevice,
    MaskingTerms,
    UpdateEncoding,
    integers,
    range_for,
    wire,
)

ENTRIES, NORM, CAP = 40, 1.0, 8
NAMES = ("ann", "bob", "cem", "dia", "eli")
MANY = tuple(f"dev{number:02}" for number in range(12))
ENCODING = UpdateEncoding((EncodedSection(ENTRIES, range_for(NORM, ENTRIES)),), cap=CAP, seed=3)
WITH_BITS = replace(ENCODING, has_bits=True)
TERMS = MaskingTerms(
    run="r1", base=bytes(32), round=1, attempt=0, fields=ENCODING.fields, least=3,
    lost_share=0.2, colluding_share=0.0,
)  # fmt: skip
GROUPED = replace(TERMS, groups=4)
KEYS = {n: public_der(identity_key(i)) for names in (NAMES, MANY) for i, n in enumerate(names)}
VERIFIER = EcdsaVerifier({wire.pseudonym(key): key for key in KEYS.values()})


def update(number):
    x = np.random.default_rng(number).normal(size=ENTRIES).astype(np.float32)
    return x / np.float32(2 * np.linalg.norm(x))


class Play:
    """Honest devices and the cloud's cohort, step by step. answers: of each step, by device."""

    def __init__(self, names=NAMES, terms=TERMS, fewest=None, encoding=ENCODING, bits=()):
        self.names, self.encoding, self.bits = names, encoding, dict(bits)
        terms = replace(terms, fields=encoding.fields)
        self.cohort = MaskedCohort(terms, encoding, (NORM,), fewest=fewest)
        self.devices = {
            name: MaskingDevice(
                terms, wire.pseudonym(KEYS[name]), signer=EcdsaSigner(identity_key(i)),
                verifier=VERIFIER, store=MemoryStore(),
            )
            for i, name in enumerate(names)
        }  # fmt: skip
        self.answers: dict[MaskedStep, list[GivenAnswer]] = {}

    def honest(self, step, names=()):
        return [GivenAnswer(*self.answer(step, name)) for name in names or self.names]

    def answer(self, step, name):
        device, message, data = self.devices[name], pb.MaskingAnswer(), b""
        asks = self.cohort.asks(step, name) or pb.MaskingStep()
        if step is MaskedStep.KEYS:
            message.keys.CopyFrom(wire.advertisement_message(device.advertise(), KEYS[name]))
        elif step is MaskedStep.SHARES:
            cohort, _ = wire.cohort_of(asks.share)
            message.shares.CopyFrom(wire.shares_message(device.share(cohort)))
        elif step is MaskedStep.INPUTS:
            at = self.names.index(name)
            vectors = self.encoding.encode([update(at)], at + 3, [at % 2 == 0])
            if name in self.bits:
                vectors = (*vectors[:-1], np.array([self.bits[name]], np.uint64))
            masked = device.mask(wire.delivery_of(asks.mask), vectors)
            message.input.CopyFrom(wire.input_message(masked))
            data = masked.data
        elif step is MaskedStep.SIGNATURES:
            signed = device.sign(wire.survivors_of(asks.sign))
            message.signature.CopyFrom(wire.signature_message(signed))
        else:
            revealed = device.unmask(wire.request_of(asks.unmask))
            message.revealed.CopyFrom(wire.revealed_message(revealed))
        return name, message, data

    def through(self, until):
        for step in STEPS[: STEPS.index(until)]:
            self.answers[step] = self.honest(step)
            assert self.cohort.take(step, self.answers[step]) == ({}, "")
        return self


def test_the_mean_is_that_of_the_updates_and_of_the_same_answers_again():
    play = Play().through(MaskedStep.REVEALS)
    play.answers[MaskedStep.REVEALS] = play.honest(MaskedStep.REVEALS)
    assert play.cohort.take(MaskedStep.REVEALS, play.answers[MaskedStep.REVEALS]) == ({}, "")
    (mean,) = play.cohort.means
    weights = [min(i + 3, CAP) for i in range(len(NAMES))]
    expected = sum(w * update(i) for i, w in enumerate(weights)) / sum(weights)
    assert (mean.devices, mean.weight) == (5, sum(weights))
    bound = ENCODING.sections[0].error_bound(5) * CAP / sum(weights)
    assert np.linalg.norm(mean.sections[0] - expected) < bound
    again = MaskedCohort(TERMS, ENCODING, (NORM,))
    for step in STEPS:
        for name in NAMES if step is not MaskedStep.KEYS else ():
            assert again.asks(step, name) is not None
        assert again.take(step, play.answers[step]) == ({}, "")
    assert again.means[0].sections[0].tobytes() == mean.sections[0].tobytes()


@given(st.permutations(range(len(NAMES))), st.integers(0, len(NAMES)), st.booleans())
def test_inputs_that_are_added_before_the_end_of_their_step_give_the_same_mean(
    order, many, is_wrong
):
    """A wrong one is not in the sum, and its device is told why when the step ends."""
    play, alone = Play().through(MaskedStep.INPUTS), MaskedCohort(TERMS, ENCODING, (NORM,))
    honest = play.honest(MaskedStep.INPUTS)
    sent = [replace(x, data=x.data[:-1]) if is_wrong and x.device == "ann" else x for x in honest]
    for at in order[:many]:
        play.cohort.add_input(sent[at])
    early = {NAMES[at] for at in order[:many]} - ({"ann"} if is_wrong else set())
    assert set(play.cohort.added) == early
    rest = [x for x in sent if x.device not in early]
    refused, failure = play.cohort.take(MaskedStep.INPUTS, rest)
    assert (refused.keys(), failure) == ({"ann"} if is_wrong else set(), "")
    assert not play.cohort.added
    left = [name for name in NAMES if name not in refused]
    for step in STEPS[3:]:
        play.answers[step] = play.honest(step, left)
        assert play.cohort.take(step, play.answers[step]) == ({}, "")
    play.answers[MaskedStep.INPUTS] = [x for x in sent if x.device in left]
    for step in STEPS:
        assert alone.take(step, play.answers[step]) == ({}, "")
    assert alone.means[0].sections[0].tobytes() == play.cohort.means[0].sections[0].tobytes()


def test_the_sum_of_bits_comes_with_the_mean(monkeypatch):
    play = Play(encoding=WITH_BITS).through(MaskedStep.REVEALS)
    assert play.cohort.take(MaskedStep.REVEALS, play.honest(MaskedStep.REVEALS)) == ({}, "")
    assert play.cohort.means[0].bits == (3 - 2,)
    # A device may send any bits; what no honest devices can have ends the round.
    monkeypatch.setattr(integers, "_check_vector", lambda *_: None)
    for lie, bits in ((2 * 3, (3 - 2 + 4,)), (3, None), (2 * 5, None), (31, None)):
        play = Play(encoding=WITH_BITS, bits={"ann": lie}).through(MaskedStep.REVEALS)
        _, failure = play.cohort.take(MaskedStep.REVEALS, play.honest(MaskedStep.REVEALS))
        if bits is None:
            assert "so a device lied" in failure
        else:
            assert (play.cohort.means[0].bits, failure) == (bits, "")


@pytest.mark.parametrize("step", STEPS)
@given(st.binary(max_size=200), st.integers(0, 3), st.integers(0, 1 << 30))
def test_any_answer_of_one_device_is_refused_or_taken_and_the_round_goes_on(step, data, how, at):
    play = Play().through(step)
    honest = play.honest(step)
    message = spoilt(honest[0].message, step, data, how, at)
    refused, failure = play.cohort.take(
        step, [GivenAnswer("ann", message, message.input.data), *honest[1:]]
    )
    assert refused.keys() <= {"ann"}
    assert not failure


def test_a_device_that_takes_weight_from_the_others_does_not_lengthen_the_mean(monkeypatch):
    """Of a sum of weights that is as small as it may be, the mean would be five times as long."""
    play, encode = Play().through(MaskedStep.INPUTS), ENCODING.encode
    others, width = sum(range(4, 8)), TERMS.fields[-1].width(len(NAMES))

    def lying(_encoding, _sections, examples, _is_short):
        *vectors, weight = encode([update(0)], examples)
        taken = (len(NAMES) - others) % (1 << width)
        return [*vectors, np.array([taken if examples == 3 else weight[0]], np.uint64)]

    monkeypatch.setattr(UpdateEncoding, "encode", lying)
    monkeypatch.setattr(integers, "_check_vector", lambda *_: None)
    for step in STEPS[2:]:
        _, failure = play.cohort.take(step, play.honest(step))
    assert "so a device lied, and the state is kept" in failure


def test_the_sender_of_garbage_is_refused_and_learns_no_name_of_another_device():
    play = Play().through(MaskedStep.SHARES)
    answers = play.honest(MaskedStep.SHARES)
    for i, sealed in answers[1].message.shares.sealed.items():
        answers[1].message.shares.sealed[i] = bytes(len(sealed))
    assert play.cohort.take(MaskedStep.SHARES, answers) == ({}, "")
    refused, failure = play.cohort.take(MaskedStep.INPUTS, play.honest(MaskedStep.INPUTS))
    assert refused == {
        "bob": "4 of its 4 neighbours could not open the shares that it sealed for them"
    }
    assert "neighbours of 'bob' (" in failure
    assert all(f"'{name}' (" in failure for name in NAMES)


def test_a_device_that_accuses_falsely_cannot_make_another_one_refused():
    play = Play().through(MaskedStep.INPUTS)
    answers = play.honest(MaskedStep.INPUTS)
    own = answers[0].message.input.position
    answers[0].message.input.unopened.extend(i for i in range(len(NAMES)) if i != own)
    assert play.cohort.take(MaskedStep.INPUTS, answers) == ({}, "")
    for step in (MaskedStep.SIGNATURES, MaskedStep.REVEALS):
        assert play.cohort.take(step, play.honest(step)) == ({}, "")
    assert play.cohort.means[0].devices == len(NAMES)


def spoilt(message, step, data, how, at):
    """An answer with other bytes: parsed from any, flipped in one place, or in one field."""
    made = pb.MaskingAnswer()
    made.CopyFrom(message)
    if how == 0:
        try:
            return pb.MaskingAnswer.FromString(data)
        except DecodeError:
            return pb.MaskingAnswer()
    if how == 1:
        text = bytearray(made.SerializeToString())
        text[at % len(text)] ^= 1 + at % 255
        try:
            return pb.MaskingAnswer.FromString(bytes(text))
        except DecodeError:
            return pb.MaskingAnswer()
    body = getattr(made, FIELD_OF[step])
    fields = body.DESCRIPTOR.fields
    field = fields[at % len(fields)]
    value = getattr(body, field.name)
    if isinstance(value, bytes):
        setattr(body, field.name, data)
    elif isinstance(value, int):
        setattr(body, field.name, at)
    elif isinstance(value, str):
        setattr(body, field.name, hashlib.sha256(data).hexdigest())
    elif hasattr(value, "keys"):
        value[at % 7] = data
    return made


def test_there_is_no_mean_before_the_last_step():
    with pytest.raises(Corrupt, match="give no sum again"):
        _ = Play().cohort.means


def test_what_is_asked_is_of_the_present_step_and_of_a_device_of_the_cohort():
    play = Play().through(MaskedStep.INPUTS)
    assert play.cohort.asks(MaskedStep.INPUTS, "ann") is not None
    assert play.cohort.asks(MaskedStep.SHARES, "ann") is not None, "until the step is committed"
    assert play.cohort.asks(MaskedStep.SIGNATURES, "ann") is None
    assert play.cohort.asks(MaskedStep.INPUTS, "zoe") is None


def test_two_devices_with_one_identity_key_are_one_device():
    play = Play()
    answers = play.honest(MaskedStep.KEYS)
    twin = GivenAnswer("zoe", answers[0].message)
    refused, failure = play.cohort.take(MaskedStep.KEYS, [*answers, twin])
    assert refused == {"zoe": "another device of this round has the same identity key"}
    assert not failure


class Groups(Play):
    """Twelve devices in four groups of three. taken: answers of each step, as the cloud keeps them.

    silent: devices that do not answer a step. lying: devices whose masked integers are the largest.
    """

    def __init__(self, *, groups=2, devices=6):
        super().__init__(MANY, GROUPED, FewestLeft(groups, devices))
        self.silent: dict[MaskedStep, set[str]] = {}
        self.lying: set[str] = set()
        self.left_out: dict[str, tuple[str, ...]] = {}
        self.failure = ""

    def group(self, number):
        cloud = dict(enumerate(self.cohort._cloud.groups, 1))[number]
        names = {wire.pseudonym(KEYS[name]): name for name in MANY}
        return [names[x] for x in cloud.session.devices]

    def honest(self, step, names=()):
        out = {d for devices in self.left_out.values() for d in devices}
        left = [n for n in self.names if n not in out | self.silent.get(step, set())]
        return super().honest(step, names or left)

    def take(self, step):
        self.answers[step] = self.honest(step)
        refused, self.failure = self.cohort.take(step, self.answers[step])
        self.left_out |= self.cohort.left_out
        return refused

    def to_the_end(self, before=lambda _step: None):
        for step in STEPS:
            if not self.failure:
                before(step)
                assert self.take(step) == {}
        return self


def check_means(play, numbers):
    assert len(play.cohort.means) == len(numbers)
    for number, mean in zip(numbers, play.cohort.means, strict=True):
        devices = [MANY.index(name) for name in play.group(number)]
        weights = [min(i + 3, CAP) for i in devices]
        expected = sum(w * update(i) for w, i in zip(weights, devices, strict=True)) / sum(weights)
        assert (mean.devices, mean.weight) == (3, sum(weights))
        bound = ENCODING.sections[0].error_bound(3) * CAP / sum(weights)
        assert np.linalg.norm(mean.sections[0] - expected) < bound


def test_each_group_has_the_mean_of_its_devices():
    play = Groups().to_the_end()
    assert (play.failure, play.left_out) == ("", {})
    check_means(play, [1, 2, 3, 4])


@pytest.mark.parametrize("step", STEPS[1:])
def test_a_group_that_loses_a_device_is_left_out_alone_and_again_after_a_restart(step):
    play = Groups()

    def before(at):
        if at.is_at_least(step):
            play.silent[at] = {play.group(3)[1]}

    play.to_the_end(before)
    # Two of three may sign, but all have to reveal.
    fails = MaskedStep.REVEALS if step is MaskedStep.SIGNATURES else step
    ((reason, devices),) = play.left_out.items()
    assert reason.startswith("group 3 of 4: ")
    assert [*devices] == sorted(play.group(3))
    assert all(play.cohort.asks(at, name) is None for at in STEPS for name in devices)
    check_means(play, [1, 2, 4])
    again = MaskedCohort(GROUPED, ENCODING, (NORM,), fewest=FewestLeft(2, 6))
    for at in STEPS:
        taken = [a for a in play.answers[at] if at is not fails or a.device not in devices]
        assert again.take(at, taken) == ({}, "")
    assert [m.sections[0].tobytes() for m in again.means] == [
        m.sections[0].tobytes() for m in play.cohort.means
    ]


def test_garbage_spoils_the_group_of_the_device_that_sent_it(monkeypatch):
    play, encode = Groups(), UpdateEncoding.encode
    liar = MANY[5]

    def lying(encoding, sections, examples, _is_short):
        levels, weight = encode(encoding, sections, examples)
        return [levels * 0 + 255 if examples == 5 + 3 else levels, weight]

    monkeypatch.setattr(UpdateEncoding, "encode", lying)
    play.to_the_end()
    ((reason, devices),) = play.left_out.items()
    assert liar in devices
    assert "so a device lied, and the state is kept" in reason
    check_means(play, [n for n in (1, 2, 3, 4) if liar not in play.group(n)])


@pytest.mark.parametrize(
    ("fewest", "text"),
    [
        ({"groups": 4, "devices": 1}, "the aggregator needs 4 groups"),
        ({"groups": 2, "devices": 10}, "the quorum is 10 devices"),
    ],
)
def test_a_round_with_too_few_groups_left_is_given_up(fewest, text):
    play = Groups(**fewest)

    def before(step):
        if step is MaskedStep.INPUTS:
            play.silent[step] = {play.group(1)[0]}

    play.to_the_end(before)
    assert "3 of 4 groups are left, with 9 devices; the aggregator needs" in play.failure
    assert text in play.failure
    assert "group 1 of 4: at least 3 of 3 devices must have sent a masked input" in play.failure
    with pytest.raises(Corrupt, match="give no sum again"):
        _ = play.cohort.means


def test_a_device_whose_keys_are_refused_is_a_loss_that_a_round_without_groups_tolerates():
    play = Play(fewest=FewestLeft(1, len(NAMES)))
    first, *others = play.honest(MaskedStep.KEYS)
    first.message.keys.signature = bytes(70)
    refused, failure = play.cohort.take(MaskedStep.KEYS, [first, *others])
    assert ([*refused], failure) == (["ann"], "")
    for step in STEPS[1:]:
        assert play.cohort.take(step, play.honest(step, NAMES[1:])) == ({}, "")
    assert play.cohort.means[0].devices == len(NAMES) - 1


def test_the_sender_of_garbage_is_refused_with_its_group():
    play = Groups()
    play.take(MaskedStep.KEYS)
    liar = play.group(2)[1]
    answers = {a.device: a for a in play.honest(MaskedStep.SHARES)}
    for i, sealed in answers[liar].message.shares.sealed.items():
        answers[liar].message.shares.sealed[i] = bytes(len(sealed))
    assert play.cohort.take(MaskedStep.SHARES, answers.values()) == ({}, "")
    refused, failure = play.cohort.take(MaskedStep.INPUTS, play.honest(MaskedStep.INPUTS))
    assert [*refused] == [liar]
    assert not failure
    ((reason, devices),) = play.cohort.left_out.items()
    assert reason.startswith("group 2 of 4: ")
    assert f"neighbours of {liar!r} (" in reason
    assert [*devices] == sorted(play.group(2))


def test_a_device_answers_at_its_position_in_its_group():
    play = Groups()
    play.take(MaskedStep.KEYS)
    one, two = play.group(1)[0], play.group(2)[1]
    assert (play.cohort.group_size(one), play.cohort.group_size("zoe")) == (3, 0)
    answers = {a.device: a for a in play.honest(MaskedStep.SHARES)}
    swapped = [*answers.values()]
    swapped[swapped.index(answers[one])] = GivenAnswer(one, answers[two].message)
    refused, failure = play.cohort.take(MaskedStep.SHARES, swapped)
    assert refused == {one: "a device answers for itself, at position 0; got 1"}
    assert not failure
    assert [name for names in play.cohort.left_out.values() for name in names] == sorted(
        play.group(1)
    )
