"""Compare the time of graphs on the same input, so that noise cannot decide the verdict.

Runs alternate between float, int8 and control in one process; the control is a second session of
the float graph. Times are processor times of one thread, which other processes disturb least;
wall-clock times are recorded beside them. Ratios are taken within a round, since a slow phase of
the machine affects all runs of the round. There is a verdict only if the interval between the
quartiles of int8 / float contains neither 1 nor any part of that of control / float.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from triplane.unified_ir.ir.graph import Array
from triplane.unified_ir.runtime import Session

ROUNDS: Final = 31
RUN_S: Final = 0.003
"""A timed run repeats the call until it takes about this long; clocks tick in microseconds."""
WARM_UPS: Final = 5
MAX_CALLS: Final = 1000
CLOCK_S: Final = 1e-7
"""Smallest processor time that is recorded for a run; a coarse clock may not have advanced."""
BUDGET_S: Final = 20.0
"""Approximate limit for a measurement; slow networks get fewer rounds."""
MIN_ROUNDS: Final = 7


@dataclass(frozen=True, slots=True)
class Quartiles:
    """First quartile, median, third quartile."""

    q1: float
    median: float
    q3: float

    def rounded(self, scale: float = 1.0, digits: int = 4) -> list[float]:
        """Return the three numbers for JSON."""
        return [round(scale * x, digits) for x in (self.q1, self.median, self.q3)]


@dataclass(frozen=True, slots=True)
class CallTiming:
    """Seconds per call: of the processor, and by the wall clock."""

    cpu: Quartiles
    wall: Quartiles

    def record(self) -> dict[str, list[float]]:
        """Return the timing as JSON, in milliseconds."""
        return {"cpu_ms": self.cpu.rounded(1e3, 6), "wall_ms": self.wall.rounded(1e3, 6)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Timings on one batch; ratios to float32 in processor time, by round."""

    batch: int
    rounds: int
    float32: CallTiming
    control: CallTiming
    int8: CallTiming | None = None
    ratio: Quartiles | None = None
    control_ratio: Quartiles = Quartiles(1.0, 1.0, 1.0)
    on_target: bool = True
    """Whether this machine is of the target's kind."""

    @property
    def verdict(self) -> str:
        """Whether int8 is "faster" or "slower" than float, or the difference is "undecided"."""
        r, c = self.ratio, self.control_ratio
        # The intervals [r.q1, r.q3] and [min(1, c.q1), max(1, c.q3)] overlap.
        if r is None or not self.on_target or (r.q1 <= max(1.0, c.q3) and min(1.0, c.q1) <= r.q3):
            return "undecided"
        return "faster" if r.median < 1 else "slower"

    def record(self) -> dict[str, Any]:
        """Return the measurement as JSON."""
        record: dict[str, Any] = {
            "batch": self.batch,
            "rounds": self.rounds,
            "threads": 1,
            "on_target": self.on_target,
            "float32": self.float32.record(),
            "control": self.control.record(),
            "control_ratio": self.control_ratio.rounded(),
        }
        if self.int8 is not None and self.ratio is not None:
            record |= {"int8": self.int8.record(), "ratio": self.ratio.rounded()}
            record["verdict"] = self.verdict
        return record


def measure_latency(
    float32: Session,
    control: Session,
    int8: Session | None,
    feeds: Mapping[str, Array],
    *,
    on_target: bool = True,
) -> Latency:
    """Time the sessions on the same feeds, interleaved."""
    sessions = [float32, control] if int8 is None else [float32, int8, control]
    calls = [_calls(s, feeds) for s in sessions]
    # The time of one round, which decides how many fit into the budget.
    once_s = sum(n * s for n, s in calls)
    rounds = max(MIN_ROUNDS, min(ROUNDS, round(BUDGET_S / max(once_s, 1e-9))))
    timed = np.array(
        [
            [_seconds_per_call(s, feeds, n) for s, (n, _) in zip(sessions, calls, strict=True)]
            for _ in range(rounds)
        ]
    )
    timings = [
        CallTiming(cpu=quartiles(timed[:, i, 1]), wall=quartiles(timed[:, i, 0]))
        for i in range(len(sessions))
    ]
    return Latency(
        batch=len(next(iter(feeds.values()))),
        rounds=rounds,
        float32=timings[0],
        control=timings[-1],
        int8=None if int8 is None else timings[1],
        # Quartiles of the ratios, not ratios of quartiles: both runs of a round share the machine's
        # phase.
        ratio=None if int8 is None else quartiles(timed[:, 1, 1] / timed[:, 0, 1]),
        control_ratio=quartiles(timed[:, -1, 1] / timed[:, 0, 1]),
        on_target=on_target,
    )


def quartiles(values: Sequence[float] | Array) -> Quartiles:
    """Return the quartiles by linear interpolation."""
    q1, median, q3 = np.percentile(values, [25, 50, 75])
    return Quartiles(float(q1), float(median), float(q3))


def _calls(session: Session, feeds: Mapping[str, Array]) -> tuple[int, float]:
    """Return (number of calls that take about RUN_S, seconds per call), after warming up."""
    for _ in range(WARM_UPS):
        session.run(feeds)
    # By the wall clock, because processor time may be coarse (see CLOCK_S).
    wall, _ = _seconds_per_call(session, feeds, 3)
    return max(1, min(MAX_CALLS, round(RUN_S / max(wall, 1e-9)))), wall


def _seconds_per_call(
    session: Session, feeds: Mapping[str, Array], calls: int
) -> tuple[float, float]:
    """Return (wall, processor) seconds per call."""
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(calls):
        session.run(feeds)
    wall_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    return wall_s / calls, max(cpu_s, CLOCK_S) / calls
