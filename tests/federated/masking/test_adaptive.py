"""The bound that follows masked bits: where it settles, how far one round moves it, and liars."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triplane.unified_ir.federated.core.limits import NORM_FACTOR
from triplane.unified_ir.federated.masking.adaptive import RATE, START, bit_share, next_bound
from triplane.unified_ir.federated.privacy.clipping import MAX_NORM, MIN_NORM
from triplane.unified_ir.federated.privacy.settings import DifferentialPrivacy

STEP = math.exp(RATE / 2)
"""What one round changes the bound by at most."""


def followed(norms_of, rounds, *, start=START, most=MAX_NORM, lie=None, liars=0):
    """The bounds of rounds whose devices have these norms; liars say `lie` instead, +1 or -1."""
    bounds = [start]
    for number in range(rounds):
        norms = norms_of(number)
        bits = [1 if x <= bit_share(None) * bounds[-1] else -1 for x in norms]
        bits[:liars] = [lie] * liars
        bounds.append(
            next_bound(bounds[-1], sum(bits), len(bits), devices=len(bits), privacy=None, most=most)
        )
    return np.array(bounds)


def drawn(median, devices=10, spread=0.3):
    rng = np.random.default_rng(3)
    return lambda _: median * np.exp(spread * rng.normal(size=devices))


@pytest.mark.parametrize("median", [0.01, 0.3, 1.0, 20.0, 500.0])
@pytest.mark.parametrize("devices", [3, 10, 100])
def test_the_bound_comes_to_twice_the_median_and_stays_there(median, devices):
    needed = math.ceil(abs(math.log(START / (NORM_FACTOR * median))) / (RATE / 2)) + 3
    bounds = followed(drawn(median, devices), needed + 60)
    settled = bounds[needed:] / (NORM_FACTOR * median)
    assert np.all((settled > 0.4) & (settled < 2.5))
    assert np.exp(np.mean(np.log(settled))) == pytest.approx(1, rel=0.15)


def test_the_published_rule_by_hand():
    """C exp(-rate (b - 0.5)) with b = 7 / 10: +1 of seven, -1 of three."""
    bound = next_bound(2.0, 7 - 3, 10, devices=12, privacy=None, most=MAX_NORM)
    assert bound == pytest.approx(2.0 * math.exp(-RATE * 0.2))
    private = DifferentialPrivacy(
        epsilon=8.0, multiplier=1.0, placement="distributed", quantile=0.25
    )
    # With noise a missing device counts as 0, and the rate is that of central noise.
    bound = next_bound(2.0, 7 - 3, 10, devices=12, privacy=private, most=MAX_NORM)
    assert bound == pytest.approx(2.0 * math.exp(-0.2 * ((4 / 12 + 1) / 2 - 0.25)))
    assert bit_share(private) == 1
    assert bit_share(None) == 1 / NORM_FACTOR


@given(
    st.integers(-(10**6), 10**6), st.integers(1, 1000), st.floats(MIN_NORM, MAX_NORM),
    st.floats(0, 1e6),
)  # fmt: skip
def test_no_sum_moves_the_bound_by_more_than_one_step_or_above_the_largest(bits, n, bound, most):
    """Also forged ones: a liar's masked integer may be any."""
    after = next_bound(bound, bits, n, devices=n, privacy=None, most=most)
    assert bound / STEP * (1 - 1e-12) <= after <= bound * STEP * (1 + 1e-12) or after == MIN_NORM
    assert after <= max(bound, most)
    assert MIN_NORM <= after <= MAX_NORM


@pytest.mark.parametrize(("lie", "quantile"), [(-1, 0.5 / 0.8), (1, 0.3 / 0.8)])
def test_a_fifth_that_lies_about_its_bit_moves_the_bound_to_another_quantile_of_the_others(
    lie, quantile
):
    """The others then settle where 0.8 b + 0.2 lie' = 0.5, with b their share of short updates."""
    bounds = followed(drawn(1.0, 50), 200, lie=lie, liars=10)[40:]
    honest = np.quantile(drawn(1.0, 10**5)(0), quantile)
    assert np.exp(np.mean(np.log(bounds))) == pytest.approx(NORM_FACTOR * honest, rel=0.03)
    assert np.all((bounds > 0.6 * NORM_FACTOR) & (bounds < 1.6 * NORM_FACTOR))


def test_liars_that_raise_the_bound_for_ever_reach_the_norm_of_what_is_learned():
    bounds = followed(drawn(0.1), 50, start=1.0, most=6.0, lie=-1, liars=10)
    assert bounds.max() == bounds[-1] == 6.0
