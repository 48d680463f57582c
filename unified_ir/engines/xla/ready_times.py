"""Timing a step on its own devices up to some of its gradients, to learn when these are ready.

Programs of parts of the step run in turns on the state and the batch of the first step, and add
nothing up, except what the backward pass itself waits for. The median counts, because a single run
may be disturbed. In a run of several processes all of them run the same programs as often, and the
times are those of the first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, Final

from triplane.unified_ir.passes.sharding.ready_times import MeasuredTimes, to_measure

RUNS: Final = 5
ENOUGH_S: Final = 30
"""After about so many seconds of runs, no program runs once more; each runs at least once."""


def measured_times(
    predicted_s: Sequence[float],
    run_up_to: Callable[[int], Callable[[], Any]],
    agreed: Callable[[str, Any], Any],
) -> MeasuredTimes:
    """Return measured times of some gradients.

    predicted_s: of all, never falling. run_up_to: see `BucketedFunction.decide`. agreed: returns
    the value of the first process.
    """
    numbers = to_measure(predicted_s)
    programs = [run_up_to(k) for k in numbers]
    for run in programs:
        run()  # which compiles
    times = [[_seconds(run)] for run in programs]
    spent_s = max(sum(t[0] for t in times), 1e-9)
    runs = agreed("runs", max(1, min(RUNS, int(ENOUGH_S / spent_s))))
    for _ in range(runs - 1):
        for run, taken in zip(programs, times, strict=True):
            taken.append(_seconds(run))
    return MeasuredTimes(numbers, tuple(agreed("times", [median(t) for t in times])), runs)


def _seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
