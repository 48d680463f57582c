"""The limit for the bytes of all requests inside the server.

A request that has arrived counts with its length until its answer is encoded. One that is still
arriving counts with the bytes that the kernel received on its connection (`arrivals.py`). Requests
of at most `SMALL_BYTES` always pass: threads and queue limit their number, and a caller with large
requests must not block them.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Final

from triplane.edge.serving.callers import overloaded
from triplane.proto.errors import Unavailable

SMALL_BYTES: Final = 256 << 10
RETRY_MS: Final = 1000


class RequestMemory:
    """Counts the bytes of requests that have arrived and are not answered yet."""

    def __init__(self, limit_bytes: int, on_refusal: Callable[[], None]) -> None:
        self.limit_bytes = limit_bytes
        self._on_refusal = on_refusal
        self._inside_bytes = 0
        self._lock = threading.Lock()

    @property
    def inside_bytes(self) -> int:
        """Bytes of large requests that have arrived and are not answered yet."""
        return self._inside_bytes

    @contextlib.contextmanager
    def holding(self, n_bytes: int) -> Iterator[None]:
        """Count a request of `n_bytes` during the body. Unavailable if there is no room.

        A single request is always let in.
        """
        if n_bytes <= SMALL_BYTES:
            yield
            return
        with self._lock:
            if self._inside_bytes and self._inside_bytes + n_bytes > self.limit_bytes:
                raise self.refusal(self._inside_bytes, n_bytes)
            self._inside_bytes += n_bytes
        try:
            yield
        finally:
            with self._lock:
                self._inside_bytes -= n_bytes

    def refusal(self, held_bytes: int, n_bytes: int) -> Unavailable:
        """Return the error for a request with `n_bytes` here while others hold `held_bytes`."""
        self._on_refusal()
        return overloaded(
            f"requests inside the server hold {held_bytes} bytes and this one {n_bytes} more; "
            f"{self.limit_bytes} at most: retry in {RETRY_MS} ms, send smaller requests, or "
            "raise the limit request_bytes",
            RETRY_MS,
        )
