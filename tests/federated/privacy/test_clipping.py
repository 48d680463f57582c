"""Clipping: norms, the rule of the adaptive norm, and what its bits cost."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.privacy.accountant import NoiseEvent, spending
from triplane.unified_ir.federated.privacy.clipping import CHUNK, AdaptiveNorm, clip, l2_norm

floats = st.floats(-(2.0**100), 2.0**100, width=32)


@pytest.mark.slow
@given(
    arrays(np.float32, st.integers(1, 40), elements=floats),
    arrays(np.float64, (2, 3), elements=st.floats(-1e100, 1e100)),
    st.floats(1e-6, 1e6),
)
def test_a_clipped_update_is_within_the_norm_and_keeps_its_direction(a, b, norm):
    update: dict[str, np.ndarray] = {"a": a.copy(), "b": b.copy()}
    unclipped = clip(update, norm)
    assert l2_norm(update) <= norm
    assert unclipped == (l2_norm({"a": a, "b": b}) <= norm)
    if unclipped:
        assert (update["a"] == a).all()
    else:
        assert l2_norm(update) >= norm * (1 - 1e-5)
        factor = norm / l2_norm({"a": a, "b": b})
        np.testing.assert_allclose(update["b"], b * factor, rtol=1e-5, atol=1e-300)


def test_the_norm_is_summed_in_float64_over_all_tensors():
    n = 3 * CHUNK + 5
    w, b = np.full(n, 0.1, np.float32), np.full(4, 3.0, np.float64)
    expected = math.sqrt(n * float(np.float32(0.1)) ** 2 + 36)
    assert l2_norm({"w": w, "b": b}) == pytest.approx(expected, rel=1e-14)


def test_half_precision_does_not_end_above_the_norm():
    update = {"w": np.random.default_rng(3).normal(size=1000).astype(np.float16)}
    assert not clip(update, 1.0)
    assert 0.99 < l2_norm(update) <= 1


@pytest.mark.parametrize(
    ("x", "norm"), [(np.full(4, 60_000, np.float16), 1e-3), (np.full(64, 3e38, np.float32), 1e-6)]
)
def test_a_factor_below_the_range_of_the_type_does_not_erase_an_update(x, norm):
    update = {"w": x}
    assert not clip(update, norm)
    assert 0.99 * norm < l2_norm(update) <= norm


def test_an_update_above_the_norm_by_less_than_its_resolution_ends_below_it():
    update = {"w": np.ones(4, np.float16)}
    assert not clip(update, 2 * (1 - 1e-9))
    assert 1.99 < l2_norm(update) < 2


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused_by_name_and_left_alone(bad):
    update = {"a": np.ones(3), "w": np.array([1.0, bad])}
    with pytest.raises(InvalidInput, match="'w' has NaN"):
        clip(update, 1.0)
    assert (update["a"] == 1).all()


def test_squares_that_overflow_and_integers_are_refused():
    with pytest.raises(InvalidInput, match="squares overflow"):
        clip({"w": np.array([1e200])}, 1.0)
    with pytest.raises(InvalidInput, match="squares overflow"):
        clip({"w": np.full(3 * CHUNK, 5e151)}, 1.0)
    with pytest.raises(InvalidInput, match="all tensors together"):
        clip({"a": np.array([1e154]), "b": np.array([1e154])}, 1.0)
    with pytest.raises(InvalidInput, match="'n' has int64"):
        clip({"n": np.array([1])}, 1.0)


@pytest.mark.parametrize("norm", [0.0, -1.0, math.nan, math.inf, 1e7])
def test_impossible_norms_are_refused(norm):
    with pytest.raises(InvalidInput, match="a clipping norm is"):
        clip({"w": np.ones(2)}, norm)


def test_the_next_norm_is_that_of_the_paper():
    rule = AdaptiveNorm(2.0, bit_noise=5.0, quantile=0.5, rate=0.2)
    # 70 of 100 devices below the norm: b = 0.7, so the norm falls by exp(-0.2 * 0.2).
    assert rule.next(70 - 30, 100).norm == pytest.approx(2.0 * math.exp(-0.2 * (0.7 - 0.5)))
    assert rule.next(0, 100).norm == 2.0


def test_the_norm_converges_to_the_quantile():
    rng = np.random.default_rng(5)
    rule = AdaptiveNorm(0.01, bit_noise=5.0, quantile=0.5, rate=0.2)
    for _ in range(200):
        below = rng.lognormal(mean=1.0, sigma=0.5, size=100) <= rule.norm
        noise = rng.normal(0, 2 * rule.bit_noise)
        rule = rule.next(float(np.where(below, 1, -1).sum() + noise), 100)
    assert rule.norm == pytest.approx(math.e, rel=0.2)


def test_extreme_noise_moves_the_norm_no_further_than_unanimous_devices():
    rule = AdaptiveNorm(1.0, bit_noise=5.0)
    assert rule.next(1e300, 10) == rule.next(10, 10)
    assert rule.next(-1e300, 10) == rule.next(-10, 10)
    for _ in range(1000):
        rule = rule.next(-10, 10)
    assert rule.norm == 1e6


@pytest.mark.parametrize(("z", "sigma_b"), [(1.0, 0.6), (1.0, 5.0), (8.0, 5.0)])
def test_updates_and_bits_together_cost_the_target(z, sigma_b):
    """Theorem 1 of the paper; both sums are Gaussian mechanisms on the same devices."""
    multiplier = AdaptiveNorm(1.0, bit_noise=sigma_b).update_multiplier(z)
    assert multiplier > z
    apart = spending([NoiseEvent(multiplier, 7), NoiseEvent(2 * sigma_b, 7)]).epsilon(1e-5)
    assert apart == pytest.approx(spending([NoiseEvent(z, 7)]).epsilon(1e-5), rel=1e-9)


@pytest.mark.parametrize("sigma_b", [0.0, 0.4, 0.5])
def test_bits_that_cost_as_much_as_the_target_are_refused(sigma_b):
    with pytest.raises(InvalidInput, match="above half the noise multiplier, got"):
        AdaptiveNorm(1.0, bit_noise=sigma_b).update_multiplier(1.0)


@pytest.mark.parametrize("target", [1e-200, 1e-4, 2.0 * (1 - 2**-53), 3e6])
def test_targets_without_an_accountable_multiplier_are_refused(target):
    """The last bit of room for the bits would take noise of updates beyond the accountant."""
    sigma_b = 1e7 if target > 2 else 1.0
    with pytest.raises(InvalidInput, match=r"a noise multiplier is 0\.001 to 1e\+06"):
        AdaptiveNorm(1.0, bit_noise=sigma_b).update_multiplier(target)


@pytest.mark.parametrize("change", [{"quantile": 0}, {"rate": 0}, {"bit_noise": -1}, {"norm": 0}])
def test_impossible_settings_are_refused(change):
    with pytest.raises(InvalidInput):
        AdaptiveNorm(**{"norm": 1.0, "bit_noise": 1.0} | change)


def test_a_share_of_no_devices_is_refused():
    with pytest.raises(InvalidInput, match="over at least one device"):
        AdaptiveNorm(1.0, bit_noise=1.0).next(1, 0)
