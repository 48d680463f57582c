"""Masked scores: their mean is the weighted mean, and sums that no devices have are refused."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.core.metric import ACCURACY, LOSS
from triplane.unified_ir.federated.masking.scores import MOST_LOSS, ScoreEncoding, score_base

METRICS = st.sampled_from([ACCURACY, LOSS])


def summed(encoding, devices):
    parts = [encoding.encode(scores, samples) for scores, samples in devices]
    return [np.sum(column, axis=0, dtype=np.uint64) for column in zip(*parts, strict=True)]


@given(st.data(), METRICS, st.integers(1, 1 << 20), st.integers(1, 12))
def test_the_mean_of_a_sum_is_the_mean_over_samples_but_for_the_rounding(data, metric, cap, n):
    encoding = ScoreEncoding(metric, cap)
    low, high = encoding.range
    score = st.floats(low, high)
    devices = data.draw(
        st.lists(
            st.tuples(st.tuples(score, score), st.integers(1, 1 << 21)), min_size=n, max_size=n
        )
    )
    (means,), weight = encoding.decode(summed(encoding, devices), n, cohort=n)
    weights = [min(samples, cap) for _, samples in devices]
    assert weight == sum(weights)
    step = (high - low) / (1 << (24 if metric is ACCURACY else 44))
    for at in (0, 1):
        exact = sum(
            Fraction(scores[at]) * w for (scores, _), w in zip(devices, weights, strict=True)
        ) / Fraction(weight)
        assert abs(means[at] - float(exact)) <= n * step * cap / weight


@pytest.mark.parametrize("metric", [ACCURACY, LOSS])
def test_a_sum_over_a_thousand_devices_fits_a_masked_field(metric):
    encoding = ScoreEncoding(metric, 1 << 32)
    assert all(field.width(1000) <= 56 for field in encoding.fields)
    largest = encoding.encode((encoding.range[1],) * 2, 1 << 32)
    for field, vector in zip(encoding.fields, largest, strict=True):
        assert int(vector.max()) < 1 << field.bits


@pytest.mark.parametrize(
    ("metric", "scores", "samples"),
    [
        (ACCURACY, (0.5, 1.01), 3),
        (ACCURACY, (-0.1, 0.5), 3),
        (LOSS, (0.5, math.nan), 3),
        (LOSS, (2 * MOST_LOSS, 0.0), 3),
        (LOSS, (0.5, 0.5), 0),
    ],
)
def test_a_score_outside_of_the_range_is_refused(metric, scores, samples):
    with pytest.raises(InvalidInput, match="a score that is masked is"):
        ScoreEncoding(metric, 8).encode(scores, samples)


@pytest.mark.parametrize(
    "change",
    [
        lambda levels, weights: (levels, weights * 0 + 1),  # fewer samples than devices
        lambda levels, weights: (levels, weights + 100),  # more than the cap allows
        lambda levels, weights: (levels + np.uint64(1 << 26), weights),  # above every accuracy
    ],
)
def test_a_sum_that_no_devices_have_is_refused(change):
    encoding = ScoreEncoding(ACCURACY, 8)
    sums = summed(encoding, [((0.5, 1.0), 8), ((1.0, 1.0), 6), ((0.0, 0.25), 4)])
    with pytest.raises(InvalidInput, match="a device lied"):
        encoding.decode(change(*sums), 3, cohort=3)


@pytest.mark.parametrize("cap", [0, (1 << 32) + 1])
def test_a_cap_out_of_range_is_refused(cap):
    with pytest.raises(InvalidInput, match="the cap on held-out samples"):
        ScoreEncoding(LOSS, cap)


def test_the_base_of_scores_differs_from_the_state_and_between_states():
    states = [bytes(32), bytes([1]) * 32]
    assert len({*states, *map(score_base, states)}) == 4
