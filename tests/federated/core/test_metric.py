"""The metrics of devices: which value is better, which one is possible, and how it is shown."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.federated.core.metric import ACCURACY, LOSS, metric_named, metric_of


def test_a_model_with_an_accuracy_is_scored_by_it_and_every_other_by_its_loss():
    assert metric_of(("loss", "accuracy")) is ACCURACY
    assert metric_of(("loss", "mae")) is LOSS


def test_a_higher_accuracy_and_a_lower_loss_are_gains():
    assert ACCURACY.gain(0.75, 0.5) == LOSS.gain(0.5, 0.75) == 0.25
    assert sorted([0.2, 0.3, 0.1], key=LOSS.merit) == [0.3, 0.2, 0.1]
    assert sorted([0.2, 0.3, 0.1], key=ACCURACY.merit) == [0.1, 0.2, 0.3]


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan, math.inf])
def test_an_accuracy_outside_0_to_1_is_impossible(value):
    assert not ACCURACY.admits(value)
    assert LOSS.admits(value) is math.isfinite(value)


@given(st.integers(0, 500), st.integers(1, 500))
def test_an_accuracy_leaves_a_device_in_whole_samples(right, samples):
    right = min(right, samples)
    share = float(np.float32(right) / np.float32(samples))
    assert ACCURACY.reported(share, samples) == right / samples
    assert ACCURACY.reported(0.7310585786300049, 2) == 0.5


@given(st.floats(-(2.0**127), 2.0**127))
def test_a_loss_leaves_a_device_with_twelve_bits(loss):
    told = LOSS.reported(loss, 5)
    assert told == pytest.approx(loss, rel=2.0**-12, abs=5e-324)
    mantissa, _ = math.frexp(told)
    assert (mantissa * 2**12).is_integer() or abs(told) < 1e-300


@pytest.mark.parametrize(
    ("metric", "value"),
    [(ACCURACY, 1.5), (ACCURACY, math.nan), (LOSS, math.inf), (LOSS, math.nan), (LOSS, 1e300)],
)
def test_a_score_out_of_range_does_not_leave_a_device(metric, value):
    with pytest.raises(InvalidInput, match=f"the {metric.name} of a device is"):
        metric.reported(value, 5)


def test_values_are_shown_in_percent_or_as_numbers():
    assert (ACCURACY.text(0.931), ACCURACY.text_with_unit(0.931)) == ("93.1", "93.1%")
    assert (LOSS.text(0.00012346), LOSS.text_with_unit(12.3456)) == ("0.0001235", "12.35")
    assert ACCURACY.gain_text(0.0125, 0.004) == "+1.25 ± 0.40"
    assert LOSS.gain_text(-0.0125, 0.004) == "-0.0125 ± 0.004"
    assert ACCURACY.gain_text(0.0125, math.inf) == "+1.25"


def test_a_run_without_the_name_of_a_metric_is_one_of_accuracy():
    assert metric_named("") is ACCURACY
    assert metric_named("loss") is LOSS
    with pytest.raises(InvalidInput, match="no metric 'mae'; there are accuracy, loss"):
        metric_named("mae")
