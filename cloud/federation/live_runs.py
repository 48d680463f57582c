"""The prepared runs of one cloud, by id, and the events that tell watchers of changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Final

from triplane.cloud.federation import journal
from triplane.cloud.federation.journal import RunRecord
from triplane.cloud.federation.live import Audience, LiveRun, MakeEvent, Worker
from triplane.cloud.federation.run_projection import RunProjection
from triplane.cloud.store import Database
from triplane.proto.disk import NoRoom
from triplane.proto.errors import NotFound
from triplane.unified_ir.federated.core.run import Restarted, RunState

logger = logging.getLogger(__name__)

KEPT_ENDED: Final = 16
"""Ended runs that stay here, so that devices still get their settlements unasked."""


class LiveRuns:
    """Runs that take events, oldest first, and the last few that ended.

    clock: seconds since 1970. epoch: names this process in the leases it gives.
    """

    def __init__(self, db: Database, clock: Callable[[], float], epoch: str) -> None:
        self._db, self._clock, self._epoch = db, clock, epoch
        self._runs: dict[str, LiveRun] = {}
        self._stored: dict[str, RunRecord] = {}  # of an earlier process, and not live yet
        self._waits: dict[str, str] = {}  # by run that is not live yet: why it waits
        # Each is set once, at the next change that people see and the next end of a run, and then
        # replaced: take it before looking.
        self.changed, self.ended = asyncio.Event(), asyncio.Event()

    def signal_change(self) -> None:
        """Wake all tasks that wait for `changed`."""
        event, self.changed = self.changed, asyncio.Event()
        event.set()

    def signal_end(self) -> None:
        """Wake all tasks that wait for `ended`."""
        event, self.ended = self.ended, asyncio.Event()
        event.set()

    def get(self, run_id: str) -> LiveRun | None:
        """Return the run of this whole id."""
        return self._runs.get(run_id)

    def all(self) -> list[LiveRun]:
        """Return every run here, also those that have ended."""
        return list(self._runs.values())

    def going(self) -> list[LiveRun]:
        """Return the runs that have not ended."""
        return [run for run in self._runs.values() if not run.is_over]

    def expect(self, records: Iterable[RunRecord]) -> None:
        """Record the prepared runs of an earlier process, before `add` makes one of them live."""
        self._stored = {record.id: record for record in records}

    def add(
        self, record: RunRecord, projection: RunProjection, worker: Worker, audience: Audience
    ) -> LiveRun:
        """Start to take events of a prepared run."""
        run = LiveRun(self._db, record, projection, worker, audience, self._clock)
        self._runs[record.id] = run
        self._stored.pop(record.id, None)
        run.start()
        return run

    def forget_ended(self) -> list[str]:
        """Drop all but the newest `KEPT_ENDED` ended runs and return their ids."""
        ended = [run_id for run_id, run in self._runs.items() if run.is_over][:-KEPT_ENDED]
        for run_id in ended:
            del self._runs[run_id]
        return ended

    async def drop(self, run: LiveRun) -> None:
        """Stop a run that could not begin and remove it."""
        del self._runs[run.record.id]
        self._stored[run.record.id] = run.record
        await run.stop()

    async def stop(self) -> None:
        """End with the process; every run goes on after the next start."""
        await asyncio.gather(*(run.stop() for run in self._runs.values()))

    async def put(self, run_id: str, make: MakeEvent) -> RunProjection:
        """Apply an event to a run. NotFound: it is not live."""
        if run_id not in self._runs:
            raise NotFound(f"run {run_id} is not live")
        return await self._runs[run_id].put(make)

    def restarted(self, _: RunState, at_s: float) -> Restarted:
        """Make the first event of a process: leases of another process do not count."""
        return Restarted(at_s=at_s, epoch=self._epoch)

    def wait_for_room(self, run_id: str, error: NoRoom) -> None:
        """Record that a full disk keeps a run from becoming live."""
        self.wait(run_id, f"waits, and goes on by itself: {error}")

    def wait(self, run_id: str, reason: str) -> None:
        """Record why a run does not become live yet."""
        logger.warning("run waits", extra={"run_id": run_id, "reason": reason})
        self._waits[run_id] = reason
        self.signal_change()

    def stop_waiting(self, run_id: str) -> None:
        """Record that nothing keeps the run from becoming live any longer."""
        self._waits.pop(run_id, None)

    def waits(self, run_id: str) -> str:
        """Return why the run cannot write at the moment; empty if it can."""
        run = self._runs.get(run_id)
        return run.waits if run else self._waits.get(run_id, "")

    def small_update(self, run_id: str, sha256: bytes) -> bytes | None:
        """Return an inline update, committed or not; for any thread."""
        run = self._runs.get(run_id)
        # Look in memory first: an update that moves to the database between the two looks is found
        # by the second one.
        data = run.held_update(sha256) if run is not None else None
        if data is not None:
            return data
        return self._db.read_now(lambda c: journal.small_update(c, run_id, sha256))

    async def last_projection(self, run_id: str) -> RunProjection | None:
        """Return the newest projection of a run, live or not; None if there is no such run."""
        if run_id in self._runs:
            return self._runs[run_id].projection
        return await self._db.read(lambda c: journal.last_projection(c, run_id)) if run_id else None

    def shares_plan(self, record: RunRecord) -> bool:
        """Return whether another prepared run that has not ended has the same plan."""
        assert record.prepared is not None
        others = [*(run.record for run in self.going()), *self._stored.values()]
        return any(
            other.id != record.id
            and other.prepared is not None
            and other.prepared.plan_digest == record.prepared.plan_digest
            for other in others
        )
