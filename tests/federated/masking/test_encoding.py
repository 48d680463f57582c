"""Updates as integers: unbiased, within the stated bound, and of the stated size."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.federated.masking.rounds import Round, terms

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.masking import EncodedSection, UpdateEncoding, range_for
from triplane.unified_ir.federated.masking.encoding import _hadamard


def summed(encoding, updates, examples):
    encoded = [encoding.encode(u, w) for u, w in zip(updates, examples, strict=True)]
    return [sum(v.astype(np.uint64) for v in parts) for parts in zip(*encoded, strict=True)]


def weighted_mean(updates, weights):
    weights = np.array(weights, np.float64)
    return [
        np.tensordot(weights, np.array(parts, np.float64), 1) / weights.sum()
        for parts in zip(*updates, strict=True)
    ]


def hadamard_matrix(size):
    """Sylvester's construction."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.sqrt(size)


@pytest.mark.parametrize(("block", "n"), [(1, 3), (2, 1), (8, 5), (256, 2)])
def test_the_rotation_is_by_the_hadamard_matrix(block, n):
    x = np.random.default_rng(0).normal(size=(block, n)).astype(np.float32)
    expected = hadamard_matrix(block) @ x
    _hadamard(x)
    np.testing.assert_allclose(x, expected, atol=1e-5)


sections = st.builds(
    EncodedSection,
    entries=st.integers(1, 700),
    range=st.floats(0.01, 100),
    bits=st.integers(2, 16),
    noise_bits=st.integers(0, 3),
)


@given(st.lists(sections, min_size=1, max_size=2), st.integers(1, 5), st.data())
def test_the_mean_is_within_the_stated_bound(parts, devices, data):
    cap = data.draw(st.sampled_from([1, 7, 1000]))
    encoding = UpdateEncoding(tuple(parts), cap, seed=data.draw(st.integers(0, 9)))
    generator = np.random.default_rng(data.draw(st.integers(0, 99)))
    examples = data.draw(st.lists(st.integers(1, 2000), min_size=devices, max_size=devices))
    # Short enough that no rotated entry is clipped, whatever the signs.
    updates = [
        [
            (x := generator.normal(size=p.entries).astype(np.float32))
            * np.float32(p.range / np.linalg.norm(x) * 0.99)
            for p in parts
        ]
        for _ in range(devices)
    ]
    means, weight = encoding.decode(summed(encoding, updates, examples), devices, cohort=devices)
    counted = [min(w, cap) for w in examples]
    assert weight == sum(counted)
    for part, mean, expected in zip(parts, means, weighted_mean(updates, counted), strict=True):
        error = np.linalg.norm(mean - expected) * weight / cap
        assert error <= part.error_bound(devices) + 1e-4 * part.range
        assert mean.dtype == np.float32


def test_rounding_is_unbiased():
    section = EncodedSection(300, range=1.0, bits=2)
    encoding = UpdateEncoding((section,), 1, seed=3)
    update = np.linspace(-0.04, 0.05, 300, dtype=np.float32)
    runs = 400
    means, _ = encoding.decode(summed(encoding, [[update]] * runs, [1] * runs), runs, cohort=runs)
    # Each entry deviates by at most step / 2 for a run; 6 deviations of the mean of all.
    assert np.abs(means[0] - update).max() < 6 * section.step / 2 / np.sqrt(runs)
    # To the nearest level, every entry would be off in the same way each time.
    assert section.step / 2 > 0.3


@pytest.mark.parametrize("sign", [1, -1])
def test_large_entries_are_clipped_to_the_range_after_the_rotation(sign):
    encoding = UpdateEncoding((EncodedSection(256, range=1.0, bits=8),), 1, seed=0)
    update = np.zeros(256, np.float32)
    update[0] = sign * 1e29
    means, _ = encoding.decode(summed(encoding, [[update]], [1]), 1, cohort=1)
    # One entry becomes 256 of the same size; each is clipped to 1.
    assert means[0][0] == pytest.approx(sign * 16.0, rel=1e-3)
    assert np.abs(means[0][1:]).max() < 1e-3


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 100, 128, 129])
@pytest.mark.parametrize("noise_bits", [0, 1])
def test_the_least_and_the_largest_sum_are_read_as_such(devices, noise_bits):
    section = EncodedSection(256, range=1.0, noise_bits=noise_bits)
    encoding = UpdateEncoding((section,), 1, seed=0)
    for total, level in ((0, -1.0), (255 * devices, 1.0)):
        sums = [np.full(256, total, np.uint64), np.array([devices], np.uint64)]
        rotated = np.abs(encoding.decode(sums, devices, cohort=devices)[0][0])
        assert rotated.max() == pytest.approx(16 * abs(level))
        assert (
            encoding.decode(sums, devices, cohort=devices)[0][0].sum()
            * level
            * encoding._signs[0][0]
            > 0
        )


def test_the_rotation_spreads_a_few_large_entries():
    entries, norm = 20_000, 3.0
    section = EncodedSection(entries, range=range_for(norm, entries))
    update = np.zeros(entries, np.float32)
    update[[5, 6, 7]] = norm / np.sqrt(3)
    encoding = UpdateEncoding((section,), 10, seed=1)
    means, weight = encoding.decode(summed(encoding, [[update]] * 3, [10] * 3), 3, cohort=3)
    assert weight == 30
    assert np.linalg.norm(means[0] - update) < 0.05 * norm


def test_noise_may_make_integers_negative_and_the_sum_is_read_around_its_middle():
    section = EncodedSection(256, range=1.0, bits=8, noise_bits=3)
    encoding = UpdateEncoding((section,), 1, seed=0)
    round_ = Round(3, terms([(256, 8, 3), (1, 1)]))
    noise = np.random.default_rng(0).integers(-1100, 1100, (3, 256))
    # The sums of three reach far below 0 and far above 3 * 255, but stay within 2^13 values.
    assert noise.sum(axis=0).min() < -1500
    assert noise.sum(axis=0).max() > 3 * 255 + 1000
    update = np.linspace(-0.05, 0.05, 256, dtype=np.float32)
    levels = [encoding.encode([update], 1) for _ in range(3)]
    sums = round_.run(lambda i: [levels[i][0].astype(np.int64) + noise[i], levels[i][1]])
    noisy = encoding.decode(sums, 3, cohort=3)[0][0]
    clear = [np.array([v[at] for v in levels], np.uint64).sum(axis=0) for at in (0, 1)]
    plain = encoding.decode(clear, 3, cohort=3)
    rotated = noise.sum(axis=0) * section.step / 3
    expected = (hadamard_matrix(256) @ rotated) * encoding._signs[0]
    np.testing.assert_allclose(noisy - plain[0][0], expected, atol=1e-3)


@pytest.mark.parametrize("total", [-4000, 2 * 255 + 4000])
def test_a_sum_of_few_survivors_has_the_modulus_of_the_whole_cohort(total):
    # 100 devices began, 2 were left: their noise may use all of the cohort's 15 bits.
    section = EncodedSection(256, range=1.0, bits=8, noise_bits=0)
    encoding = UpdateEncoding((section,), 1, seed=0)
    sums = [np.full(256, total % 2**15, np.uint64), np.array([2], np.uint64)]
    rotated = np.full(256, (total / 2 - 255 / 2) * section.step)
    expected = (hadamard_matrix(256) @ rotated) * encoding._signs[0]
    np.testing.assert_allclose(encoding.decode(sums, 2, cohort=100)[0][0], expected, atol=1e-2)


@pytest.mark.parametrize(
    ("entries", "padded"),
    [(1, 256), (256, 256), (1000, 1024), (1_000_000, 1_015_808), (16_385, 16_896)],
)
def test_padding_is_small(entries, padded):
    section = EncodedSection(entries, range=1.0)
    assert section.padded == padded
    assert section.padded % section.block == 0


def test_the_widths_grow_with_the_cohort():
    encoding = UpdateEncoding(
        (EncodedSection(1000, 1.0), EncodedSection(10, 1.0, bits=16, noise_bits=2)), 500, seed=0
    )
    assert [f.width(100) for f in encoding.fields] == [8 + 7, 16 + 2 + 7, 9 + 7]
    assert [f.width(128) for f in encoding.fields] == [8 + 7, 16 + 2 + 7, 9 + 7]
    assert [f.width(129) for f in encoding.fields] == [8 + 8, 16 + 2 + 8, 9 + 8]


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.zeros(9, np.float32), "is float32.10,., got float32.9,."),
        (np.zeros(10), "got float64"),
        (np.array([0] * 9 + [np.nan], np.float32), "clip the update"),
        (np.array([0] * 9 + [-np.inf], np.float32), "clip the update"),
        (np.array([0] * 9 + [3e38], np.float32), "clip the update"),
    ],
)
def test_updates_that_cannot_be_encoded_are_refused(x, message):
    encoding = UpdateEncoding((EncodedSection(10, 1.0),), 1, seed=0)
    with pytest.raises(InvalidInput, match=message):
        encoding.encode([x], 1)
    with pytest.raises(InvalidInput, match="at least 1 example"):
        encoding.encode([np.zeros(10, np.float32)], 0)
    with pytest.raises(InvalidInput, match="1 sections"):
        encoding.encode([], 1)


def test_sums_that_no_devices_can_have_are_refused():
    encoding = UpdateEncoding((EncodedSection(10, 1.0),), 5, seed=0)
    total = np.zeros(256, np.uint64)
    for weight in (2, 16):
        with pytest.raises(InvalidInput, match=f"add up to 3 to 15, got {weight}"):
            encoding.decode([total, np.array([weight], np.uint64)], 3, cohort=3)
    with pytest.raises(InvalidInput, match="of 3 devices cannot come from a cohort of 2"):
        encoding.decode([total, np.array([3], np.uint64)], 3, cohort=2)
    with pytest.raises(InvalidInput, match=r"the sum of section 0 is uint64\[256\]"):
        encoding.decode([total[:9], np.array([3], np.uint64)], 3, cohort=3)


@pytest.mark.parametrize(
    "arguments",
    [
        (0, 1.0),
        (1, 0.0),
        (1, float("nan")),
        (1, 1e-300),
        (1, float("inf")),
        (1, 1.0, 0),
        (1, 1.0, 25),
    ],
)
def test_sections_have_limits(arguments):
    with pytest.raises(InvalidInput, match="a section has"):
        EncodedSection(*arguments)
    with pytest.raises(InvalidInput, match="cap on examples"):
        UpdateEncoding((), 0, seed=0)


def test_a_masked_round_gives_the_weighted_mean():
    entries = (300, 20)
    encoding = UpdateEncoding(
        (EncodedSection(entries[0], 0.5), EncodedSection(entries[1], 2.0, bits=16)), 50, seed=7
    )
    generator = np.random.default_rng(4)
    updates = [[generator.normal(0, 0.05, n).astype(np.float32) for n in entries] for _ in range(5)]
    examples = [10, 70, 3, 50, 8]
    round_ = Round(5, terms([(f.entries, f.bits) for f in encoding.fields]))
    sums = round_.run(lambda i: encoding.encode(updates[i], examples[i]), {"mask": {3}})
    means, weight = encoding.decode(sums, 4, cohort=5)
    counted = [i for i in range(5) if i != 3]
    assert weight == 10 + 50 + 3 + 8
    expected = weighted_mean([updates[i] for i in counted], [10, 50, 3, 8])
    for section, mean, exact in zip(encoding.sections, means, expected, strict=True):
        assert np.linalg.norm(mean - exact) <= section.error_bound(4) * 50 / weight
        assert np.abs(mean - exact).max() < 6 * section.step
