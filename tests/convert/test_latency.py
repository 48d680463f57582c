"""Verdicts on time, and the measuring of it."""

import numpy as np
import pytest
from tests.convert.latencies import latency
from tests.quantize import nets

from triplane.unified_ir.convert.latency import (
    Quartiles,
    measure_latency,
    quartiles,
)
from triplane.unified_ir.quantize import artifact, freeze


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (latency(1.0, 0.5, 1.0), "faster"),
        (latency(1.0, 2.0, 1.0), "slower"),
        (latency(1.0, 1.1, 1.0), "undecided"),
        (latency(1.0, 2.0, 2.0), "undecided"),
        (latency(1.0, 1.5, 2.0), "undecided"),
        (latency(1.0, 0.5, 1.0, on_target=False), "undecided"),
    ],
)
def test_a_verdict_needs_boxes_apart_and_a_control_that_agrees(found, verdict):
    assert found.verdict == verdict
    assert found.record()["verdict"] == verdict


def test_quartiles_are_of_the_values():
    assert quartiles([1, 2, 3, 4, 5]) == Quartiles(2, 3, 4)


@pytest.mark.slow
def test_sessions_are_timed_in_rounds_and_the_ratio_is_of_the_same_rounds():
    made = artifact(freeze(nets.lenet(), "predict"))
    a, b, c = (made.session() for _ in range(3))
    found = measure_latency(a, b, c, {"x": nets.images(1)})
    # No bound on the ratio: on a busy machine a session may take half its own time a moment later,
    # which is why a verdict needs the control.
    assert found.ratio is not None
    assert 0 < found.ratio.q1 <= found.ratio.median <= found.ratio.q3
    assert found.batch == 1
    assert 0 < found.float32.cpu.q1 <= found.float32.cpu.median <= found.float32.cpu.q3
    assert np.isfinite(found.record()["ratio"]).all()
