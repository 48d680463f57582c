"""Turns: the limit of calls that compute at once, and the order in which the others wait.

A call asks for a turn only when its request has arrived completely, so a slow caller never holds
one. Callers are served in rounds (`FairQueue`): a caller with two hundred queued calls delays the
single call of another by one run and not by two hundred. When the queue is full, the newest call of
the caller with most calls is refused; that may be the newcomer.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from triplane.edge.serving.callers import Caller, FairQueue, overloaded
from triplane.proto.status import DeadlineExceeded

RETRY_MS = 500


class _WaitingTurn:
    """A waiting call. `wake` is released once, when the call gets a turn or is refused."""

    __slots__ = ("has_turn", "wake")

    def __init__(self) -> None:
        self.has_turn = False
        self.wake = threading.Lock()
        self.wake.acquire()


class Turns:
    """Lets `turns` calls compute at once, and `queued` calls wait."""

    def __init__(self, turns: int, queued: int, on_refusal: Callable[[], None]) -> None:
        self._free = turns
        self._queued = queued
        self._on_refusal = on_refusal
        self._queue: FairQueue[_WaitingTurn] = FairQueue()
        self._lock = threading.Lock()

    @property
    def waiting(self) -> int:
        """Number of calls in the queue."""
        return len(self._queue)

    @contextlib.contextmanager
    def turn(self, caller: Caller, deadline_s: float) -> Iterator[None]:
        """Wait for a turn and hold it during the body; `deadline_s` is on `time.monotonic`.

        Unavailable if the queue is full, DeadlineExceeded if the deadline comes first.
        """
        self._take(caller, deadline_s)
        try:
            yield
        finally:
            with self._lock:
                if self._queue:
                    waiting = self._queue.pop()
                    waiting.has_turn = True
                    waiting.wake.release()
                else:
                    self._free += 1

    def _take(self, caller: Caller, deadline_s: float) -> None:
        with self._lock:
            if self._free:
                self._free -= 1
                return
            waiting = self._enqueue(caller)
        if not waiting.wake.acquire(timeout=max(0.0, deadline_s - time.monotonic())):
            with self._lock:
                left = self._queue.remove(caller, waiting)
            if left:
                raise DeadlineExceeded("the deadline passed in the queue; nothing was computed")
            waiting.wake.acquire()  # it has just left the queue with a result
        if not waiting.has_turn:
            self._refuse()

    def _enqueue(self, caller: Caller) -> _WaitingTurn:
        if len(self._queue) >= self._queued:
            if (displaced := self._queue.displace(caller)) is None:
                self._refuse()
            else:
                displaced.wake.release()
        waiting = _WaitingTurn()
        self._queue.push(caller, waiting)
        return waiting

    def _refuse(self) -> None:
        self._on_refusal()
        raise overloaded(
            f"all queues are full: {self._queued} calls wait for a thread already; "
            f"retry in {RETRY_MS} ms",
            RETRY_MS,
        )
