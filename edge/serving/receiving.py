"""Limited waits for callers: a stalled caller cannot hold a thread or an answer for ever.

A call waits for its request in a thread that does nothing else, and takes a turn to compute only
afterwards. Each executor limits how many calls wait; beyond that, the oldest call of the caller
that has most is ended with an error. The bytes of unfinished requests are limited together with the
requests inside (`memory.py`). A stream may pause between its messages as long as there is room for
others; it is cancelled when the server stops.
"""

import contextlib
import enum
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc

from triplane.edge.serving.arrivals import CALL_OVERHEAD_BYTES, Arrivals
from triplane.edge.serving.callers import Caller, overloaded
from triplane.edge.serving.executors import BoundedExecutor
from triplane.edge.serving.memory import RETRY_MS, SMALL_BYTES, RequestMemory
from triplane.proto.errors import InvalidInput, TriplaneError
from triplane.proto.status import DeadlineExceeded

logger = logging.getLogger(__name__)

LOOK_PERIOD_S: Final = 0.05  # between two checks of the calls that wait
YOUNG_S: Final = 0.1  # a call that has waited less for its request is not ended
SELDOM_S: Final = 2.0  # between counts of arrived bytes, if nothing suggests that there are more
GROWTH_BYTES: Final = 4 << 20  # growth of the process that suggests it; less for a small limit
REST: Final = float("inf")  # no timeout
STATM: Final = Path("/proc/self/statm")
NO_CALLER: Final = Caller("", "")  # of an answer, which nobody else waits for
PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")

Received = bytes | TriplaneError | None


class Kind(enum.Enum):
    """The event that a call waits for."""

    REQUEST = enum.auto()  # the only message of a call
    REST = enum.auto()  # the next message of a stream
    TAKING = enum.auto()  # for the caller to read an answer


@dataclass(slots=True, eq=False)
class _Wait:
    context: grpc.ServicerContext
    kind: Kind
    since_s: float
    deadline_s: float
    caller: Caller
    executor: BoundedExecutor | None
    refusal: TriplaneError | None = None


class Receiving:
    """The calls whose callers are waited for, and the thread that watches them."""

    def __init__(self, memory: RequestMemory, message_bytes: int, receive_s: float) -> None:
        self._memory, self._receive_s = memory, receive_s
        self._arrivals = Arrivals(message_bytes)
        self._waiting: dict[int, _Wait] = {}  # oldest first
        self._refused: dict[int, _Wait] = {}  # until their threads have noticed
        self._finished: dict[str, int] = {}  # bytes since the last look, by watched connection
        self._growth_bytes = min(GROWTH_BYTES, memory.limit_bytes // 16)
        self._looked_s = -REST
        self._least_bytes = self._looked_inside = 0  # of the process, and inside, at that time
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._rests_end = False
        self._watch = threading.Thread(target=self._run, name="receiving", daemon=True)
        self._watch.start()

    def only(
        self,
        messages: Iterator[bytes],
        context: grpc.ServicerContext,
        caller: Caller,
        executor: BoundedExecutor,
    ) -> Received:
        """Return the message of a single-message call; None if the caller sends none.

        For a request that was given up, return the error with which the call must end.
        """
        return self._next(
            messages, self._begin(context, Kind.REQUEST, self._receive_s, caller, executor)
        )

    def following(
        self,
        messages: Iterator[bytes],
        context: grpc.ServicerContext,
        caller: Caller,
        timeout_s: float,
    ) -> Received:
        """Return the next message of a stream; None if it ends or the server stops."""
        wait = self._begin(context, Kind.REST, timeout_s, caller)
        if self._rests_end:  # checked after the registration, so that `end_rests` misses no stream
            self._forget(wait)
            return None
        return self._next(messages, wait)

    def until_over(self, context: grpc.ServicerContext, timeout_s: float) -> None:
        """Cancel the call unless it ends in time; its answer is being sent."""
        wait = self._begin(context, Kind.TAKING, timeout_s)
        if not context.add_callback(lambda: self._forget(wait)):
            self._forget(wait)

    @contextlib.contextmanager
    def within(self, context: grpc.ServicerContext, timeout_s: float) -> Iterator[None]:
        """Cancel the call unless the body ends in time."""
        wait = self._begin(context, Kind.TAKING, timeout_s)
        try:
            yield
        finally:
            self._forget(wait)

    def end_rest(self, context: grpc.ServicerContext, error: TriplaneError) -> bool:
        """End a stream with `error`, if it is between two messages."""
        with self._lock:
            wait = self._waiting.get(id(context))
            if wait is None or wait.kind is not Kind.REST:
                return False
            self._refuse(wait, error)
            return True

    def end_rests(self) -> None:
        """Cancel every stream that is between two messages, now and from now on."""
        with self._lock:
            self._rests_end = True
            for wait in self._waiting.values():
                if wait.kind is Kind.REST:
                    wait.context.cancel()

    def close(self) -> None:
        """Stop the watching thread."""
        self._ended.set()
        self._watch.join()

    def _begin(
        self,
        context: grpc.ServicerContext,
        kind: Kind,
        timeout_s: float,
        caller: Caller = NO_CALLER,
        executor: BoundedExecutor | None = None,
    ) -> _Wait:
        now = time.monotonic()
        wait = _Wait(context, kind, now, now + timeout_s, caller, executor)
        with self._lock:
            self._waiting[id(context)] = wait
        return wait

    def _next(self, messages: Iterator[bytes], wait: _Wait) -> Received:
        message: bytes | None = None
        try:
            message = next(messages, None)
        finally:
            connection = wait.caller.connection
            with self._lock:
                if wait.refusal is None:
                    self._arrivals.finished_one(connection)
                    if connection in self._finished:
                        self._finished[connection] += (
                            len(message or b"") * 65 // 64 + CALL_OVERHEAD_BYTES
                        )
                self._remove(wait)
        return wait.refusal or message

    def _forget(self, wait: _Wait) -> None:
        with self._lock:
            self._remove(wait)

    def _remove(self, wait: _Wait) -> None:
        self._waiting.pop(id(wait.context), None)
        self._refused.pop(id(wait.context), None)

    def _refuse(self, wait: _Wait, error: TriplaneError) -> None:
        """End a wait for a message with `error`. The caller holds the lock."""
        self._remove(wait)
        wait.refusal = error
        self._refused[id(wait.context)] = wait
        _wake(wait.context)

    def _run(self) -> None:
        while not self._ended.wait(LOOK_PERIOD_S):
            try:
                self._look()
            except Exception:  # without this thread nothing would end a stalled call
                logger.exception("looking at waiting calls failed")

    def _look(self) -> None:
        now = time.monotonic()
        with self._lock:
            for wait in self._refused.values():
                _wake(wait.context)  # it may not have waited yet when it was woken before
            self._end_late(now)
            self._end_crowds(now)
        if self._may_hold_more(now):
            self._bound_arriving(now)

    def _end_crowds(self, now: float) -> None:
        """Reduce the calls of each executor that wait for their request to the executor's limit.

        The oldest calls of the caller that has most are ended first. A request that is on its way
        has waited for a few milliseconds, a stalled one for longer.
        """
        executors: dict[BoundedExecutor, list[_Wait]] = {}
        for wait in self._waiting.values():
            if wait.executor is not None:
                executors.setdefault(wait.executor, []).append(wait)
        for executor, waits in executors.items():
            if len(waits) > executor.receiving:
                self._end_crowd(executor, waits, now)

    def _end_crowd(self, executor: BoundedExecutor, waits: list[_Wait], now: float) -> None:
        callers: dict[str, deque[_Wait]] = {}
        for wait in waits:
            callers.setdefault(wait.caller.address, deque()).append(wait)
        for _ in range(len(waits) - executor.receiving):
            most = max(callers.values(), key=len)
            if now - most[0].since_s < YOUNG_S:
                return
            text = (
                f"too many calls whose requests have not arrived: {len(most)} from your address, "
                f"{executor.receiving} at most in all; send a request at once when its call is "
                f"opened, retry in {RETRY_MS} ms"
            )
            self._refuse(most.popleft(), overloaded(text, RETRY_MS))

    def _end_late(self, now: float) -> None:
        late = [wait for wait in self._waiting.values() if wait.deadline_s < now]
        for wait in late:
            if wait.kind is Kind.REQUEST:
                seconds = wait.deadline_s - wait.since_s
                text = f"the request did not arrive within {seconds:g} s of the call's start"
                self._refuse(wait, DeadlineExceeded(f"{text}; send it faster or in smaller calls"))
            else:
                wait.context.cancel()
        if late:
            logger.warning("stalled calls ended", extra={"calls": len(late)})

    def _may_hold_more(self, now: float) -> bool:
        """Return whether more bytes of requests may be here than at the last look.

        To ask the kernel about each connection costs a thousand silent ones 10 ms of the
        interpreter. Bytes that arrive take memory of the process, or memory that it took before.
        """
        resident, inside = _resident_bytes(), self._memory.inside_bytes
        if (
            resident is not None
            and resident - self._least_bytes < self._growth_bytes
            and inside <= self._looked_inside
            and now - self._looked_s < SELDOM_S
        ):
            self._least_bytes = min(self._least_bytes, resident)
            self._looked_inside = inside
            return False
        self._least_bytes, self._looked_inside = resident or 0, inside
        self._looked_s = now
        return True

    def _bound_arriving(self, now: float) -> None:
        """End arriving requests until all that is here of requests is within the bound."""
        with self._lock:
            waits = [
                wait
                for wait in self._waiting.values()
                if wait.kind is not Kind.TAKING and now - wait.since_s > YOUNG_S
            ]
            finished = self._finished
            self._finished = {wait.caller.connection: 0 for wait in waits}
        self._arrivals.look(Counter(wait.caller.connection for wait in waits), finished)
        arriving = {
            connection: track.arriving
            for connection, track in self._arrivals.tracks.items()
            if track.arriving > SMALL_BYTES
        }
        if not arriving:
            return
        room = self._memory.limit_bytes - self._memory.inside_bytes
        while sum(arriving.values()) > room and (len(arriving) > 1 or self._memory.inside_bytes):
            self._end_arriving(waits, arriving)
            room = self._memory.limit_bytes - self._memory.inside_bytes

    def _end_arriving(self, waits: Iterable[_Wait], arriving: dict[str, int]) -> None:
        """End the oldest request on the slowest connection of the address that holds most bytes.

        A connection's bytes are divided evenly among its requests, because it is not known to which
        one they belong.
        """
        address_of = {wait.caller.connection: wait.caller.address for wait in waits}
        held: Counter[str] = Counter()
        for connection, n_bytes in arriving.items():
            held[address_of[connection]] += n_bytes
        ((address, _),) = held.most_common(1)
        tracks = self._arrivals.tracks
        slowest = min(
            (connection for connection in arriving if address_of[connection] == address),
            key=lambda connection: tracks[connection].pace,
        )
        here = [wait for wait in waits if wait.caller.connection == slowest]
        with self._lock:
            here = [wait for wait in here if self._waiting.get(id(wait.context)) is wait]
            n_bytes = arriving[slowest] // max(1, len(here))
            arriving[slowest] -= n_bytes
            tracks[slowest].arriving -= n_bytes
            if here:
                others = self._memory.inside_bytes + sum(arriving.values())
                oldest = min(here, key=lambda wait: wait.kind is Kind.REST)
                self._refuse(oldest, self._memory.refusal(others, n_bytes))
                logger.warning("arriving request refused", extra={"bytes": n_bytes})
        if len(here) <= 1:
            del arriving[slowest]


def _resident_bytes() -> int | None:
    """Return the resident memory of this process; None if the system does not report it."""
    try:
        return int(STATM.read_text().split()[1]) * PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return None


def _wake(context: grpc.ServicerContext) -> None:
    """Wake the thread that waits for this call's message, with a message for it.

    gRPC cannot end a call with a status while a thread waits for its message. It stores an arrived
    message in `request` of the call's state; a message that is already there is not replaced. If a
    later version of gRPC stores it elsewhere, the call is cancelled instead.
    """
    state: Any = getattr(context, "_state", None)
    try:
        with state.condition:
            if state.request is None:
                state.request = b"given up"
            state.condition.notify_all()
    except AttributeError:
        context.cancel()


def one(message: Received) -> bytes:
    """Return the message of a call that must send one. Raises InvalidInput, or the error in it."""
    if message is None:
        raise InvalidInput("the call sent no message; send exactly one")
    if isinstance(message, TriplaneError):
        raise message
    return message
