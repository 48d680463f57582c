"""Seats: the limit of open streams, and of open watches of health, shared fairly by callers.

An open stream only holds a thread that waits for its next message. When all seats are taken, a
newcomer with fewer seats takes one from the caller that has most, if one of these can be ended; a
stream can be ended only between two messages. Otherwise the newcomer is refused.
"""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator

import grpc

from triplane.edge.serving.callers import Caller, overloaded
from triplane.edge.serving.turns import RETRY_MS
from triplane.proto.errors import Unavailable

End = Callable[[grpc.ServicerContext, Unavailable], bool]


class Seats:
    """A limit of `seats` open calls. what: names them in messages.

    end: ends a call with an error, or returns False if it cannot be ended now.
    """

    def __init__(self, what: str, seats: int, *, end: End, on_refusal: Callable[[], None]) -> None:
        self._what = what
        self._seats = seats
        self._end = end
        self._on_refusal = on_refusal
        self._taken: dict[int, tuple[Caller, grpc.ServicerContext]] = {}  # oldest first
        # Reentrant, because a collected generator may release its seat while we hold the lock.
        self._lock = threading.RLock()

    @contextlib.contextmanager
    def seat(self, caller: Caller, context: grpc.ServicerContext) -> Iterator[None]:
        """Hold a seat during the body. Unavailable if there is none."""
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
        return overloaded(
            f"all {self._seats} {self._what} are taken, and callers have equal shares of them; "
            f"close one, or retry in {RETRY_MS} ms",
            RETRY_MS,
        )
