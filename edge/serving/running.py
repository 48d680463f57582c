"""Running one checked request: the call it belongs to, and the plain way to run it.

A call whose deadline has passed, or whose caller has gone, is never run.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from triplane.edge.serving.servable import Array, Servable
from triplane.edge.serving.statistics import Statistics
from triplane.proto.status import DeadlineExceeded


@dataclass(frozen=True, slots=True)
class Call:
    """Who waits for the answer, until when, and since when.

    `deadline_s` is on `time.monotonic`; `arrived_ns` on `time.perf_counter_ns`.
    """

    deadline_s: float
    arrived_ns: int
    waited: Callable[[], bool]

    def require_time(self) -> None:
        """Raise DeadlineExceeded unless somebody still waits for the answer."""
        if time.monotonic() >= self.deadline_s or not self.waited():
            raise DeadlineExceeded("the deadline passed before the model ran; nothing was computed")


@dataclass(frozen=True, slots=True)
class Ran:
    """All outputs of one request, how long it waited to be run, and how long the run took."""

    results: Mapping[str, Array]
    queue_ns: int
    infer_ns: int


class Runner(Protocol):
    """Runs checked feeds of `rows` rows for a call; called from many threads."""

    @property
    def merged_rows(self) -> int:
        """Rows up to which requests are merged into one run; 0 when they never are."""

    def run(self, feeds: Mapping[str, Array], rows: int, call: Call) -> Ran:
        """Outputs for these feeds alone. Raises DeadlineExceeded instead of running late."""


class Direct:
    """Each request is one run, in the thread of its call."""

    merged_rows = 0

    def __init__(self, servable: Servable, statistics: Statistics) -> None:
        self._servable = servable
        self._statistics = statistics

    def run(self, feeds: Mapping[str, Array], rows: int, call: Call) -> Ran:
        """See `Runner`."""
        call.require_time()
        started = time.perf_counter_ns()
        results = self._servable.run(feeds)
        infer_ns = time.perf_counter_ns() - started
        self._statistics.executed(rows, infer_ns)
        return Ran(results, 0, infer_ns)
