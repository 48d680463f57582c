"""Seats of streams and of watchers of health: how many are open at once, and who gives way.

An open stream holds a thread that waits for its next message, and nothing else. When all seats are
taken, a caller that has none or few gets the seat of the caller that has most, if one of those can
be ended: a stream only between two messages. Otherwise the newcomer is refused.
"""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator

import grpc

from triplane.edge.serving.callers import Caller
from triplane.edge.serving.turns import RETRY_MS
from triplane.proto.errors import Unavailable
from triplane.proto.status import with_details

End = Callable[[grpc.ServicerContext, Unavailable], bool]


class Seats:
    """`seats` calls are open at once; `what` they are is for messages.

    `end` ends one with an error, or returns False where it cannot be ended now.
    """

    def __init__(self, what: str, seats: int, *, end: End, on_refusal: Callable[[], None]) -> None:
        self._what = what
        self._seats = seats
        self._end = end
        self._on_refusal = on_refusal
        self._taken: dict[int, tuple[Caller, grpc.ServicerContext]] = {}  # oldest first
        # Reentrant: a dropped generator may give its seat back while this thread holds the lock.
        self._lock = threading.RLock()

    @contextlib.contextmanager
    def seat(self, caller: Caller, context: grpc.ServicerContext) -> Iterator[None]:
        """Hold a seat for the body. Raises Unavailable."""
        with self._lock:
            if len(self._taken) >= self._seats and not self._make_room(caller):
                self._on_refusal()
                raise self._refusal()
            self._taken[id(context)] = caller, context
        try:
            yield
        finally:
            with self._lock:
                self._taken.pop(id(context), None)

    def _make_room(self, newcomer: Caller) -> bool:
        held = Counter(caller.address for caller, _ in self._taken.values())
        ((address, count),) = held.most_common(1)
        if count <= held[newcomer.address] + 1:
            return False
        for key, (caller, context) in [*self._taken.items()]:
            if caller.address == address and self._end(context, self._refusal()):
                self._taken.pop(key, None)
                return True
        return False

    def _refusal(self) -> Unavailable:
        error = Unavailable(
            f"all {self._seats} {self._what} are taken, and callers have equal shares of them; "
            f"close one, or retry in {RETRY_MS} ms"
        )
        return with_details(error, retry_after_ms=str(RETRY_MS))
