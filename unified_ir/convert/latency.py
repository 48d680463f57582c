"""How long graphs take on the same input, measured so that noise cannot decide.

Runs alternate float, int8, control in one process; the control is a second session of the float
graph. Times are of the processor (one thread), which other processes disturb least; the wall clock
stands beside. What counts is the ratio within a round, since slow phases of a machine hit all:
a verdict needs quartiles of int8 / float that reach neither 1 nor those of control / float.
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
"""A timed run repeats the call until it takes about this long: clocks tick in microseconds."""
WARM_UPS: Final = 5
MAX_CALLS: Final = 1000
CLOCK_S: Final = 1e-7
"""Least processor time that is told apart from none."""
BUDGET_S: Final = 20.0
"""Slow networks get fewer rounds, so that measuring ends about here."""
MIN_ROUNDS: Final = 7


@dataclass(frozen=True, slots=True)
class Quartiles:
    """First quartile, median, third quartile."""

    q1: float
    median: float
    q3: float

    def overlaps(self, other: Quartiles) -> bool:
        """Whether the boxes share a point."""
        return self.q1 <= other.q3 and other.q1 <= self.q3


@dataclass(frozen=True, slots=True)
class CallTiming:
    """Seconds per call: of the processor, and by the wall clock."""

    cpu: Quartiles
    wall: Quartiles

    def record(self) -> dict[str, list[float]]:
        """As JSON, in milliseconds."""
        return {"cpu_ms": _ms(self.cpu), "wall_ms": _ms(self.wall)}


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
        """What int8 is, compared with float: faster, slower, or undecided."""
        if self.ratio is None or not self.on_target:
            return "undecided"
        c = self.control_ratio
        even = Quartiles(min(1.0, c.q1), c.median, max(1.0, c.q3))
        if self.ratio.overlaps(even):
            return "undecided"
        return "faster" if self.ratio.median < 1 else "slower"

    def record(self) -> dict[str, Any]:
        """As JSON."""
        record: dict[str, Any] = {
            "batch": self.batch,
            "rounds": self.rounds,
            "threads": 1,
            "on_target": self.on_target,
            "float32": self.float32.record(),
            "control": self.control.record(),
            "control_ratio": _rounded(self.control_ratio),
        }
        if self.int8 is not None and self.ratio is not None:
            record |= {"int8": self.int8.record(), "ratio": _rounded(self.ratio)}
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
    """Times the sessions on the same feeds, interleaved."""
    sessions = [float32, control] if int8 is None else [float32, int8, control]
    calls = [_calls(s, feeds) for s in sessions]
    once_s = sum(n * s for n, s in calls)
    rounds = max(MIN_ROUNDS, min(ROUNDS, round(BUDGET_S / max(once_s, 1e-9))))
    timed = np.array(
        [
            [_timed(s, feeds, n) for s, (n, _) in zip(sessions, calls, strict=True)]
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
        ratio=None if int8 is None else quartiles(timed[:, 1, 1] / timed[:, 0, 1]),
        control_ratio=quartiles(timed[:, -1, 1] / timed[:, 0, 1]),
        on_target=on_target,
    )


def quartiles(values: Sequence[float] | Array) -> Quartiles:
    """Quartiles by linear interpolation."""
    q1, median, q3 = np.percentile(values, [25, 50, 75])
    return Quartiles(float(q1), float(median), float(q3))


def _calls(session: Session, feeds: Mapping[str, Array]) -> tuple[int, float]:
    """(how many calls take about RUN_S, seconds per call), after warming up."""
    for _ in range(WARM_UPS):
        session.run(feeds)
    wall, _ = _timed(session, feeds, 3)
    return max(1, min(MAX_CALLS, round(RUN_S / max(wall, 1e-9)))), wall


def _timed(session: Session, feeds: Mapping[str, Array], calls: int) -> tuple[float, float]:
    """(wall, processor) seconds per call."""
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(calls):
        session.run(feeds)
    wall_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    return wall_s / calls, max(cpu_s, CLOCK_S) / calls  # a coarse clock may not have moved


def _rounded(q: Quartiles) -> list[float]:
    return [round(x, 4) for x in (q.q1, q.median, q.q3)]


def _ms(q: Quartiles) -> list[float]:
    return [round(1e3 * x, 6) for x in (q.q1, q.median, q.q3)]
