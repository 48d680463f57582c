"""Noise on the integers of masked rounds: their bound, the room for it, and what is drawn."""

import numpy as np
import pytest

from triplane.proto import federation_pb2 as pb
from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.masking import wire
from triplane.unified_ir.federated.masking.encoding import (
    EncodedSection,
    UpdateEncoding,
    range_for,
)
from triplane.unified_ir.federated.masking.noise import (
    integer_norm,
    noise_for,
    noise_length,
    rounded,
    with_noise,
    with_noise_bits,
)
from triplane.unified_ir.federated.privacy.distributed import DistributedNoise

CLIP = 0.5
ENTRIES = 500
SECTION = EncodedSection(ENTRIES, range_for(CLIP, ENTRIES))
LARGEST = 1 << 7


@pytest.mark.parametrize("least", [1, 3, 4, 5, 8, 60])
@pytest.mark.parametrize("variance", [1, 900, 10**7, 10**11])
def test_no_cohort_from_the_least_on_has_too_few_bits(least, variance):
    section = with_noise_bits(SECTION, variance, least)
    noise = DistributedNoise(variance, 1, 1.0, section.padded)
    for devices in {*range(least, 200), 1000, 9999}:
        assert section.field.width(devices) >= noise.sum_bits(devices, LARGEST), devices
    smallest = 1 << (least - 1).bit_length()
    assert section.field.width(smallest) <= max(
        SECTION.field.width(smallest), noise.sum_bits(smallest, LARGEST)
    )


@pytest.mark.parametrize("level", [0, 255])
def test_sums_at_the_edge_are_decoded_with_their_noise(level):
    devices = 5
    section = with_noise_bits(SECTION, 10**6, devices)
    encoding = UpdateEncoding((section,), 1, 3)
    noise = noise_for(section, CLIP, 5.0, 3)
    rng = np.random.default_rng(1)
    added = rng.normal(0, np.sqrt(devices * 10**6), section.padded).round().astype(np.int64)
    total = np.full(section.padded, devices * level) + added
    width = section.field.width(devices)
    sums = [(total % (1 << width)).astype(np.uint64), np.array([devices], np.uint64)]
    (mean,), weight = encoding.decode(sums, devices, cohort=devices)
    (zero,), _ = encoding.decode(
        [(added % (1 << width)).astype(np.uint64), sums[1]], devices, cohort=devices
    )
    assert (weight, len(mean)) == (devices, ENTRIES)
    # The rotation is orthonormal: a constant level moves all entries by one fixed vector.
    (plain,), _ = encoding.decode(
        [np.full(section.padded, devices * level, np.uint64), sums[1]], devices, cohort=devices
    )
    (none,), _ = encoding.decode(
        [np.zeros(section.padded, np.uint64), sums[1]], devices, cohort=devices
    )
    assert np.allclose(mean - zero, plain - none, atol=1e-3)
    assert noise.variance > 1


def test_integers_are_rounded_until_they_meet_the_bound_that_the_noise_is_sized_for():
    noise, encoding = noise_for(SECTION, CLIP, 5.0, 3), UpdateEncoding((SECTION,), 1, 3)
    assert noise.noise_multiplier >= 5.0
    assert noise.norm == integer_norm(SECTION, CLIP)
    rng = np.random.default_rng(2)
    for _ in range(20):
        update = rng.normal(size=ENTRIES).astype(np.float32)
        update *= np.float32(CLIP / np.linalg.norm(update))
        levels, weight = rounded(encoding, [update], noise)
        assert np.linalg.norm(levels.astype(np.float64) - 127) <= noise.norm
        assert weight.tolist() == [1]
    with pytest.raises(InvalidInput, match="rounded 64 times above its bound"):
        rounded(encoding, [1.2 * update], noise)


def test_two_draws_differ_and_have_the_stated_variance():
    """Normal to 1 in a million: 4.9 deviations; the variance of one device less is refuted."""
    section = EncodedSection(20_000, range_for(CLIP, 20_000))
    noise = noise_for(section, CLIP, 5.0, 4)
    levels = np.full(section.padded, 7, np.uint8)
    drawn = [with_noise(levels, noise) - 7 for _ in range(2)]
    assert not np.array_equal(drawn[0], drawn[1])
    for x in drawn:
        assert x.dtype == np.int64
        spread = np.sqrt(2 / len(x))
        ratio = float(np.mean(np.square(x.astype(np.float64)))) / noise.variance
        assert abs(ratio - 1) < 4.9 * spread
        assert abs(ratio * 4 / 3 - 1) > 4.9 * spread
    of_both = np.linalg.norm((drawn[0] + drawn[1]).astype(np.float64))
    assert 0.9 * noise_length(noise, 2) < of_both < noise_length(noise, 2)


def encoding(**changes):
    return pb.MaskingEncoding(
        **{"norm": CLIP, "buffer_norm": CLIP, "bits": 8, "cap": 1, "seed": 3, **changes}
    )


def test_both_sides_derive_the_room_for_the_noise_and_refuse_what_noise_does_not_cover():
    plain = wire.encoding_of(encoding(), ENTRIES, 0)
    noisy = wire.encoding_of(encoding(), ENTRIES, 0, variance=10**6, least=3)
    assert plain.fields[0].noise_bits == 0 < noisy.fields[0].noise_bits
    assert plain.fields[1] == noisy.fields[1]
    for buffers, cap in ((3, 1), (0, 2)):
        with pytest.raises(InvalidInput, match="no float buffers and every device has the weight"):
            wire.encoding_of(encoding(cap=cap), ENTRIES, buffers, variance=1, least=3)
    with pytest.raises(InvalidInput, match="noise"):
        wire.encoding_of(encoding(), ENTRIES, 0, variance=2**60, least=3)
