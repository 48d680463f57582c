"""One host for state machines: step, commit, then effects.

Events wait in a queue and are folded into the state in their order. What was folded is committed in
one transaction. Only after the commit does the new state become current, are its effects carried
out, and are the callers answered; so nothing is acknowledged, and nothing has an effect, that a
crash could undo. A commit that fails changes nothing. An event that fails costs no other event its
commit: events that were folded together are then taken in halves, down to the one that fails.

A commit may be held back for a moment, so that events that come close together share it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from triplane.proto.errors import Unavailable

State = TypeVar("State")
Event = TypeVar("Event")
Effect = TypeVar("Effect")

logger = logging.getLogger(__name__)

STOPPING: Final = "the cloud is stopping; send it again when the cloud is back"


@dataclass(frozen=True, slots=True, eq=False)
class QueuedEvent(Generic[State, Event]):
    """An event that waits for its commit. done: its caller's future; without one it is retried."""

    event: Event
    done: asyncio.Future[State] | None = None


@dataclass(eq=False, slots=True)
class Batch(Generic[State, Event, Effect]):
    """Events that were folded since the newest commit.

    state: after them. steps: events that changed something, each with the state after it. until_s:
    the latest time of the commit, on the loop's clock. is_lost: they could not be committed.
    """

    state: State
    queued: list[QueuedEvent[State, Event]] = field(default_factory=list)
    steps: list[tuple[Event, State]] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)
    until_s: float = math.inf
    is_lost: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRules(Generic[State, Event, Effect]):
    """The functions and limits that define a machine.

    fold: gives, for each event that does something, the event (None if it changes nothing), the
    state after it, and its effects. commit: writes a batch in one transaction and returns the state
    to continue from. act: carries out the effects of a committed batch, given the state before it.
    failed: called with an event that raised although it was alone. refused: called when a commit
    raised Unavailable. hold: whether a commit may wait for more events. tick: in how many seconds
    time alone changes the state, and the event for it. is_over: whether the state takes no events.
    max_batch: largest number of events in a commit. hold_s: longest time that a commit may wait.
    retry_s: pause after a commit that raised Unavailable.
    """

    fold: Callable[[State, list[Event]], Iterable[tuple[Event | None, State, Sequence[Effect]]]]
    commit: Callable[[State, Batch[State, Event, Effect]], Awaitable[State]]
    act: Callable[[State, Batch[State, Event, Effect]], None]
    failed: Callable[[Event, Exception], None] = lambda *_: None
    refused: Callable[[Unavailable], None] = lambda _: None
    hold: Callable[[Batch[State, Event, Effect]], bool] = lambda _: False
    tick: Callable[[State], tuple[float, Event | None]] = lambda _: (math.inf, None)
    is_over: Callable[[State], bool] = lambda _: False
    max_batch: int
    hold_s: float = 0.0
    retry_s: float = 0.0


class Machine(Generic[State, Event, Effect]):
    """A state machine of one event loop. state: as of the newest commit; ahead: what follows it."""

    def __init__(self, name: str, state: State, rules: MachineRules[State, Event, Effect]) -> None:
        self._name, self._rules, self.state = name, rules, state
        self.ahead: Batch[State, Event, Effect] = Batch(state)
        # (waits for others, number, event): urgent events first, else in the order of the calls
        self._queue: asyncio.PriorityQueue[tuple[bool, int, QueuedEvent[State, Event]]]
        self._queue = asyncio.PriorityQueue()
        self._numbers = itertools.count()
        self._task: asyncio.Task[None] | None = None

    def start(self, *stored: State) -> None:
        """Begin to take events, from the stored state if one is given."""
        for state in stored:
            self.state, self.ahead = state, Batch(state)
        self._task = asyncio.create_task(self._run(), name=self._name)

    async def stop(self) -> None:
        """End with the process; callers get Unavailable, though a commit under way may succeed."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        _answer(self.ahead.queued + self._drained(), Unavailable(STOPPING))

    async def put(self, event: Event, *, urgent: bool = False) -> State:
        """Apply an event and return the state after its commit. Unavailable: it may be lost.

        An event is applied even if its caller leaves. urgent: before events in the queue that are
        not.
        """
        done: asyncio.Future[State] = asyncio.get_running_loop().create_future()
        self._enqueue(QueuedEvent(event, done), urgent=urgent)
        # The task has ended and nobody would take the event from the queue.
        if self._task is not None and self._task.done():
            is_over = self._rules.is_over(self.state)
            _answer(self._drained(), self.state if is_over else Unavailable(STOPPING))
        return await done

    def note(self, event: Event) -> None:
        """Queue an event without a waiting caller; it is retried while the database refuses."""
        self._enqueue(QueuedEvent(event))

    def _enqueue(self, queued: QueuedEvent[State, Event], *, urgent: bool = False) -> None:
        self._queue.put_nowait((not urgent, next(self._numbers), queued))

    async def _run(self) -> None:
        while not self._rules.is_over(self.state):
            taken = await self._next()
            queued = self.ahead.queued + taken
            try:
                await self._take(taken)
            # Cancelled by `stop`: what was taken from the queue is no longer in it, so answer it
            # here.
            except BaseException:
                _answer(queued, Unavailable(STOPPING))
                raise
        _answer(self._drained(), self.state)

    async def _next(self) -> list[QueuedEvent[State, Event]]:
        """Wait for events or the next tick; return none if the batch ahead is due before both."""
        tick_in_s, tick = self._rules.tick(self.ahead.state)
        tick_s = asyncio.get_running_loop().time() + tick_in_s
        try:
            async with asyncio.timeout_at(min(tick_s, self.ahead.until_s)):
                *_, first = await self._queue.get()
        except TimeoutError:
            return [QueuedEvent(tick)] if tick is not None and tick_s <= self.ahead.until_s else []
        return [first, *self._drained(self._rules.max_batch - 1)]

    async def _take(self, taken: list[QueuedEvent[State, Event]]) -> None:
        queued = self.ahead.queued + taken
        try:
            self._fold(taken)
            if not self._may_hold():
                await self._commit()
        except Unavailable as error:
            self._fall_back()
            self._rules.refused(error)
            _answer(queued, error)
            for one in queued:
                # No caller would repeat these events, so they stay queued until a commit succeeds.
                if one.done is None:
                    self._enqueue(one)
            await asyncio.sleep(self._rules.retry_s)
        except Exception as error:  # noqa: BLE001 -- its caller gets it
            self._fall_back()
            if len(queued) == 1:
                _answer(queued, error)
                self._rules.failed(queued[0].event, error)
                return
            # Bisect: an event that raises must not fail the others, and nothing tells which one it
            # is.
            for half in (queued[: len(queued) // 2], queued[len(queued) // 2 :]):
                self.ahead.until_s = -math.inf  # commits it at once, so that each half stands alone
                await self._take(half)

    def _fold(self, taken: list[QueuedEvent[State, Event]]) -> None:
        ahead = self.ahead
        ahead.queued += taken
        if taken:
            # From the first event of the batch on; later events do not prolong the wait.
            hold_until_s = asyncio.get_running_loop().time() + self._rules.hold_s
            ahead.until_s = min(ahead.until_s, hold_until_s)
        for event, after, effects in self._rules.fold(ahead.state, [x.event for x in taken]):
            ahead.state = after
            ahead.effects += effects
            if event is not None:
                ahead.steps.append((event, after))

    def _may_hold(self) -> bool:
        ahead = self.ahead
        has_time = asyncio.get_running_loop().time() < ahead.until_s
        has_room = len(ahead.steps) > 0 and len(ahead.queued) < self._rules.max_batch
        return has_time and has_room and self._rules.hold(ahead)

    async def _commit(self) -> None:
        batch, before = self.ahead, self.state
        if batch.steps:
            self.state = await self._rules.commit(before, batch)
        self.ahead = Batch(self.state)
        try:
            if batch.steps or batch.effects:
                self._rules.act(before, batch)
        except Exception:  # the batch is committed, whatever its observers make of it
            logger.exception("an effect failed", extra={"machine": self._name})
        _answer(batch.queued, self.state)

    def _fall_back(self) -> None:
        """Return to the state of the newest commit."""
        # Work that was started from this batch, such as reducing a round, must drop its result.
        self.ahead.is_lost = True
        self.ahead = Batch(self.state)

    def _drained(self, most: int | None = None) -> list[QueuedEvent[State, Event]]:
        size = self._queue.qsize()
        count = size if most is None else min(most, size)
        return [self._queue.get_nowait()[2] for _ in range(count)]


def _answer(queued: list[QueuedEvent[State, Event]], outcome: State | Exception) -> None:
    """Resolve the futures of the callers that have not left."""
    waiting = [one.done for one in queued if one.done is not None and not one.done.done()]
    for done in waiting:
        if isinstance(outcome, Exception):
            done.set_exception(outcome)
        else:
            done.set_result(outcome)
