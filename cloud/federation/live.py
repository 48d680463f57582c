"""A live run: events come in, are committed, and only then have effects.

A run is one task with one queue, so events have an order, and a batch of them is one commit. The
caller of `put` waits for that commit. Effects that take time (reducing, finishing) run beside the
queue and come back as events; those that are lost with the process are repeated by `Restarted`.

Contributions are folded at once and committed together with the event that closes their round, or
after `HOLD_S`. A round is reduced meanwhile, so the usual round is one commit (decision 0039). A
result is dropped if the updates that it was reduced from could not be committed.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

import sqlalchemy as sa

from triplane.cloud.federation import journal
from triplane.cloud.federation.journal import RunRecord
from triplane.cloud.federation.run_projection import RunProjection, follow
from triplane.cloud.store import Database
from triplane.proto.disk import NoRoom
from triplane.proto.errors import Corrupt, InvalidInput, TriplaneError, Unavailable
from triplane.unified_ir.federated.core.rules import due_s, lease_of
from triplane.unified_ir.federated.core.run import (
    ENDED,
    Answered,
    Arrived,
    Declined,
    Effect,
    Event,
    Failed,
    Finish,
    Judged,
    Outcome,
    Phase,
    Reduce,
    Refused,
    RunState,
    Scored,
    Stopped,
    Tell,
    Tick,
)

logger = logging.getLogger(__name__)

MAX_BATCH: Final = 256
"""Events in one commit."""
SNAPSHOT_EVENTS: Final = 256
"""Least number of events between two snapshots; a restart folds those after the newest."""
RETRY_S: Final = 1.0
"""Pause between tries to commit events without a waiting caller."""
MAX_RETRY_S: Final = 30.0
"""Between tries of work that finds no room; they begin at `RETRY_S` and double."""
HOLD_S: Final = 0.05
"""Longest time that a contribution waits for others that share its commit."""
CONTRIBUTIONS: Final = (Arrived, Answered, Scored, Refused, Declined)
COUNTED_S: Final = 0.25
"""Delay after which a device learns that its update counted, unless a new task says so."""
STOPPING: Final = "the cloud is stopping; say it again when it is back"

MakeEvent = Callable[[RunState, float], Event | None]
"""Makes an event from the current state and the time; None if it no longer applies."""
Write = Callable[[sa.Connection, RunProjection], None]
"""Writes in the transaction of an event; called with the projection after it."""


class Worker(Protocol):
    """Does what takes time. Each method gives the event it came to, and what to write with it."""

    async def reduce(
        self, entry: RunRecord, projection: RunProjection, order: Reduce
    ) -> tuple[MakeEvent, Write | None]:
        """The next shared state; None where the run's row stays as it is.

        projection: after the updates of the order, which may not be committed yet.
        """

    async def judged(self, entry: RunRecord, projection: RunProjection, order: Judged) -> None:
        """Handle the end of an evaluating round. Raises nothing: the run does not wait for it."""

    async def finish(self, entry: RunRecord, projection: RunProjection) -> tuple[MakeEvent, Write]:
        """The model of the last shared state."""

    def settled(
        self, old: RunRecord, new: RunRecord, before: RunProjection, after: RunProjection
    ) -> None:
        """Called after each commit, to remove files that are no longer needed."""


class Audience(Protocol):
    """Observers of commits."""

    def tell(self, device: str) -> None:
        """A device's work changed."""

    def moved_now(self, *, over: bool) -> None:
        """Something changed that people see. over: the run ended by it."""


@dataclass(eq=False, slots=True)
class _Put:
    """A queued event. done: None if no caller waits. data: of an update that came inline."""

    make: MakeEvent
    write: Write | None = None
    done: asyncio.Future[RunProjection] | None = None
    data: bytes = b""


@dataclass(eq=False, slots=True)
class _Ahead:
    """Events that were folded since the newest commit, and the callers that wait for their commit.

    projection: after the events. last: the newest projection that still has the round of the newest
    commit. arrived: inline updates, each with the event that names it. until_s: the latest time of
    the commit, on the loop's clock; None without events. is_lost: they could not be committed.
    """

    projection: RunProjection
    last: RunProjection
    puts: list[_Put] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    writes: list[tuple[Write, RunProjection]] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)
    arrived: list[tuple[Arrived, bytes]] = field(default_factory=list)
    until_s: float | None = None
    is_lost: bool = False


class LiveRun:
    """A prepared run. `projection` is as of the newest commit; `entry` is the run's row."""

    def __init__(
        self,
        db: Database,
        entry: RunRecord,
        projection: RunProjection,
        worker: Worker,
        audience: Audience,
        clock: Callable[[], float],
    ) -> None:
        self._db, self._worker, self._audience, self._clock = db, worker, audience, clock
        self.entry, self.projection = entry, projection
        self._ahead = _Ahead(projection, projection)
        self._queue: asyncio.Queue[_Put] = asyncio.Queue()
        self._last_s = projection.at_s
        self._ticked_s: float | None = None
        self._kept_at = 0  # so that a run that was read back is soon kept again
        self._work: set[asyncio.Task[None]] = set()
        self._counted: set[str] = set()  # devices that are not told yet that their update counted
        self._keeps = True  # small updates may be in the database
        self._no_commit = self._no_result = ""  # why it waits, while it does
        self._task: asyncio.Task[None] | None = None

    @property
    def waits(self) -> str:
        """Why it can write nothing down or store no file at the moment, or empty."""
        return self._no_commit or self._no_result

    @property
    def is_over(self) -> bool:
        """Whether the run has ended, so that no event changes it."""
        return self.projection.state.phase in ENDED

    def start(self) -> None:
        """Begin to take events."""
        self._task = asyncio.create_task(self._run(), name=f"run {self.entry.id}")

    async def stop(self) -> None:
        """End with the process; waiting callers get Unavailable."""
        tasks = [task for task in (self._task, *self._work) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for put in self._ahead.puts:
            _answer(put, Unavailable(STOPPING))
        self._answer_queued(Unavailable(STOPPING))

    async def put(self, make: MakeEvent, data: bytes = b"") -> RunProjection:
        """Apply an event and return the projection after its commit. Unavailable: it may be lost.

        data: of the update that it names, where it is in no file; kept in the same commit.
        """
        if self._task is None or self._task.done():
            if self.is_over:
                return self.projection
            raise Unavailable(STOPPING)
        done: asyncio.Future[RunProjection] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait(_Put(make, done=done, data=data))
        return await done

    def note(self, make: MakeEvent, write: Write | None = None) -> None:
        """Queue an event without a waiting caller; it is retried until it is committed."""
        self._queue.put_nowait(_Put(make, write))

    def held_update(self, sha256: bytes) -> bytes | None:
        """An inline update that is not committed yet; for any thread."""
        name = sha256.hex()
        matches = (data for event, data in list(self._ahead.arrived) if event.update.blob == name)
        return next(matches, None)

    async def _run(self) -> None:
        while not self.is_over:
            batch = await self._batch()
            puts = [*self._ahead.puts, *batch]
            try:
                await self._take(batch)
            except BaseException:
                for put in puts:
                    _answer(put, Unavailable(STOPPING))
                raise
        self._answer_queued(self.projection)

    def _answer_queued(self, outcome: RunProjection | Exception) -> None:
        while not self._queue.empty():
            _answer(self._queue.get_nowait(), outcome)

    async def _take(self, batch: list[_Put]) -> None:
        puts = [*self._ahead.puts, *batch]
        try:
            self._fold(batch)
            if self._may_wait():
                self._reduce_ahead()
            else:
                await self._commit()
        except Unavailable as error:
            self._fall_back()
            self._no_commit = self._waiting(error)
            await self._again(puts, error)
        except Exception as error:
            self._fall_back()
            if len(puts) > 1:  # what is wrong with one must not cost the others
                for put in puts:
                    self._ahead.until_s = -math.inf
                    await self._take([put])
                return
            logger.exception("an event was not taken", extra=self._facts())
            for put in puts:
                _answer(put, error)
                if put.write is not None:
                    self._halt(f"what it came to could not be kept: {error}")

    async def _batch(self) -> list[_Put]:
        """Events that wait, or a tick when it is due; none where the held ones are due."""
        due = due_s(self._ahead.projection.state)
        if due == self._ticked_s:  # a tick changes nothing a second time
            due = None
        tick_s = math.inf if due is None else max(0.0, due - self._clock())
        wait_s = min(tick_s, self._held_for_s())
        batch: list[_Put] = []
        try:
            async with asyncio.timeout(None if wait_s == math.inf else wait_s):
                batch.append(await self._queue.get())
        except TimeoutError:
            if due is None or tick_s > wait_s:
                return []
            tick_at_s, self._ticked_s = due, due
            return [_Put(lambda _, at_s: Tick(at_s=max(at_s, tick_at_s)))]
        while len(batch) < MAX_BATCH and not self._queue.empty():
            batch.append(self._queue.get_nowait())
        return batch

    def _held_for_s(self) -> float:
        """How much longer what was folded may wait for its commit."""
        until_s = self._ahead.until_s
        now_s = asyncio.get_running_loop().time()
        return math.inf if until_s is None else max(0.0, until_s - now_s)

    def _fold(self, batch: list[_Put]) -> None:
        ahead = self._ahead
        ahead.puts += batch
        if ahead.until_s is None and batch:
            ahead.until_s = asyncio.get_running_loop().time() + HOLD_S
        for put in batch:
            event = put.make(ahead.projection.state, max(self._last_s, self._clock()))
            if event is None:
                continue
            self._last_s = event.at_s
            after, effects = follow(ahead.projection, event)
            ahead.effects += effects
            before = ahead.projection
            if after.state is ahead.projection.state and put.write is None:
                continue  # it changed nothing: its sender is answered, nothing is written
            ahead.projection = after
            if _same_round(self.projection.state, after.state):
                ahead.last = after
            ahead.events.append(event)
            if put.write is not None:
                ahead.writes.append((put.write, after))
            if not put.data or not isinstance(event, Arrived):
                continue
            if _counts(after.state, event) and not _counts(before.state, event):  # else it has one
                ahead.arrived.append((event, put.data))

    def _may_wait(self) -> bool:
        """Whether nothing but the acknowledgement of contributions waits for the commit.

        A strategy outside hears of updates once, so they are committed before it does.
        """
        ahead, state = self._ahead, self._ahead.projection.state
        return (
            bool(ahead.events)
            and all(isinstance(event, CONTRIBUTIONS) for event in ahead.events)
            and _same_round(self.projection.state, state)
            and (state.phase is Phase.COLLECTING or self._may_reduce_ahead(state))
            and len(ahead.puts) < MAX_BATCH
            and self._held_for_s() > 0
        )

    def _may_reduce_ahead(self, state: RunState) -> bool:
        return state.phase is Phase.REDUCING and not self.entry.spec.HasField("flower")

    def _reduce_ahead(self) -> None:
        """Begin to reduce a round whose updates are not committed yet."""
        ahead = self._ahead
        orders = [effect for effect in ahead.effects if isinstance(effect, Reduce)]
        ahead.effects = [effect for effect in ahead.effects if not isinstance(effect, Reduce)]
        for order in orders:
            self._spawn(self._done(order, ahead), str(order))

    def _fall_back(self) -> None:
        """Go on from the newest commit."""
        self._ahead.is_lost = True
        self._ahead = _Ahead(self.projection, self.projection)

    async def _commit(self) -> None:
        ahead, old, before = self._ahead, self.entry, self.projection
        if ahead.events:
            small = {
                e.update.blob: x for e, x in ahead.arrived if _counts(ahead.projection.state, e)
            }
            self.entry = await self._db.write(
                lambda connection: self._write(connection, ahead, small)
            )
            if self._is_kept(ahead.projection):
                self._kept_at = ahead.projection.revision
            self._no_commit = ""
            same = _same_round(before.state, ahead.projection.state)
            self._keeps = bool(small) or (self._keeps and same)
        self._ahead = _Ahead(ahead.projection, ahead.projection)
        if ahead.events or ahead.effects:
            self._after(old, before, ahead)
        for put in ahead.puts:
            _answer(put, ahead.projection)

    def _write(
        self, connection: sa.Connection, ahead: _Ahead, small: dict[str, bytes]
    ) -> RunRecord:
        """small: inline updates of a round that is still open."""
        projection = ahead.projection
        journal.record(connection, self.entry.id, ahead.events, projection.revision)
        if self._keeps and not _same_round(self.projection.state, projection.state):
            journal.delete_small_updates(connection, self.entry.id)
        if small:
            journal.save_small_updates(connection, self.entry.id, small)
        for write, then in ahead.writes:
            write(connection, then)
        over = projection.state.phase in ENDED
        if self._is_kept(projection):
            journal.snapshot(connection, self.entry.id, projection)
        if over:
            ended_s = projection.state.since_s
            journal.change(connection, self.entry.id, live=False, ended_s=ended_s)
            journal.save_small_states(connection, self.entry.id, {})
        changed = over or ahead.writes
        return journal.entry(connection, self.entry.id) if changed else self.entry

    def _is_kept(self, projection: RunProjection) -> bool:
        """Whether this commit writes a snapshot, whose cost grows with members and rounds."""
        parts = len(projection.state.members) + len(projection.state.history)
        since = projection.revision - self._kept_at
        return projection.state.phase in ENDED or since >= max(SNAPSHOT_EVENTS, parts)

    def _after(self, old: RunRecord, before: RunProjection, done: _Ahead) -> None:
        self.projection = done.projection
        state, effects = done.projection.state, done.effects
        if (state.phase, state.turn) != (before.state.phase, before.state.turn):
            logger.info("run state", extra=self._facts(phase=state.phase.value, turn=state.turn[0]))
        for effect in effects:
            if isinstance(effect, Judged):
                self._spawn(self._worker.judged(self.entry, self.projection, effect), "judged")
            elif isinstance(effect, Reduce | Finish):
                self._spawn(self._done(effect, done), str(effect))
        try:
            self._worker.settled(old, self.entry, done.last, done.projection)
            devices = {effect.device: None for effect in effects if isinstance(effect, Tell)}
            self._tell(devices, goes_on=_same_round(before.state, state))
        except Exception:  # the event is committed whatever its audience makes of it
            logger.exception("not everybody was told", extra=self._facts())
        self._audience.moved_now(over=self.is_over)

    def _tell(self, devices: Mapping[str, None], *, goes_on: bool) -> None:
        """Send devices what changed for them; that an update counted comes with the next task.

        While the round goes on nothing depends on it, so it may come up to `COUNTED_S` later.
        """
        state = self.projection.state
        later = {d for d in devices if goes_on and _has_counted(state, d)}
        for device in devices:
            if device not in later:
                self._counted.discard(device)
                self._audience.tell(device)
        if goes_on:
            if later and not self._counted:
                asyncio.get_running_loop().call_later(COUNTED_S, self._tell_counted)
            self._counted |= later
        else:
            self._tell_counted()

    def _tell_counted(self) -> None:
        counted, self._counted = self._counted, set()
        for device in sorted(counted):
            self._audience.tell(device)

    def _spawn(self, work: Coroutine[None, None, None], what: str) -> None:
        task = asyncio.create_task(work, name=f"{what} of {self.entry.id}"[:80])
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    async def _done(self, effect: Reduce | Finish, basis: _Ahead) -> None:
        """Do what an effect asks for. basis: what it follows from; nothing comes of a lost one."""

        def note(make: MakeEvent, write: Write | None = None) -> None:
            self.note(lambda now, at_s: None if basis.is_lost else make(now, at_s), write)

        try:
            try:
                make, write = await self._outcome_of(effect, basis)
            finally:
                self._no_result = ""
        except (InvalidInput, Corrupt) as error:
            reason = f"the result cannot be used: {error}"
            logger.warning("run failed", extra=self._facts(reason=reason))
            note(lambda _, at_s: Failed(at_s=at_s, reason=reason))
        except TriplaneError as error:
            note(self._halting(str(error)))
        except Exception as error:
            logger.exception("run stopped", extra=self._facts())
            note(self._halting(f"internal error: {type(error).__name__}; see the cloud's log"))
        else:
            note(make, write)

    async def _outcome_of(
        self, effect: Reduce | Finish, basis: _Ahead
    ) -> tuple[MakeEvent, Write | None]:
        """Return the outcome of an effect; retries while the disk has no room."""
        phase, pause_s = basis.projection.state.phase, RETRY_S
        while True:
            try:
                if isinstance(effect, Reduce):
                    outcome = await self._worker.reduce(self.entry, basis.projection, effect)
                else:
                    outcome = await self._worker.finish(self.entry, basis.projection)
            except NoRoom as error:
                if self._ahead.projection.state.phase is not phase:  # a person stopped it meanwhile
                    raise
                self._no_result = self._waiting(error)
            else:
                return outcome
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_RETRY_S)

    def _waiting(self, error: Unavailable) -> str:
        """Log why the run waits and return it for people."""
        logger.warning("run waits", extra=self._facts(reason=str(error)))
        asyncio.get_running_loop().call_soon(lambda: self._audience.moved_now(over=False))
        return f"waits, and goes on by itself: {error}"

    def _halt(self, reason: str) -> None:
        self.note(self._halting(reason))

    def _halting(self, reason: str) -> MakeEvent:
        """Stops the run until a person has mended what is wrong."""
        text = f"{reason}; resume it when that is mended"
        logger.warning("run stopped", extra=self._facts(reason=text))
        return lambda _, at_s: Stopped(at_s=at_s, reason=text)

    async def _again(self, batch: list[_Put], error: Unavailable) -> None:
        """Refuse those who wait and keep the rest for a moment later."""
        for put in batch:
            if put.done is None:
                self._queue.put_nowait(put)
            else:
                _answer(put, error)
        await asyncio.sleep(RETRY_S)

    def _facts(self, **more: object) -> dict[str, object]:
        return {"run_id": self.entry.id, "revision": self.projection.revision, **more}


def _counts(state: RunState, event: Arrived) -> bool:
    """Whether the update is one that the current round counts."""
    held = lease_of(state, event.device)
    return held is not None and held.id == event.lease and held.update == event.update


def _has_counted(state: RunState, device: str) -> bool:
    """Whether the device has done its work in the current round."""
    held = lease_of(state, device)
    return held is not None and held.outcome is Outcome.COUNTED


def _same_round(one: RunState, other: RunState) -> bool:
    """Whether what came for the round of one state is needed in the other."""
    turns = [(x.number, x.evaluates, x.attempt) if x else None for x in (one.round, other.round)]
    return turns[0] == turns[1]


def _answer(put: _Put, outcome: RunProjection | Exception) -> None:
    if put.done is None or put.done.done():
        return
    if isinstance(outcome, Exception):
        put.done.set_exception(outcome)
    else:
        put.done.set_result(outcome)
