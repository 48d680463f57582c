"""The cohort of a masked round in the cloud, with answers of any bytes."""

import hashlib

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from tests.federated.masking.rounds import MemoryStore, identity_key, public_der

from triplane.cloud.federation.masked_cohort import FIELD_OF, GivenAnswer, MaskedCohort
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
ENCODING = UpdateEncoding((EncodedSection(ENTRIES, range_for(NORM, ENTRIES)),), cap=CAP, seed=3)
TERMS = MaskingTerms(
    run="r1", base=bytes(32), round=1, attempt=0, fields=ENCODING.fields, least=3,
    lost_share=0.2, colluding_share=0.0,
)  # fmt: skip
KEYS = {name: public_der(identity_key(i)) for i, name in enumerate(NAMES)}
VERIFIER = EcdsaVerifier({wire.pseudonym(key): key for key in KEYS.values()})


def update(number):
    x = np.random.default_rng(number).normal(size=ENTRIES).astype(np.float32)
    return x / np.float32(2 * np.linalg.norm(x))


class Play:
    """Honest devices and the cloud's cohort, step by step. answers: of each step, by device."""

    def __init__(self):
        self.cohort = MaskedCohort(TERMS, ENCODING, (NORM,))
        self.devices = {
            name: MaskingDevice(
                TERMS, wire.pseudonym(KEYS[name]), signer=EcdsaSigner(identity_key(i)),
                verifier=VERIFIER, store=MemoryStore(),
            )
            for i, name in enumerate(NAMES)
        }  # fmt: skip
        self.answers: dict[MaskedStep, list[GivenAnswer]] = {}

    def honest(self, step, names=NAMES):
        return [GivenAnswer(*self.answer(step, name)) for name in names]

    def answer(self, step, name):
        device, message, data = self.devices[name], pb.MaskingAnswer(), b""
        asks = self.cohort.asks(step, name) or pb.MaskingStep()
        if step is MaskedStep.KEYS:
            message.keys.CopyFrom(wire.advertisement_message(device.advertise(), KEYS[name]))
        elif step is MaskedStep.SHARES:
            cohort, _ = wire.cohort_of(asks.share)
            message.shares.CopyFrom(wire.shares_message(device.share(cohort)))
        elif step is MaskedStep.INPUTS:
            vectors = ENCODING.encode([update(NAMES.index(name))], NAMES.index(name) + 3)
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
    mean = play.cohort.mean
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
    assert again.mean.sections[0].tobytes() == mean.sections[0].tobytes()


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

    def lying(_encoding, _sections, examples):
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
    assert play.cohort.mean.devices == len(NAMES)


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
        _ = Play().cohort.mean


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
