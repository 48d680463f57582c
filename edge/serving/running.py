"""Run checked requests on behalf of calls, alone or merged (see `batching.py`).

A call whose deadline has passed, or whose caller has left, is not run. A run is stopped before its
next node when all its callers have given up. So no request, not even an endless loop, holds a
thread for much longer than somebody waits for it.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from triplane.edge.serving.servable import Array, Servable
from triplane.edge.serving.statistics import Statistics
from triplane.proto.errors import Unavailable
from triplane.proto.status import DeadlineExceeded
from triplane.unified_ir.runtime.session import CancellationToken

LOOK_PERIOD_S: Final = 0.5  # between two checks for runs without a waiting caller


@dataclass(frozen=True, slots=True)
class CallContext:
    """Deadline and start of a call, and whether its caller still waits.

    deadline_s: on `time.monotonic`. arrived_ns: on `time.perf_counter_ns`. runs: stops the runs of
    the call, if given.
    """

    deadline_s: float
    arrived_ns: int
    waited: Callable[[], bool]
    runs: "Runs | None" = None

    @property
    def in_time(self) -> bool:
        """Whether the caller still waits for the answer."""
        return time.monotonic() < self.deadline_s and self.waited()

    def require_time(self) -> None:
        """Raise DeadlineExceeded unless the caller still waits for the answer."""
        if not self.in_time:
            raise DeadlineExceeded("the deadline passed before the model ran; nothing was computed")


class Runs:
    """The runs in progress, and a thread that stops those whose callers have all left."""

    def __init__(self) -> None:
        self._held: dict[CancellationToken, Sequence[CallContext]] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._look = threading.Thread(target=self._run, name="runs", daemon=True)
        self._look.start()

    @contextlib.contextmanager
    def of(self, calls: Sequence[CallContext]) -> Iterator[CancellationToken]:
        """Yield a token for the run in the body, which is set when no call waits for it."""
        stop = CancellationToken()
        with self._lock:
            self._held[stop] = calls
        try:
            yield stop
        finally:
            with self._lock:
                del self._held[stop]

    def close(self) -> None:
        """Stop the thread."""
        self._ended.set()
        self._look.join()

    def _run(self) -> None:
        while not self._ended.wait(LOOK_PERIOD_S):
            with self._lock:
                held = [*self._held.items()]
            for stop, calls in held:
                if not any(call.in_time for call in calls):
                    stop.set()


def run_for(
    calls: Sequence[CallContext], servable: Servable, feeds: Mapping[str, Array]
) -> dict[str, Array]:
    """Run on behalf of these calls. DeadlineExceeded if all of them have given up."""
    runs = calls[0].runs
    if runs is None:
        return servable.run(feeds)
    with runs.of(calls) as stop:
        try:
            return servable.run(feeds, stop=stop)
        except Unavailable as error:
            if not stop.is_set:
                raise
            raise DeadlineExceeded("the deadline passed while the model ran") from error


@dataclass(frozen=True, slots=True)
class Ran:
    """All outputs of a request, how long it waited, and how long its run took."""

    results: Mapping[str, Array]
    queue_ns: int
    infer_ns: int


class Runner(Protocol):
    """Runs checked feeds of `rows` rows for a call; called from many threads."""

    merged_rows: int
    """Rows up to which requests are merged into one run; 0 when they never are."""

    def run(self, feeds: Mapping[str, Array], rows: int, call: CallContext) -> Ran:
        """Return the outputs for these feeds only. DeadlineExceeded if it is too late to run."""


class Direct:
    """Runs each request alone, in the thread of its call."""

    merged_rows = 0

    def __init__(self, servable: Servable, statistics: Statistics) -> None:
        self._servable = servable
        self._statistics = statistics

    def run(self, feeds: Mapping[str, Array], rows: int, call: CallContext) -> Ran:
        """See `Runner`."""
        call.require_time()
        started = time.perf_counter_ns()
        results = run_for((call,), self._servable, feeds)
        infer_ns = time.perf_counter_ns() - started
        self._statistics.executed(rows, infer_ns)
        return Ran(results, 0, infer_ns)
