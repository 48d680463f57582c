"""Clipping bits in masked integers: their sums, their noise, and what the terms say of them."""

import hashlib
import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triplane.proto import federation_pb2 as pb
from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.masking import wire
from triplane.unified_ir.federated.masking.encoding import (
    EncodedSection,
    UpdateEncoding,
    range_for,
)
from triplane.unified_ir.federated.masking.fields import MaskedField
from triplane.unified_ir.federated.masking.messages import MaskingTerms, statement
from triplane.unified_ir.federated.masking.noise import joint_multiplier, noises_for
from triplane.unified_ir.federated.privacy.settings import DifferentialPrivacy

SECTIONS = (EncodedSection(40, range_for(1.0, 40)), EncodedSection(5, range_for(2.0, 5)))
ENCODING = UpdateEncoding(SECTIONS, cap=8, seed=3, has_bits=True)
PRIVACY = DifferentialPrivacy(
    epsilon=8.0, multiplier=3.0, clip=0.5, placement="distributed", quantile=0.5
)


def summed(vectors, encoding, cohort):
    """The sums modulo 2^width that a masked round reveals."""
    fields = zip(*vectors, strict=True)
    sums = [np.sum([np.asarray(x, np.int64) for x in field], axis=0) for field in fields]
    return [
        (total % (1 << field.width(cohort))).astype(np.uint64)
        for total, field in zip(sums, encoding.fields, strict=True)
    ]


@settings(max_examples=20)
@given(
    st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=70), st.integers(0, 9)
)
def test_the_sum_of_bits_is_exact_in_every_cohort(bits, lost):
    zeros = [np.zeros(s.entries, np.float32) for s in SECTIONS]
    cohort, devices = len(bits) + lost, len(bits)
    first = ENCODING.encode(zeros, 3, bits[0])
    assert [len(x) for x in first] == [f.entries for f in ENCODING.fields] == [256, 256, 1, 2]
    sums = summed(
        [[*first[:3], np.array([2 * b for b in pair])] for pair in bits], ENCODING, cohort
    )
    expected = tuple(sum(1 if pair[i] else -1 for pair in bits) for i in range(2))
    assert ENCODING.sums_of_bits(sums, devices, cohort=cohort) == expected
    assert ENCODING.decode(sums, devices, cohort=cohort)[1] == 3 * devices


@pytest.mark.parametrize("level", [-1, 1, 3, 5, 7, 11, 16, 31])
def test_a_sum_of_bits_that_no_devices_can_have_is_refused(level):
    """Of 3 devices in a cohort of 5: 0, 2, 4 and 6 are possible, and 32 levels are read."""
    width = ENCODING.fields[-1].width(5)
    assert width == 5
    sums = [np.zeros(f.entries, np.uint64) for f in ENCODING.fields]
    sums[-1][:] = 2, level % (1 << width)
    with pytest.raises(InvalidInput, match=r"3 devices, \+1 or -1 each, cannot add up .* lied"):
        ENCODING.sums_of_bits(sums, 3, cohort=5)
    sums[-1][1] = 6
    assert ENCODING.sums_of_bits(sums, 3, cohort=5) == (-1, 3)
    with pytest.raises(InvalidInput, match="sum of 2 bits is uint64"):
        ENCODING.sums_of_bits([*sums[:-1], sums[-1][:1]], 3, cohort=5)


def test_without_bits_nothing_differs():
    plain = replace(ENCODING, has_bits=False)
    assert plain.fields == ENCODING.fields[:3]
    vectors = plain.encode([np.zeros(s.entries, np.float32) for s in SECTIONS], 3, [True, True])
    assert len(vectors) == 3
    assert plain.sums_of_bits(vectors, 1, cohort=3) == ()
    assert UpdateEncoding((), 8, 3).fields == (MaskedField(1, 4),)


@pytest.mark.parametrize("devices", [3, 20, 300])
def test_noise_in_bits_is_in_their_sum_and_does_not_wrap_around(devices):
    section, least = SECTIONS[0], devices // 2 + 1
    _, bit = noises_for(section, 0.5, PRIVACY, devices, least)
    message = encoding_message(bit_share=1.0, cap=1)
    encoding = wire.encoding_of(
        message, 40, 0, variance=10**6, bit_variance=there(bit).variance, least=least
    )
    assert encoding.fields[-1].noise_bits > 0
    width = encoding.fields[-1].width(devices)
    sums = [np.zeros(f.entries, np.uint64) for f in encoding.fields]
    for deviations in (-6, -1, 0, 1, 6):
        noise = int(deviations * np.sqrt(devices * there(bit).variance))
        total = 2 * devices // 3 + noise
        sums[-1][:] = total % (1 << width)
        assert encoding.sums_of_bits(sums, devices, cohort=devices) == (total - devices,)


def there(value):
    assert value is not None
    return value


@pytest.mark.parametrize("honest", [2, 9, 500])
@pytest.mark.parametrize("multiplier", [0.3, 3.0, 40.0])
def test_updates_and_bits_cost_together_what_the_run_charges(honest, multiplier):
    privacy = replace(PRIVACY, multiplier=multiplier)
    section = EncodedSection(5000, range_for(0.5, 5000))
    update, bit = noises_for(section, 0.5, privacy, honest + 3, honest)
    joint = joint_multiplier(update, bit)
    assert multiplier <= joint < 1.3 * multiplier
    # What the bits take: a quarter at most (`DifferentialPrivacy.adaptive`).
    assert (multiplier / there(bit).noise_multiplier) ** 2 <= 0.25 + 1e-9
    assert update.noise_multiplier > multiplier
    without, none = noises_for(section, 0.5, replace(privacy, quantile=0.0), honest + 3, honest)
    assert none is None
    assert without.variance <= update.variance


def encoding_message(**changes):
    values = {"norm": 0.5, "buffer_norm": 0.25, "bits": 8, "cap": 8, "seed": 3, "bit_share": 0.5}
    return pb.MaskingEncoding(**{**values, **changes})


def test_both_sides_derive_the_bits_and_refuse_what_makes_no_sense():
    made = wire.encoding_of(encoding_message(), 40, 5)
    assert made.fields[-1] == MaskedField(2, 2)
    assert wire.encoding_of(encoding_message(bit_share=0.0), 40, 5).fields == made.fields[:3]
    for share in (-0.5, 1.5, float("nan"), float("inf")):
        with pytest.raises(InvalidInput, match="a share of the norm from 0 to 1"):
            wire.encoding_of(encoding_message(bit_share=share), 40, 5)
    noisy = {"variance": 900, "least": 3}
    for message, options in (
        (encoding_message(cap=1), noisy),
        (encoding_message(cap=1, bit_share=0.0), {**noisy, "bit_variance": 4}),
        (encoding_message(cap=1), {"bit_variance": 4, "least": 3}),
    ):
        with pytest.raises(InvalidInput, match="has noise exactly if the update has"):
            wire.encoding_of(message, 40, 0, **options)


def test_the_terms_of_a_round_name_its_encoding_and_its_noise():
    """So devices that a cloud tells different norms, or noise, have no cohort with each other."""
    message = pb.MaskingTerms(least=3, lost_share=0.1, failure=1e-6)
    message.fields.add(entries=256, bits=8)
    options: dict[str, Any] = {"run": "r1", "round_": 2, "base": bytes(32)}
    plain = wire.terms_of(message, **options)
    before = statement(
        "terms", b"r1", bytes(32), struct.pack(">4Q", 2, 0, 0, 3),
        struct.pack(">3d", 0.1, 0.0, 1e-6), struct.pack(">QII", 256, 8, 0),
    )  # fmt: skip
    assert plain.encode() == before
    digests = {
        wire.encoding_digest(encoding_message(**changes), pb.Sampling())
        for changes in (
            {}, {"norm": 0.6}, {"buffer_norm": 0.5}, {"bit_share": 1.0}, {"cap": 9}, {"seed": 4},
            {"bits": 9}, {"bit_share": 0.0},
        )
    } | {
        wire.encoding_digest(encoding_message(), pb.Sampling(), variance=900),
        wire.encoding_digest(encoding_message(), pb.Sampling(), variance=900, bit_variance=4),
    }  # fmt: skip
    assert len(digests) == 10
    terms = [wire.terms_of(message, **options, encoding=d).encode() for d in sorted(digests)]
    assert len({*terms, before}) == 11
    with pytest.raises(InvalidInput, match="named by SHA-256, got 3 bytes"):
        wire.terms_of(message, **options, encoding=b"abc")
    assert MaskingTerms.__dataclass_fields__["encoding"].default == b""
    assert hashlib.sha256(before).digest() not in digests
