"""End work early, because it was withdrawn or its deadline has passed.

A `StopToken` is checked between steps. A callback stops a running graph, which may never end by
itself.
"""

import threading
import time
from collections.abc import Callable


class Withdrawn(Exception):
    """The work was withdrawn; it has no result."""


class TaskExpired(Withdrawn):
    """The work was not done before its deadline."""


class StopToken:
    """Ends work by `now`, or at `until_s` on `time.monotonic`. Any thread may use it."""

    def __init__(self, until_s: float) -> None:
        self.until_s = until_s
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []
        self._stopped = self._expired = False

    @property
    def is_withdrawn(self) -> bool:
        """Whether the work was withdrawn."""
        return self._stopped

    def now(self) -> None:
        """End the work because it was withdrawn."""
        self._end(expired=False)

    def expire(self) -> None:
        """End the work because its deadline has come."""
        self._end(expired=True)

    def call(self, callback: Callable[[], None]) -> None:
        """Call this once when the work ends, or now if it has ended. It must not block."""
        with self._lock:
            ended = self._stopped or self._expired
            if not ended:
                self._callbacks.append(callback)
        # Outside the lock, because a callback may use the token.
        if ended:
            callback()

    def check(self) -> None:
        """Raise Withdrawn or TaskExpired if the work must end."""
        # Withdrawal wins over expiry: an expired task is declined to the cloud, a withdrawn one is
        # not.
        if self._stopped:
            raise Withdrawn
        if self._expired or time.monotonic() >= self.until_s:
            raise TaskExpired

    def _end(self, *, expired: bool) -> None:
        with self._lock:
            self._expired = self._expired or expired
            self._stopped = self._stopped or not expired
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()
