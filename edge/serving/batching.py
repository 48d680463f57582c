"""Merge concurrent requests into one run, without a thread or a timer.

While fewer than `runs` runs are in progress, a call runs at once and alone, so merging costs an
idle server nothing. Other calls queue. When a run ends, the oldest queued call takes all calls that
fit beside it and runs them. So a request waits for at most one run that is not its own, plus the
runs of a queue that is longer than one batch. Only right after a shared run, the next one waits up
to `pause_s` for its callers to come back; otherwise eight callers in step would run as 1, 7, 1, 7.

Each call gets its own rows, by position. If a merged run fails, each of its calls that is still in
time is run alone, so one caller's values cannot fail another's request.
"""

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from triplane.edge.serving.running import CallContext, Ran, run_for
from triplane.edge.serving.servable import Array, Servable
from triplane.edge.serving.statistics import Statistics
from triplane.proto.status import DeadlineExceeded

BACK_S: Final = 0.01  # after a shared run, how long its callers count as coming back


class _QueuedCall:
    """A queued call. `wake` is released once: when it is to lead, or has an outcome."""

    __slots__ = ("call", "error", "feeds", "infer_ns", "key", "leads", "results", "rows", "wake")

    def __init__(self, feeds: Mapping[str, Array], rows: int, call: CallContext) -> None:
        self.feeds, self.rows, self.call = feeds, rows, call
        self.key = tuple((name, feeds[name].shape[1:]) for name in sorted(feeds))
        self.wake = threading.Lock()
        self.wake.acquire()
        self.leads = False
        self.results: Mapping[str, Array] | None = None
        self.error: Exception | None = None
        self.infer_ns = 0


class Merged:
    """Runs waiting requests together, up to `merged_rows` rows at a time; see `Runner`."""

    def __init__(
        self,
        servable: Servable,
        statistics: Statistics,
        merged_rows: int,
        *,
        runs: int = 1,
        pause_s: float = 0.0,
    ) -> None:
        self._servable = servable
        self._statistics = statistics
        self.merged_rows = merged_rows
        self._free = runs
        self._pause_s = pause_s
        self._shared_rows = 0  # of the last run, when it was shared
        self._shared_s = 0.0  # when that run ended, on `time.monotonic`
        self._lock = threading.Lock()
        self._arrival = threading.Condition(self._lock)
        self._pausing = 0
        self._queue: deque[_QueuedCall] = deque()

    def run(self, feeds: Mapping[str, Array], rows: int, call: CallContext) -> Ran:
        """See `Runner`."""
        call.require_time()
        started = time.perf_counter_ns()
        mine = _QueuedCall(feeds, rows, call)
        with self._lock:
            if self._free:
                self._free -= 1
                mine.leads = True
            else:
                self._queue.append(mine)
                if self._pausing:
                    self._arrival.notify_all()
        if not mine.leads:
            self._wait(mine)
        if mine.leads:
            self._lead(mine)
        if mine.results is None:
            raise mine.error or DeadlineExceeded("the deadline passed in the queue; nothing ran")
        queue_ns = time.perf_counter_ns() - started - mine.infer_ns
        return Ran(mine.results, queue_ns, mine.infer_ns)

    def _wait(self, mine: _QueuedCall) -> None:
        """Wait until `mine` has an outcome, must lead, or is late and was removed."""
        if mine.wake.acquire(timeout=max(0.0, mine.call.deadline_s - time.monotonic())):
            return
        with self._lock:
            if mine in self._queue:
                self._queue.remove(mine)
                return
        mine.wake.acquire()  # it was just taken from the queue: the wait is one run at most

    def _lead(self, mine: _QueuedCall) -> None:
        """Run `mine` and all calls that fit beside it, then let the next in the queue lead."""
        beside = self._take(mine)
        try:
            self._run([one for one in (mine, *beside) if _in_time(one)])
        finally:
            # Hand over before waking the others: the next run starts while they encode their
            # answers.
            self._hand_over(sum(one.rows for one in (mine, *beside)) if beside else 0)
            for one in beside:
                one.wake.release()

    def _take(self, mine: _QueuedCall) -> list[_QueuedCall]:
        """Take queued calls of the same shapes, oldest first, while their rows fit."""
        taken: list[_QueuedCall] = []
        rows = mine.rows
        with self._lock:
            self._pause(mine)
            while self._queue and self._queue[0].key == mine.key:
                rows += self._queue[0].rows
                if rows > self.merged_rows:
                    break
                taken.append(self._queue.popleft())
        return taken

    def _pause(self, mine: _QueuedCall) -> None:
        """Wait for the callers of a run that was just shared, up to as many rows as it had."""
        if not self._shared_rows or time.monotonic() - self._shared_s > BACK_S:
            return
        expected = min(self.merged_rows, self._shared_rows + mine.rows)
        self._shared_rows = 0
        self._pausing += 1
        self._arrival.wait_for(
            lambda: mine.rows + sum(one.rows for one in self._queue) >= expected, self._pause_s
        )
        self._pausing -= 1

    def _hand_over(self, rows: int) -> None:
        with self._lock:
            self._shared_rows = rows
            self._shared_s = time.monotonic()
            if self._queue:
                heir = self._queue.popleft()
                heir.leads = True
                heir.wake.release()
            else:
                self._free += 1

    def _run(self, batch: Sequence[_QueuedCall]) -> None:
        """Give each call of `batch` its results or its error."""
        if len(batch) > 1 and self._run_merged(batch):
            return
        for one in batch:
            try:
                one.call.require_time()
                one.results, one.infer_ns = self._timed([one.call], one.feeds, one.rows)
            except Exception as error:  # noqa: BLE001 -- raised again in the thread of its call
                one.error = error

    def _run_merged(self, batch: Sequence[_QueuedCall]) -> bool:
        """Run all calls as one; False if that fails and each must be run alone."""
        rows = sum(one.rows for one in batch)
        try:
            feeds = {
                name: np.concatenate([one.feeds[name] for one in batch]) for name in batch[0].feeds
            }
            results, infer_ns = self._timed([one.call for one in batch], feeds, rows)
        except Exception:  # noqa: BLE001 -- alone, each call meets its own error
            return False
        if any(result.shape[:1] != (rows,) for result in results.values()):
            return False
        start = 0
        for one in batch:
            end = start + one.rows
            one.results = {name: result[start:end] for name, result in results.items()}
            one.infer_ns = infer_ns
            start = end
        return True

    def _timed(
        self, calls: Sequence[CallContext], feeds: Mapping[str, Array], rows: int
    ) -> tuple[dict[str, Array], int]:
        started = time.perf_counter_ns()
        results = run_for(calls, self._servable, feeds)
        infer_ns = time.perf_counter_ns() - started
        self._statistics.executed(rows, infer_ns)
        return results, infer_ns


def _in_time(one: _QueuedCall) -> bool:
    try:
        one.call.require_time()
    except DeadlineExceeded as error:
        one.error = error
        return False
    return True
