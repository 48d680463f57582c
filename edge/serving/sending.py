"""The limit for answers that callers have not read yet, in bytes and in time.

grpc keeps an answer in memory until its caller reads it, and no longer counts the call as in
progress then. Without this limit, a caller that sends requests and never reads would fill memory.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator

import grpc

from triplane.edge.serving.limits import ServingLimits
from triplane.edge.serving.receiving import Receiving
from triplane.proto.errors import Unavailable


class Sending:
    """Counts the bytes of unread answers; a call that is not read in time is cancelled."""

    def __init__(
        self, receiving: Receiving, limits: ServingLimits, on_refusal: Callable[[], None]
    ) -> None:
        self._receiving = receiving
        self._limits = limits
        self._on_refusal = on_refusal
        self._held_bytes = 0
        self._lock = threading.Lock()

    def last(self, data: bytes, context: grpc.ServicerContext) -> bytes:
        """Return `data`, the only answer of a call; count it until the call has ended.

        Unavailable if there are too many unread bytes. A single answer is always let through.
        """
        self._hold(len(data))
        # add_callback returns False if the call has ended already; then nobody would release the
        # bytes.
        if context.add_callback(lambda: self._release(len(data))):
            self._receiving.until_over(context, self._limits.call_s)
        else:
            self._release(len(data))
        return data

    @contextlib.contextmanager
    def one_of_many(self, data: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        """Yield `data`, and count it during the body, which sends it. Raises Unavailable."""
        self._hold(len(data))
        try:
            with self._receiving.within(context, self._limits.call_s):
                yield data
        finally:
            self._release(len(data))

    def _hold(self, n_bytes: int) -> None:
        with self._lock:
            waiting = self._held_bytes
            if not waiting or waiting + n_bytes <= self._limits.unsent_bytes:
                self._held_bytes += n_bytes
                return
        self._on_refusal()
        raise Unavailable(
            f"{waiting} bytes of answers are unread, at most {self._limits.unsent_bytes} may be; "
            "read them, then call again"
        )

    def _release(self, n_bytes: int) -> None:
        with self._lock:
            self._held_bytes -= n_bytes
