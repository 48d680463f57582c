"""Integer noise: its laws against exact probabilities, also where float64 cannot decide."""

import decimal
import math
import os
from fractions import Fraction

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.privacy import secret

scipy_stats = pytest.importorskip("scipy.stats")


def discrete(x, variance):
    p = np.exp(-(x**2) / (2 * variance))
    return p / p.sum()


def rounded(x, variance):
    # Differences of the tails, where those of the distribution would cancel.
    upper = scipy_stats.norm.sf((np.abs(x) - 0.5) / math.sqrt(variance))
    return upper - scipy_stats.norm.sf((np.abs(x) + 0.5) / math.sqrt(variance))


def p_value(samples, law, variance):
    """Chi-square of the samples against the exact law; cells below 10 expected are joined."""
    widest = int(12 * math.sqrt(variance)) + 2
    x = np.arange(-widest, widest + 1)
    observed = np.bincount(samples + widest, minlength=len(x)).astype(float)
    expected = law(x, variance) * len(samples)
    common = expected >= 10
    observed = np.append(observed[common], observed[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    statistic = ((observed - expected) ** 2 / expected).sum()
    return scipy_stats.chi2.sf(statistic, len(expected) - 1)


@pytest.mark.parametrize("variance", [1, 2, 7, 100, 3000])
def test_discrete_samples_have_the_exact_law(variance):
    samples = secret.discrete_gaussian(60_000, variance)
    assert p_value(samples, discrete, variance) > 1e-6


@pytest.mark.parametrize("std", [1.0, 1.5, 7.3, 60.0])
def test_rounded_samples_have_the_exact_law(std):
    samples = secret.rounded_gaussian(60_000, std)
    assert p_value(samples, rounded, std**2) > 1e-6


def test_a_wrong_law_would_be_noticed():
    assert p_value(secret.rounded_gaussian(60_000, 1.0), discrete, 1) < 1e-6
    assert p_value(secret.discrete_gaussian(60_000, 1), rounded, 1) < 1e-6


def test_samples_that_float64_cannot_round_have_the_exact_law(monkeypatch):
    monkeypatch.setattr(secret, "ROUND_OFF", 10.0)
    calls = []
    exact = secret._round

    def counting(k, j, std):
        calls.append(k)
        return exact(k, j, std)

    monkeypatch.setattr(secret, "_round", counting)
    samples = secret.rounded_gaussian(1_000, 1.5)
    assert len(calls) > 950
    assert p_value(samples, rounded, 2.25) > 1e-6


def test_exact_rounding_agrees_with_float64_where_that_decides():
    k, j = secret._bits(300, 52), secret._bits(300, 52)
    u, v = (k + 0.5) * 2.0**-52, (j + 0.5) * 2.0**-52
    x = 1000 * np.sqrt(-2 * np.log(u)) * np.cos(2 * np.pi * v)
    clear = np.abs(x - np.floor(x) - 0.5) > 1e-9
    exact = [secret._round(int(a), int(b), 1000.0) for a, b in zip(k, j, strict=True)]
    assert (np.array(exact)[clear] == np.rint(x)[clear]).all()
    assert clear.sum() > 290


@pytest.mark.parametrize("size", [3, 6, 10, 20])
def test_the_interval_of_a_sample_holds_all_that_its_bits_allow(size):
    rng = np.random.default_rng(size)
    for _ in range(60):
        k, j = int(rng.integers(1, 2**size)), int(rng.integers(0, 2**size))
        low, high = secret._interval(k, j, size, 5.0)
        u = (k + np.append(rng.random(50), [0.0, 1 - 1e-12])) / 2**size
        v = (j + np.append(rng.random(50), [1 - 1e-12, 0.0])) / 2**size
        x = 5.0 * np.sqrt(-2 * np.log(u)) * np.cos(2 * np.pi * v)
        assert float(low) <= x.min()
        assert x.max() <= float(high)


def test_the_lowest_uniform_number_is_never_decided_by_its_first_bits(monkeypatch):
    j = int(math.acos(8 / math.sqrt(106 * math.log(2))) / (2 * math.pi) * 2**52)
    bits = iter([np.zeros(1, np.int64), np.array([j])])
    monkeypatch.setattr(secret, "_bits", lambda _n, _size: next(bits))
    monkeypatch.setattr(secret, "_round", lambda _k, _j, _std: 77)
    assert secret.rounded_gaussian(1, 1.0).tolist() == [77]


def test_a_uniform_number_of_zeros_is_read_further(monkeypatch):
    more = iter([0, 1 << 63, 1 << 62, 1 << 62])
    monkeypatch.setattr(secret, "_more", lambda: next(more, 1 << 62))
    # U is about 2^-117 after two readings: the radius is near 12.7.
    assert 12 < abs(secret._round(0, 0, 1.0)) < 14


def test_coins_that_float64_cannot_decide_have_the_exact_law(monkeypatch):
    monkeypatch.setattr(secret, "MARGIN", 1.0)
    decided = []
    decide = secret._decide

    def counting(k, r):
        decided.append(k)
        return decide(k, r)

    monkeypatch.setattr(secret, "_decide", counting)
    samples = secret.discrete_gaussian(1_000, 3)
    assert len(decided) > 1_000
    assert p_value(samples, discrete, 3) > 1e-6


@pytest.mark.parametrize("r", [Fraction(0), Fraction(1, 3), Fraction(1), Fraction(7, 2)])
def test_a_decision_in_decimal_arithmetic_compares_with_exp(r):
    edge = int(math.exp(-r) * 2**53)
    assert secret._decide(edge - 10, r)
    assert not secret._decide(edge + 10, r) or r == 0


def test_a_decision_waits_for_the_bits_that_differ(monkeypatch):
    r = Fraction(1, 3)
    with decimal.localcontext(prec=80):
        p = (-decimal.Decimal(1) / 3).exp()
        first, both = int(p * 2**53), int(p * 2**117)
    for last, below in ((0, True), (2**64 - 1, False)):
        more = iter([both - (first << 64), last])
        monkeypatch.setattr(secret, "_more", more.__next__)
        assert secret._decide(first, r) is below
        assert next(more, None) is None


def test_an_underflowing_probability_is_not_taken_for_certainty(monkeypatch):
    monkeypatch.setattr(secret, "_bits", lambda n, _size: np.zeros(n, np.int64))
    r = np.array([75.0, 900.0])
    exact = lambda i: Fraction(int(r[i]))
    # U begins with 60 zeros and a one, or with zeros as far as it is read.
    monkeypatch.setattr(os, "urandom", lambda n: b"\x01" * n)
    assert secret._coins(r, exact).tolist() == [False, False]
    monkeypatch.setattr(os, "urandom", bytes)
    assert secret._coins(r, exact).tolist() == [True, True]


@pytest.mark.parametrize(
    ("sampler", "size"), [(secret.discrete_gaussian, 2**52), (secret.rounded_gaussian, 2.0**26)]
)
def test_large_samples_have_the_law_of_a_gaussian(sampler, size):
    samples = sampler(200_000, size) / 2.0**26
    n = len(samples)
    assert abs(samples.mean()) < 6 / math.sqrt(n)
    assert abs(samples.var() - 1) < 6 * math.sqrt(2 / n)
    assert scipy_stats.kstest(samples, "norm").pvalue > 1e-6


@pytest.mark.long
def test_a_million_samples_are_independent_of_their_neighbours():
    samples = secret.discrete_gaussian(1_000_000, 10_000) / 100.0
    assert abs(np.corrcoef(samples[1:], samples[:-1])[0, 1]) < 6e-3
    assert abs(samples.var() - 1) < 6 * math.sqrt(2 / 1e6)


def test_each_call_draws_from_the_operating_system():
    assert (secret.discrete_gaussian(100, 10**6) != secret.discrete_gaussian(100, 10**6)).any()


def test_no_entries_are_no_samples():
    assert secret.discrete_gaussian(0, 5).shape == (0,)
    assert secret.rounded_gaussian(0, 5.0).shape == (0,)


@pytest.mark.parametrize("case", [(5, 0), (5, 2**52 + 1), (-1, 5)])
def test_values_out_of_range_are_refused(case):
    with pytest.raises(InvalidInput, match="variance of 1 to 2\\^52"):
        secret.discrete_gaussian(*case)


@pytest.mark.parametrize("case", [(5, 0.5), (5, math.nan), (5, 2.0**31), (-1, 5.0)])
def test_deviations_out_of_range_are_refused(case):
    with pytest.raises(InvalidInput, match=r"deviation of 1 to 2\^30"):
        secret.rounded_gaussian(*case)
