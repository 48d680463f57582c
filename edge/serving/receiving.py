"""Bounded waits for callers: a stalled caller cannot hold a thread or an answer for ever.

A call waits for its request in a thread that does nothing else, and takes a turn to compute only
afterwards. The number of calls that wait is bounded by lane: one more ends the oldest of the caller
that has most, with a status that says so. What has arrived of unfinished requests is bounded in
bytes together with the requests inside (`memory.py`). A stream may rest between its messages as
long as there is room for others, and is cancelled when the server goes.
"""

import contextlib
import enum
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc

from triplane.edge.serving.arrivals import CALL_OVERHEAD_BYTES, Arrivals
from triplane.edge.serving.callers import Caller
from triplane.edge.serving.lanes import BoundedExecutor
from triplane.edge.serving.memory import RETRY_MS, SMALL_BYTES, RequestMemory
from triplane.proto.errors import InvalidInput, TriplaneError, Unavailable
from triplane.proto.status import DeadlineExceeded, with_details

logger = logging.getLogger(__name__)

LOOK_PERIOD_S: Final = 0.05  # how often calls that wait are looked at
YOUNG_S: Final = 0.1  # a call that has waited less for its request is left alone
SELDOM_S: Final = 2.0  # between looks at what has arrived, where nothing shows that more has
GROWTH_BYTES: Final = 4 << 20  # of the process, which shows it; less where the bound is small
REST: Final = float("inf")  # a timeout: the caller may take its time
STATM: Final = Path("/proc/self/statm")
PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")

Received = bytes | TriplaneError | None


class Kind(enum.Enum):
    """What a call waits for."""

    REQUEST = enum.auto()  # the only message of a call
    REST = enum.auto()  # the next message of a stream
    TAKING = enum.auto()  # the caller, to take an answer


@dataclass(slots=True, eq=False)
class _Wait:
    context: grpc.ServicerContext
    kind: Kind
    since_s: float
    deadline_s: float
    caller: Caller = field(default=Caller("", ""))
    lane: BoundedExecutor | None = None
    refusal: TriplaneError | None = None


class Receiving:
    """The calls whose callers are waited for, and the thread that watches them."""

    def __init__(self, memory: RequestMemory, message_bytes: int) -> None:
        self._memory = memory
        self._arrivals = Arrivals(message_bytes)
        self._waiting: dict[int, _Wait] = {}  # oldest first
        self._refused: dict[int, _Wait] = {}  # until their threads have noticed
        self._finished: dict[str, int] = {}  # bytes since the last look, by watched connection
        self._growth_bytes = min(GROWTH_BYTES, memory.limit_bytes // 16)
        self._looked_s = -REST
        self._least_bytes = self._looked_inside = 0  # of the process since the last look; inside
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
        lane: BoundedExecutor,
        timeout_s: float,
    ) -> Received:
        """The message of a single-message call; None when the caller sends none.

        An error stands for a request that was given up; the call ends with it.
        """
        now = time.monotonic()
        wait = _Wait(context, Kind.REQUEST, now, now + timeout_s, caller, lane)
        with self._lock:
            self._waiting[id(context)] = wait
        return self._next(messages, wait)

    def following(
        self,
        messages: Iterator[bytes],
        context: grpc.ServicerContext,
        caller: Caller,
        timeout_s: float,
    ) -> Received:
        """The next message of a stream, None when it ends or the server goes."""
        now = time.monotonic()
        wait = _Wait(context, Kind.REST, now, now + timeout_s, caller)
        with self._lock:
            if self._rests_end:
                return None
            self._waiting[id(context)] = wait
        return self._next(messages, wait)

    def until_over(self, context: grpc.ServicerContext, timeout_s: float) -> None:
        """Cancel the call unless it is over in time: its answer is on the way."""
        wait = self._taking(context, timeout_s)
        if not context.add_callback(lambda: self._forget(wait)):
            self._forget(wait)

    @contextlib.contextmanager
    def within(self, context: grpc.ServicerContext, timeout_s: float) -> Iterator[None]:
        """Cancel the call unless the body ends in time."""
        wait = self._taking(context, timeout_s)
        try:
            yield
        finally:
            self._forget(wait)

    def end_rest(self, context: grpc.ServicerContext, error: TriplaneError) -> bool:
        """End a stream with `error`, if it rests."""
        with self._lock:
            wait = self._waiting.get(id(context))
            if wait is None or wait.kind is not Kind.REST:
                return False
            self._refuse(wait, error)
            return True

    def end_rests(self) -> None:
        """Cancel every stream that waits for its caller, and let none wait from now on."""
        with self._lock:
            self._rests_end = True
            for wait in self._waiting.values():
                if wait.kind is Kind.REST:
                    wait.context.cancel()

    def close(self) -> None:
        """Stop the watching thread."""
        self._ended.set()
        self._watch.join()

    def _taking(self, context: grpc.ServicerContext, timeout_s: float) -> _Wait:
        now = time.monotonic()
        wait = _Wait(context, Kind.TAKING, now, now + timeout_s)
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
        """End a wait for a message with `error`; the lock is held."""
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
                _wake(wait.context)  # it was not yet waiting when it was woken the first time
            self._end_late(now)
            self._end_crowds(now)
        if self._may_hold_more(now):
            self._bound_arriving(now)

    def _end_crowds(self, now: float) -> None:
        """Reduce the calls of each lane that wait for their request to the lane's limit.

        The oldest of the caller that has most go first. A request that is on its way has a few
        milliseconds behind it, a stalled one has more.
        """
        lanes: dict[BoundedExecutor, list[_Wait]] = {}
        for wait in self._waiting.values():
            if wait.lane is not None:
                lanes.setdefault(wait.lane, []).append(wait)
        for lane, waits in lanes.items():
            if len(waits) > lane.receiving:
                self._end_crowd(lane, waits, now)

    def _end_crowd(self, lane: BoundedExecutor, waits: list[_Wait], now: float) -> None:
        callers: dict[str, deque[_Wait]] = {}
        for wait in waits:
            callers.setdefault(wait.caller.address, deque()).append(wait)
        for _ in range(len(waits) - lane.receiving):
            most = max(callers.values(), key=len)
            if now - most[0].since_s < YOUNG_S:
                return
            error = Unavailable(
                f"too many calls whose requests have not arrived: {len(most)} from your address, "
                f"{lane.receiving} at most in all; send a request at once when its call is opened, "
                f"retry in {RETRY_MS} ms"
            )
            self._refuse(most.popleft(), with_details(error, retry_after_ms=str(RETRY_MS)))

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

        A connection's bytes are shared out evenly over its requests: which one has brought them is
        not known.
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
    """Memory of this process; None where the system does not tell."""
    try:
        return int(STATM.read_text().split()[1]) * PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return None


def _wake(context: grpc.ServicerContext) -> None:
    """Wake the thread that waits for this call's message, with a message for it.

    gRPC has no way to end a call with a status while its message is waited for. It keeps a message
    that has arrived in `request` of the call's state, and one that is really there is left alone.
    Should a later version keep it elsewhere, the call is cancelled instead.
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
    """The single message of a call that must bring one. Raises InvalidInput, or what it is."""
    if message is None:
        raise InvalidInput("the call brought no message; send exactly one")
    if isinstance(message, TriplaneError):
        raise message
    return message
