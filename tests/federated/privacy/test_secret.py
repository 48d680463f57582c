"""The discrete Gaussian: its law against exact probabilities, also where float64 cannot decide."""

import math
from fractions import Fraction

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.privacy import secret

scipy_stats = pytest.importorskip("scipy.stats")


def probabilities(variance, widest):
    x = np.arange(-widest, widest + 1)
    p = np.exp(-(x**2) / (2 * variance))
    return x, p / p.sum()


def p_value(samples, variance):
    """Chi-square of the samples against the exact law; cells below 10 expected are joined."""
    x, p = probabilities(variance, int(12 * math.sqrt(variance)) + 2)
    observed = np.bincount(samples - x[0], minlength=len(x)).astype(float)
    expected = p * len(samples)
    common = expected >= 10
    tails = [observed[~common].sum(), expected[~common].sum()]
    cells = np.append(observed[common], tails[0]), np.append(expected[common], tails[1])
    keep = cells[1] > 0
    statistic = ((cells[0] - cells[1])[keep] ** 2 / cells[1][keep]).sum()
    return scipy_stats.chi2.sf(statistic, keep.sum() - 1)


@pytest.mark.parametrize("variance", [1, 2, 7, 100, 3000])
def test_samples_have_the_exact_law(variance):
    assert p_value(secret.discrete_gaussian(60_000, variance), variance) > 1e-6


def test_a_wrong_law_would_be_noticed():
    rounded = np.rint(np.random.default_rng(1).normal(0, 1, 60_000)).astype(np.int64)
    assert p_value(rounded, 1) < 1e-6


def test_coins_that_float64_cannot_decide_have_the_exact_law(monkeypatch):
    monkeypatch.setattr(secret, "MARGIN", 1.0)
    decided = []
    decide = secret._decide
    monkeypatch.setattr(secret, "_decide", lambda *a: decided.append(a) or decide(*a))
    samples = secret.discrete_gaussian(2_000, 3)
    assert len(decided) > 2_000
    assert p_value(samples, 3) > 1e-6


@pytest.mark.parametrize("r", [Fraction(0), Fraction(1, 3), Fraction(1), Fraction(7, 2)])
def test_a_decision_in_decimal_arithmetic_compares_with_exp(r):
    edge = int(math.exp(-r) * 2**53)
    assert secret._decide(edge - 10, r)
    assert not secret._decide(edge + 10, r) or r == 0


def test_an_underflowing_probability_is_not_taken_for_certainty(monkeypatch):
    monkeypatch.setattr(secret, "_words", lambda n: np.zeros(n, np.uint64))
    r = np.array([75.0, 900.0])
    exact = lambda i: Fraction(int(r[i]))
    # U begins with 60 zeros and a one, or with zeros as far as it is read.
    monkeypatch.setattr(secret.os, "urandom", lambda n: b"\x01" * n)
    assert secret._coins(r, exact).tolist() == [False, False]
    monkeypatch.setattr(secret.os, "urandom", bytes)
    assert secret._coins(r, exact).tolist() == [True, True]


def test_large_samples_have_moments_of_a_gaussian():
    samples = secret.discrete_gaussian(200_000, 2**52) / 2.0**26
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


@pytest.mark.parametrize("case", [(5, 0), (5, 2**52 + 1), (-1, 5)])
def test_values_out_of_range_are_refused(case):
    with pytest.raises(InvalidInput, match="variance of 1 to 2\\^52"):
        secret.discrete_gaussian(*case)
