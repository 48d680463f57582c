"""Noise of devices: the published bound against divergences computed directly, and headroom."""

import math

import numpy as np
import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.privacy import secret
from triplane.unified_ir.federated.privacy.distributed import (
    DistributedNoise,
    distributed_noise,
    rounded_norm,
)


def law_of_sum(variance, honest):
    """Probabilities of the sum of noises, on -w to w."""
    # As wide as float64 allows, because divergences weigh the tails.
    w = int(36 * math.sqrt(variance))
    x = np.arange(-w, w + 1)
    one = np.exp(-(x**2) / (2 * variance))
    one /= one.sum()
    p = one
    for _ in range(honest - 1):
        p = np.convolve(p, one)
    return p


def divergence(p, shift, order):
    """D_order(P || P shifted), and in the other direction: the law is symmetric."""
    a, b = p[shift:], p[: len(p) - shift]
    keep = (a > 1e-280) & (b > 1e-280)
    terms = order * np.log(a[keep]) + (1 - order) * np.log(b[keep])
    return float(np.logaddexp.reduce(terms) / (order - 1))


@pytest.mark.parametrize("variance", [1, 2, 4])
@pytest.mark.parametrize("honest", [1, 2, 3, 5])
@pytest.mark.parametrize("shifts", [(1,), (2,), (5,), (1, 3)])
def test_the_bound_covers_the_divergence_of_the_sum(variance, honest, shifts):
    noise = DistributedNoise(variance, honest, math.hypot(*shifts), len(shifts))
    p = law_of_sum(variance, honest)
    for order in (1.25, 2, 4):
        exact = sum(divergence(p, shift, order) for shift in shifts)
        bound = order / (2 * noise.noise_multiplier**2)
        assert exact <= bound * (1 + 1e-9)
        # Not a loose bound either, where the noise is not tiny.
        assert variance < 2 or exact > 0.9 * bound


def test_without_the_deviation_of_sums_the_bound_would_be_wrong():
    """A sum of two is no discrete Gaussian: at variance 0.25 the plain formula is too low."""
    p = law_of_sum(0.25, 2)
    assert max(divergence(p, 1, order) * 2 * 0.5 / order for order in (1.25, 2, 4)) > 1


def test_a_single_discrete_gaussian_has_the_divergence_of_a_gaussian():
    p = law_of_sum(3, 1)
    for shift in (1, 2, 4):
        assert divergence(p, shift, 3) == pytest.approx(3 * shift**2 / (2 * 3), rel=1e-9)


@pytest.mark.parametrize("honest", [2, 10, 1000])
def test_noise_is_the_least_for_the_fewest_honest_devices(honest):
    noise = distributed_noise(2.0, norm=5000.0, entries=1_000_000, honest=honest)
    assert noise.noise_multiplier >= 2.0
    assert noise.variance == pytest.approx((2.0 * 5000) ** 2 / honest, rel=2e-3)
    lower = DistributedNoise(noise.variance - noise.variance // 500, honest, 5000.0, 1_000_000)
    assert lower.noise_multiplier < 2.0


def test_small_noise_over_many_entries_is_raised_until_the_sum_is_near_a_gaussian():
    noise = distributed_noise(1.0, norm=10.0, entries=10**9, honest=1000)
    # By the variance of the sum alone, 1 would do: 10^2 / 1000.
    assert DistributedNoise(1, 1000, 10.0, 10**9).noise_multiplier < 1.0 <= noise.noise_multiplier
    assert noise.variance == 2


def test_more_survivors_cost_no_more():
    """Noise of a further device is independent: it is post-processing of the sum."""
    few, many = law_of_sum(2, 2), law_of_sum(2, 4)
    assert divergence(many, 2, 4) < divergence(few, 2, 4)


def test_drawn_noise_has_the_stated_variance():
    noise = DistributedNoise(900, 10, 1.0, 50_000)
    samples = noise.draw()
    assert samples.shape == (50_000,)
    assert samples.var() == pytest.approx(900, rel=6 * math.sqrt(2 / 50_000))


def test_rounding_meets_its_bound_as_often_as_stated():
    rng = np.random.default_rng(7)
    n, norm, beta = 4096, 80.0, 0.3
    bound = rounded_norm(norm, n, beta=beta)
    assert norm < bound < rounded_norm(norm, n, beta=0) == norm + math.sqrt(n)
    x = rng.normal(size=n)
    x *= norm / np.linalg.norm(x)
    norms = [np.linalg.norm(np.floor(x + rng.random(n))) for _ in range(400)]
    assert np.mean(np.array(norms) <= bound) >= 1 - beta


@pytest.mark.parametrize(
    ("devices", "largest", "failure"),
    [(0, 1, 1e-9), (2**63, 1, 1e-9), (1, 2**63, 1e-9), (1, -1, 1e-9), (1, 1, 0.0), (1, 1, 1.0)],
)
def test_sums_of_impossible_size_are_refused(devices, largest, failure):
    with pytest.raises(InvalidInput, match="a sum has 1 to"):
        DistributedNoise(4, 2, 1.0, 3).sum_bits(devices, largest, failure=failure)


def test_the_least_probability_of_failure_is_counted_in_logarithms():
    assert DistributedNoise(4, 2, 1.0, 3).sum_bits(1, 0, failure=5e-324) == 8


@pytest.mark.parametrize("case", [(1e200, 1), (math.nan, 1), (0.0, 1), (1.0, 0), (1.0, 10**400)])
def test_norms_that_cannot_be_rounded_are_refused(case):
    with pytest.raises(InvalidInput, match="a rounded norm needs"):
        rounded_norm(*case)


def test_a_sum_fits_its_modulus_with_the_stated_probability():
    noise = DistributedNoise(100, 2, 50.0, 1000)
    bits = noise.sum_bits(10, 127, failure=1e-3)
    reach = 2 ** (bits - 1)
    tail = 1000 * 2 * math.exp(-((reach - 10 * 127) ** 2) / (2 * 10 * 100))
    assert tail <= 1e-3
    half = reach / 2
    assert half < 10 * 127 or 1000 * 2 * math.exp(-((half - 10 * 127) ** 2) / 2000) > 1e-3
    # The tail of the exact law of the sum is below the bound that sizes it.
    p = law_of_sum(100, 10)
    x = np.arange(len(p)) - len(p) // 2
    assert p[np.abs(x) > 200].sum() <= 2 * math.exp(-(200**2) / 2000)


def test_headroom_grows_with_devices_and_noise():
    bits = [DistributedNoise(v, 2, 50.0, 10**6).sum_bits(100, 127) for v in (1, 10**6)]
    assert bits == [15, 18]
    # 140 sqrt(2 ln(2 entries / 1e-9)) is 916 and 1175.
    tails = [DistributedNoise(140**2, 2, 50.0, n).sum_bits(1, 0) for n in (1, 10**6)]
    assert tails == [11, 12]


@pytest.mark.parametrize(
    "change",
    [
        {"variance": 0},
        {"variance": 2**53},
        {"honest": 0},
        {"honest": 10**9},
        {"norm": 0.0},
        {"norm": 1e300},
        {"norm": math.nan},
        {"entries": 0},
        {"entries": 10**400},
    ],
)
def test_impossible_noise_is_refused(change):
    with pytest.raises(InvalidInput):
        DistributedNoise(**{"variance": 4, "honest": 2, "norm": 1.0, "entries": 3} | change)


def test_noise_beyond_the_sampler_and_sums_beyond_integers_are_refused():
    with pytest.raises(InvalidInput, match=r"got .*make the steps"):
        distributed_noise(100.0, norm=1e9, entries=10, honest=1)
    with pytest.raises(InvalidInput, match="at most 62 bits, this noise needs 63"):
        DistributedNoise(secret.MAX_VARIANCE, 1, 1.0, 1).sum_bits(2**30, 2**31)
