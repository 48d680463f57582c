"""When gradients are ready: measured for a few of them, and by predicted costs in between.

The predicted order of work is right, but its times rest on rates of the device. Runs of the step
that end with one of the gradients say when that one is ready; between two of these, predicted times
are stretched linearly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

MEASURED: Final = 5
"""Gradients at most whose times are measured; a program is compiled for each."""


@dataclass(frozen=True, slots=True)
class MeasuredTimes:
    """When some gradients were ready.

    numbers: of these gradients in the order of readiness, rising. seconds: for each the median of
    `runs` runs of the step that end with it, from the launch.
    """

    numbers: tuple[int, ...]
    seconds: tuple[float, ...]
    runs: int

    def ready_s(self, predicted_s: Sequence[float]) -> list[float]:
        """Return when each gradient is ready, from what was predicted for all of them.

        predicted_s: never falling; those of the measured gradients differ from each other. A time
        that is shorter than one measured before it, by noise, counts as equal.
        """
        known = np.maximum.accumulate(self.seconds)
        at = [predicted_s[k] for k in self.numbers]
        times: list[float] = np.interp(predicted_s, at, known).tolist()
        return times


def to_measure(predicted_s: Sequence[float]) -> tuple[int, ...]:
    """Return the numbers of the gradients to measure, at most `MEASURED`, evenly spread in time.

    predicted_s: never falling, not empty. The first and the last time are among theirs. Of
    gradients that are ready together, it is the last.
    """
    wanted = np.linspace(predicted_s[0], predicted_s[-1], MEASURED)
    last = np.searchsorted(predicted_s, wanted, side="right") - 1
    return tuple(int(k) for k in np.unique(last))
