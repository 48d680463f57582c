"""Ready times that are measured for a few gradients, and stretched in between."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triplane.unified_ir.passes.sharding.ready_times import MEASURED, MeasuredTimes, to_measure

seconds = st.floats(0, 10, allow_nan=False)


def test_a_few_gradients_are_measured_evenly_spread_in_time():
    assert to_measure([float(k) for k in range(101)]) == (0, 25, 50, 75, 100)
    # The last of those that are ready together.
    assert to_measure([1.0, 1.0, 1.0, 2.0, 2.0]) == (2, 4)
    assert to_measure([0.0] * 3) == (2,)
    assert to_measure([0.5]) == (0,)


def test_times_between_measured_ones_are_stretched():
    predicted = [1.0, 2.0, 3.0, 4.0, 5.0]
    measured = MeasuredTimes((0, 2, 4), (10.0, 11.0, 31.0), runs=5)
    assert measured.ready_s(predicted) == [10.0, 10.5, 11.0, 21.0, 31.0]


def test_a_shorter_time_of_more_work_counts_as_equal():
    measured = MeasuredTimes((0, 1, 2, 3), (3.0, 2.0, 4.0, 1.0), runs=1)
    assert measured.ready_s([0.0, 1.0, 2.0, 3.0]) == [3.0, 3.0, 4.0, 4.0]


@given(st.lists(seconds, min_size=1, max_size=30).map(sorted), st.data())
def test_stretched_times_rise_and_meet_what_was_measured(predicted, data):
    numbers = to_measure(predicted)
    assert len(numbers) <= MEASURED
    known = sorted(data.draw(st.lists(seconds, min_size=len(numbers), max_size=len(numbers))))
    ready = MeasuredTimes(numbers, tuple(known), runs=3).ready_s(predicted)
    assert [ready[k] for k in numbers] == pytest.approx(known)
    assert (np.diff(ready) >= -1e-9).all()
    assert known[0] - 1e-9 <= ready[0]
    assert ready[-1] <= known[-1] + 1e-9
