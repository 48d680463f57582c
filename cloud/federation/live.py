"""A live run: events come in, are committed, and only then have effects.

A run is one `Machine`, so events have an order, and a batch of them is one commit, for which the
callers of `put` wait. Effects that take time (reducing, finishing) run beside the queue and come
back as events; those that are lost with the process are repeated by `Restarted`.

Contributions are folded at once and committed together with the event that closes their round, or
after `HOLD_S`. A round is reduced meanwhile, so the usual round is one commit (decision 0039). A
result is dropped if the updates that it was reduced from could not be committed.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import sqlalchemy as sa

from triplane.cloud.federation import journal
from triplane.cloud.federation.journal import RunRecord
from triplane.cloud.federation.run_projection import RunProjection, follow, turn_of
from triplane.cloud.machine import Batch, Machine, MachineRules
from triplane.cloud.store import Database
from triplane.cloud.tasks import BackgroundTasks
from triplane.proto.disk import NoRoom
from triplane.proto.errors import Corrupt, InvalidInput, TriplaneError, Unavailable
from triplane.unified_ir.federated.core.lease_changes import lease_of
from triplane.unified_ir.federated.core.masked_step import MaskedStep
from triplane.unified_ir.federated.core.rules import due_s
from triplane.unified_ir.federated.core.run import (
    ENDED,
    Answered,
    Arrived,
    Declined,
    Effect,
    Effects,
    Event,
    Exchange,
    Exchanged,
    Failed,
    Finish,
    Judged,
    Masked,
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
"""Pause after a commit that the database refused."""
MAX_RETRY_S: Final = 30.0
"""Longest pause between tries of work that finds no disk space; the first is `RETRY_S`."""
HOLD_S: Final = 0.05
"""Longest time that a contribution waits for others that share its commit."""
CONTRIBUTIONS: Final = (Arrived, Answered, Masked, Scored, Refused, Declined)
MAY_WAIT: Final = (*CONTRIBUTIONS, Exchanged)
"""Events whose commit may wait for the result of the work that follows from them."""
COUNTED_S: Final = 0.25
"""Delay after which a device learns that its update counted, unless a new task says so."""

MakeEvent = Callable[[RunState, float], Event | None]
"""Makes an event from the current state and the time; None if it no longer applies."""
Write = Callable[[sa.Connection, RunProjection], bool]
"""Writes in the transaction of an event; called with the projection after it.

Returns whether it changed the run's row."""


class Worker(Protocol):
    """Does the long work of a run. Methods return an event, and what its transaction writes."""

    async def reduce(
        self, record: RunRecord, projection: RunProjection, order: Reduce
    ) -> tuple[MakeEvent, Write | None]:
        """Make the next shared state. The second result is None if nothing is written beside it.

        projection: after the updates of the order, which may not be committed yet.
        """

    async def exchange(
        self, record: RunRecord, projection: RunProjection, order: Exchange
    ) -> MakeEvent:
        """Take the answers to a step of a masked round."""

    def arrived(self, record: RunRecord, projection: RunProjection, devices: Sequence[str]) -> None:
        """Begin to add masked inputs of these devices to their sum; called after their commit."""

    async def judged(self, record: RunRecord, projection: RunProjection, order: Judged) -> None:
        """Handle the end of an evaluating round. Raises nothing: the run does not wait for it."""

    async def finish(self, record: RunRecord, projection: RunProjection) -> tuple[MakeEvent, Write]:
        """Register the model of the last shared state."""

    def settled(
        self, old: RunRecord, new: RunRecord, before: RunProjection, after: RunProjection
    ) -> None:
        """Called after each commit, to remove files that are no longer needed."""


class Audience(Protocol):
    """Observers of commits."""

    def tell(self, device: str) -> None:
        """Send a device its work, which changed."""

    def moved_now(self, *, over: bool) -> None:
        """Handle a change that is visible to people. over: the run ended."""


@dataclass(frozen=True, slots=True)
class RunChange:
    """An event, and what its transaction writes beside it.

    make: makes the event when its turn comes. data: the bytes of an inline update. event: the event
    once it is made.
    """

    make: MakeEvent
    write: Write | None = None
    data: bytes = b""
    event: Event | None = None


RunBatch = Batch[RunProjection, RunChange, Effect]


class LiveRun:
    """A prepared run. `projection` and `record`, its row, are as of the newest commit."""

    def __init__(
        self,
        db: Database,
        record: RunRecord,
        projection: RunProjection,
        worker: Worker,
        audience: Audience,
        clock: Callable[[], float],
    ) -> None:
        self._db, self._worker, self._audience, self._clock = db, worker, audience, clock
        self.record = self._former = record  # the row as of the newest commit, and before it
        self._machine = Machine(
            f"run {record.id}",
            projection,
            MachineRules(
                fold=self._fold, commit=self._commit, act=self._act, failed=self._failed,
                refused=self._refused, hold=self._hold, tick=self._tick,
                is_over=lambda _: self.is_over,
                max_batch=MAX_BATCH, hold_s=HOLD_S, retry_s=RETRY_S,
            ),
        )  # fmt: skip
        self._last_s = projection.at_s
        self._ticked_s: float | None = None
        self._kept_at = 0  # so that a run that was read back is soon kept again
        self._tasks = BackgroundTasks()
        self._counted: set[str] = set()  # devices that are not told yet that their update counted
        self._keeps = True  # small updates may be in the database
        self._no_commit = self._no_result = ""  # why it waits, while it does

    @property
    def projection(self) -> RunProjection:
        """The run as of the newest commit."""
        return self._machine.state

    @property
    def waits(self) -> str:
        """The reason why the run cannot commit or store a file at the moment, or empty."""
        return self._no_commit or self._no_result

    @property
    def is_over(self) -> bool:
        """Whether the run has ended, so that no event changes it."""
        return self.projection.state.phase in ENDED

    def start(self) -> None:
        """Begin to take events."""
        self._machine.start()

    async def stop(self) -> None:
        """End with the process; waiting callers get Unavailable."""
        await self._machine.stop()  # first, so that no work begins meanwhile
        # Lost effects are repeated after the next start, by `Restarted`.
        await self._tasks.stop()

    async def put(self, make: MakeEvent, data: bytes = b"") -> RunProjection:
        """Apply an event and return the projection after its commit. Unavailable: it may be lost.

        data: the bytes of the update that the event names, if they are not in a file; stored in the
        same commit.
        """
        return await self._machine.put(RunChange(make, data=data))

    def note(self, make: MakeEvent, write: Write | None = None) -> None:
        """Queue an event without a waiting caller; it is retried until it is committed."""
        self._machine.note(RunChange(make, write))

    def held_update(self, sha256: bytes) -> bytes | None:
        """Return an inline update that is not committed yet; for any thread."""
        name = sha256.hex()
        arrived = _inline_updates(list(self._machine.ahead.steps))
        return next((data for event, data in arrived if _blob_of(event) == name), None)

    def _fold(
        self, projection: RunProjection, changes: list[RunChange]
    ) -> Iterator[tuple[RunChange | None, RunProjection, Effects]]:
        for change in changes:
            # Times of events never decrease, even if the clock is set back: a replay must see the
            # same order.
            event = change.make(projection.state, max(self._last_s, self._clock()))
            if event is None:
                continue
            self._last_s = event.at_s
            after, effects = follow(projection, event)
            if after.state is projection.state and change.write is None:
                yield None, projection, effects  # nothing is written; its sender is answered
            else:
                projection = after
                yield replace(change, event=event), after, effects

    def _tick(self, projection: RunProjection) -> tuple[float, RunChange | None]:
        due = due_s(projection.state)
        if due is None or due == self._ticked_s:  # a tick changes nothing a second time
            return math.inf, None
        tick_at_s = due

        def make(_: RunState, at_s: float) -> Tick:
            self._ticked_s = tick_at_s
            return Tick(at_s=max(at_s, tick_at_s))

        return max(0.0, due - self._clock()), RunChange(make)

    def _hold(self, batch: RunBatch) -> bool:
        """Return whether the batch may wait, because only contributors wait for its commit.

        A complete round is reduced meanwhile (decision 0039), and the answers to a step of a masked
        round are taken. A Flower strategy remembers what it has received, so it gets updates only
        after their commit.
        """
        state = batch.state.state
        reduces = state.phase is Phase.REDUCING and not self.record.spec.HasField("flower")
        may_wait = (
            all(isinstance(change.event, MAY_WAIT) for change, _ in batch.steps)
            and _same_round(self.projection.state, state)
            and (state.phase is Phase.COLLECTING or reduces)
            # The next step of a masked round began: its devices wait for their documents.
            and (reduces or not any(isinstance(x.event, Exchanged) for x, _ in batch.steps))
        )
        if may_wait:
            orders = [effect for effect in batch.effects if isinstance(effect, Reduce | Exchange)]
            batch.effects = [x for x in batch.effects if not isinstance(x, Reduce | Exchange)]
            for order in orders:
                name = f"{type(order).__name__.lower()} {self.record.id}"
                self._tasks.spawn(self._done(order, batch), name)
        return may_wait

    def _refused(self, error: Unavailable) -> None:
        self._no_commit = self._waiting(error)

    def _failed(self, change: RunChange, error: Exception) -> None:
        logger.error("an event was not taken", extra=self._facts(), exc_info=error)
        if change.write is not None:
            self.note(self._halting(f"its result could not be stored: {error}"))

    async def _commit(self, before: RunProjection, batch: RunBatch) -> RunProjection:
        """Write the batch. An inline update has a row while the round that counts it is open."""
        after = batch.state
        small = {
            _blob_of(event): data
            for event, data in _inline_updates(batch.steps)
            if _counts(after.state, event) and not _counts(before.state, event)  # else it has one
        }
        # Kept for `settled`, which compares the files that the old and the new row name.
        self._former = self.record
        self.record = await self._db.write(lambda c: self._write(c, before, batch, small))
        if self._is_kept(after):
            self._kept_at = after.revision
        self._no_commit = ""
        self._keeps = bool(small) or (self._keeps and _same_round(before.state, after.state))
        return after

    def _write(
        self,
        connection: sa.Connection,
        before: RunProjection,
        batch: RunBatch,
        small: dict[str, bytes],
    ) -> RunRecord:
        after, run_id = batch.state, self.record.id
        events = [change.event for change, _ in batch.steps if change.event is not None]
        journal.append(connection, run_id, events, after.revision)
        if self._keeps and not _same_round(before.state, after.state):
            journal.delete_small_updates(connection, run_id)
        if small:
            journal.save_small_updates(connection, run_id, small)
        written = [x.write(connection, then) for x, then in batch.steps if x.write is not None]
        if self._is_kept(after):
            journal.snapshot(connection, run_id, after)
        is_over = after.state.phase in ENDED
        if is_over:
            journal.change(connection, run_id, live=False, ended_s=after.state.since_s)
            journal.save_small_states(connection, run_id, {})
        return journal.run_record(connection, run_id) if is_over or any(written) else self.record

    def _is_kept(self, projection: RunProjection) -> bool:
        """Return whether this commit writes a snapshot; its cost grows with members and rounds."""
        parts = len(projection.state.members) + len(projection.state.history)
        since = projection.revision - self._kept_at
        return projection.state.phase in ENDED or since >= max(SNAPSHOT_EVENTS, parts)

    def _act(self, before: RunProjection, batch: RunBatch) -> None:
        state, effects = self.projection.state, batch.effects
        if (state.phase, state.turn) != (before.state.phase, before.state.turn):
            logger.info("run state", extra=self._facts(phase=state.phase.value, turn=state.turn[0]))
        for ended in state.history[len(before.state.history) :]:
            if ended.returned:
                facts = self._facts(round=ended.number, reason=ended.returned)
                logger.warning("run returned to its last good state", extra=facts)
        for effect in effects:
            if state.round is None and isinstance(effect, Reduce | Exchange):
                continue  # a person stopped the run in the same commit
            if isinstance(effect, Judged):
                work = self._worker.judged(self.record, self.projection, effect)
                self._tasks.spawn(work, f"judge {self.record.id}")
            elif isinstance(effect, Reduce | Exchange | Finish):
                name = f"{type(effect).__name__.lower()} {self.record.id}"
                self._tasks.spawn(self._done(effect, batch), name)
        masked = [x.event for x, _ in batch.steps if isinstance(x.event, Masked)]
        if inputs := [x.device for x in masked if x.answer.step is MaskedStep.INPUTS]:
            self._worker.arrived(self.record, self.projection, inputs)
        last = before
        for _, after in batch.steps:
            last = after if _same_round(before.state, after.state) else last
        try:
            self._worker.settled(self._former, self.record, last, self.projection)
            devices = {effect.device: None for effect in effects if isinstance(effect, Tell)}
            self._tell(devices, goes_on=_same_round(before.state, state))
        finally:
            self._audience.moved_now(over=self.is_over)

    def _tell(self, devices: Mapping[str, None], *, goes_on: bool) -> None:
        """Send devices their changed documents.

        A settlement of an update that counted is sent with the next task, or up to `COUNTED_S`
        later: while the round goes on, nothing depends on it.
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

    async def _done(self, effect: Reduce | Exchange | Finish, basis: RunBatch) -> None:
        """Carry out an effect of the batch `basis`; the result of a lost batch is dropped."""

        def note(make: MakeEvent, write: Write | None = None) -> None:
            self.note(lambda now, at_s: None if basis.is_lost else make(now, at_s), write)

        try:
            try:
                make, write = await self._outcome_of(effect, basis)
            finally:
                self._no_result = ""
        except (InvalidInput, Corrupt) as error:
            # The same inputs would give the same error, so the run fails for good; other errors
            # only stop it, and a person may resume it.
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
        self, effect: Reduce | Exchange | Finish, basis: RunBatch
    ) -> tuple[MakeEvent, Write | None]:
        """Return the outcome of an effect; retries while the disk has no room."""
        phase, pause_s = basis.state.state.phase, RETRY_S
        while True:
            try:
                outcome: tuple[MakeEvent, Write | None]
                if isinstance(effect, Reduce):
                    outcome = await self._worker.reduce(self.record, basis.state, effect)
                elif isinstance(effect, Exchange):
                    make = await self._worker.exchange(self.record, basis.state, effect)
                    outcome = make, None
                else:
                    outcome = await self._worker.finish(self.record, basis.state)
            except NoRoom as error:
                if self._machine.ahead.state.state.phase is not phase:  # a person stopped the run
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

    def _halting(self, reason: str) -> MakeEvent:
        """Return an event that stops the run until a person resumes it."""
        text = f"{reason}; resume the run when that is fixed"
        logger.warning("run stopped", extra=self._facts(reason=text))
        return lambda _, at_s: Stopped(at_s=at_s, reason=text)

    def _facts(self, **more: object) -> dict[str, object]:
        return {"run_id": self.record.id, "revision": self.projection.revision, **more}


def _inline_updates(
    steps: Iterable[tuple[RunChange, RunProjection]],
) -> Iterator[tuple[Arrived | Masked, bytes]]:
    return ((x.event, x.data) for x, _ in steps if x.data and isinstance(x.event, Arrived | Masked))


def _blob_of(event: Arrived | Masked) -> str:
    return event.update.blob if isinstance(event, Arrived) else event.answer.blob


def _counts(state: RunState, event: Arrived | Masked) -> bool:
    """Return whether the current round counts this update, or this answer to a masked step."""
    held = lease_of(state, event.device)
    if held is None or held.id != event.lease:
        return False
    if isinstance(event, Masked):
        return event.answer in held.answers
    return held.update == event.update


def _has_counted(state: RunState, device: str) -> bool:
    """Return whether the device's work in the current round has counted."""
    held = lease_of(state, device)
    return held is not None and held.outcome is Outcome.COUNTED


def _same_round(one: RunState, other: RunState) -> bool:
    """Return whether two states are in the same round, so that its contributions are needed."""
    return turn_of(one.round) == turn_of(other.round)
