"""A million parameters, a hundred devices, a thousand devices; and what an upload looks like."""

import math

import numpy as np
import pytest
from tests.federated.masking.rounds import PHASES, Round, sum_of, terms, vectors_of

from triplane.unified_ir.federated.masking import EncodedSection, UpdateEncoding
from triplane.unified_ir.federated.masking.integers import IntegerSum

MILLION = 1_000_000
FLOAT32_BYTES = 4 * MILLION


def chi_square_p(counts):
    """P(a chi-square as large as this one, were all counts equally likely), Wilson and Hilferty."""
    expected, freedom = counts.mean(), len(counts) - 1
    statistic = ((counts - expected) ** 2 / expected).sum()
    spread = 2 / (9 * freedom)
    return 0.5 * math.erfc(
        ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(2 * spread)
    )


def correlation(a, b):
    return abs(np.corrcoef(a.astype(np.float64), b.astype(np.float64))[0, 1])


def upload_of(terms_, devices, data):
    total = IntegerSum(terms_.fields, devices)
    total.add_encoded(data)
    return total.values()[0]


@pytest.mark.long
def test_an_upload_says_nothing_about_its_update():
    section = EncodedSection(MILLION, range=0.4)
    encoding = UpdateEncoding((section,), 100, seed=5)
    update = np.random.default_rng(0).normal(0, 0.1, MILLION).astype(np.float32)
    levels = encoding.encode([update], 100)
    round_ = Round(3, terms([(f.entries, f.bits) for f in encoding.fields]))
    round_.advertise()
    round_.share(range(3))
    masked = round_.devices[0].mask(round_.deliveries[0], levels)
    upload = upload_of(round_.terms, 3, masked.data)
    width = encoding.fields[0].width(3)
    assert upload.max() < 2**width
    assert correlation(upload, levels[0]) < 0.01
    assert correlation(upload[:MILLION], update) < 0.01
    for shift in (0, width - 8):
        counts = np.bincount((upload >> np.uint64(shift)).astype(np.int64) % 256, minlength=256)
        assert chi_square_p(counts) > 1e-6
    # The same measures notice what is not masked.
    assert correlation(levels[0] + np.uint64(7), levels[0]) > 0.99
    assert chi_square_p(np.bincount(levels[0], minlength=256)) < 1e-6


@pytest.mark.long
@pytest.mark.parametrize("phase", PHASES)
def test_a_hundred_devices_lose_a_third_in_one_phase(phase):
    section = EncodedSection(MILLION, range=1.0)
    fields = UpdateEncoding((section, EncodedSection(512, 4.0, bits=16)), 1000, seed=0).fields
    round_ = Round(100, terms([(f.entries, f.bits) for f in fields], colluding_share=0.05))
    lost = set(range(0, 99, 3))
    sums = round_.run(lambda i: vectors_of(round_.terms.fields, i), {phase: lost})
    counted = set(range(100)) - lost if phase in {"share", "mask"} else set(range(100))
    for got, expected in zip(sums, sum_of(round_.terms.fields, sorted(counted)), strict=True):
        np.testing.assert_array_equal(got, expected)
    # Keys, shares, vector, signatures and revealed shares of the device that sent most.
    assert max(round_.uploads) <= 0.65 * FLOAT32_BYTES
    assert min(n for i, n in enumerate(round_.uploads) if i not in lost) > 0.45 * FLOAT32_BYTES


@pytest.mark.deep
@pytest.mark.parametrize("phase", PHASES)
def test_a_thousand_devices_lose_a_third_in_one_phase(phase):
    round_ = Round(1000, terms([(10_000, 8), (1, 20)], lost_share=1 / 3, colluding_share=0.05))
    lost = set(range(0, 999, 3))
    sums = round_.run(lambda i: vectors_of(round_.terms.fields, i), {phase: lost})
    counted = set(range(1000)) - lost if phase in {"share", "mask"} else set(range(1000))
    for got, expected in zip(sums, sum_of(round_.terms.fields, sorted(counted)), strict=True):
        np.testing.assert_array_equal(got, expected)
    assert not round_.cloud.session.parameters.complete
