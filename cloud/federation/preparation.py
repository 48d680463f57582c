"""Runs that have no plan yet. Each is prepared in its own task, which may stop or fail the run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from triplane.cloud.federation import journal
from triplane.cloud.federation.journal import Prepared, RunRecord
from triplane.cloud.federation.live import MAX_RETRY_S, RETRY_S
from triplane.cloud.federation.live_runs import LiveRuns
from triplane.cloud.federation.results import Results
from triplane.cloud.store import Database
from triplane.cloud.tasks import BackgroundTasks
from triplane.proto.disk import NoRoom
from triplane.proto.errors import TriplaneError, Unavailable

logger = logging.getLogger(__name__)


class Preparation:
    """The runs without a plan. opened: called with a run once its plan is in the database.

    failed: called after a run failed, so that its devices learn of it. lacking: returns why devices
    would refuse a run's plan, which waits as long as that is not empty.
    """

    def __init__(
        self,
        db: Database,
        runs: LiveRuns,
        results: Results,
        clock: Callable[[], float],
        *,
        opened: Callable[[RunRecord], None],
        failed: Callable[[], None],
        lacking: Callable[[RunRecord, Prepared], Awaitable[str]],
    ) -> None:
        self._db, self._runs, self._results, self._clock = db, runs, results, clock
        self._opened, self._failed, self._lacking = opened, failed, lacking
        self._published = asyncio.Event()
        self._records: dict[str, RunRecord] = {}
        self._tasks = BackgroundTasks()  # by id of the run that is prepared

    @property
    def records(self) -> list[RunRecord]:
        """The runs without a plan, oldest first."""
        return list(self._records.values())

    def add(self, record: RunRecord) -> None:
        """Take a run without a plan; one that is not stopped is prepared."""
        self._records[record.id] = record
        if record.before == "preparing":
            self._start(record)

    def look_again(self) -> None:
        """Ask again for the signatures that runs wait for, because something was published."""
        event, self._published = self._published, asyncio.Event()
        event.set()

    def _start(self, record: RunRecord) -> None:
        self._tasks.spawn(self._prepare(record), f"prepare {record.id}", key=record.id)

    async def stop(self) -> None:
        """End with the process; preparing begins again with the next."""
        await self._tasks.stop()

    async def halt(self, run_id: str, reason: str) -> None:
        """Stop a run unless it has a plan, which it may have got just now."""
        task = self._tasks.running.get(run_id)
        if task is not None:
            task.cancel()
            # Wait for its end: if it has just written the plan, the run is live and not stopped
            # here.
            await asyncio.wait([task])
        self._runs.stop_waiting(run_id)
        if run_id in self._records:
            await self._change(run_id, before="stopped", reason=reason)

    async def resume(self, record: RunRecord) -> None:
        """Prepare a run that was stopped before it had a plan."""
        if record.before == "stopped":
            record = await self._change(record.id, before="preparing", reason="")
            # Asked after the change: a second `resume` may have begun the preparation meanwhile.
            if record.id not in self._tasks.running:
                self._start(record)

    async def _prepare(self, record: RunRecord) -> None:
        pause_s = RETRY_S
        while True:
            try:
                await self._prepare_once(record)
            except NoRoom as error:
                self._runs.wait_for_room(record.id, error)
            else:
                self._runs.stop_waiting(record.id)
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_RETRY_S)

    async def _prepare_once(self, record: RunRecord) -> None:
        """Make the plan and record the outcome. NoRoom: for the plan, or for the record."""
        try:
            prepared = await self._results.prepare(record, self._clock)
            if await self._waited_for_signature(record, prepared):
                # Files that no row names may have been collected meanwhile; the same ones again.
                prepared = await self._results.prepare(record, self._clock)
        # A full disk is temporary and retried without a person; other Unavailable errors stop the
        # run.
        except NoRoom:
            raise
        except Unavailable as error:
            await self._change(record.id, before="stopped", reason=f"{error}; resume it later")
        except TriplaneError as error:
            await self._fail(record, str(error))
        except Exception as error:
            logger.exception("run not prepared", extra={"run_id": record.id})
            reason = f"internal error: {type(error).__name__}; see the cloud's log"
            await self._fail(record, reason)
        else:
            await self._open(record, prepared)

    async def _waited_for_signature(self, record: RunRecord, prepared: Prepared) -> bool:
        """Return once the plan is signed, and whether that was not so from the beginning."""
        waited = False
        while True:
            published = self._published  # taken before the question, so that no answer is missed
            reason = await self._lacking(record, prepared)
            if not reason:
                self._runs.stop_waiting(record.id)
                return waited
            self._runs.wait(record.id, reason)
            waited = True
            await published.wait()

    async def _open(self, record: RunRecord, prepared: Prepared) -> None:
        await self._db.write(lambda c: journal.prepare(c, record.id, prepared))
        self._records.pop(record.id, None)
        self._opened(replace(record, prepared=prepared, before="", reason=""))
        logger.info("run prepared", extra={"run_id": record.id, "plan": prepared.plan_digest})
        self._runs.signal_change()

    async def _fail(self, record: RunRecord, reason: str) -> None:
        ended_s = self._clock()
        await self._change(record.id, before="failed", reason=reason, live=False, ended_s=ended_s)
        self._records.pop(record.id, None)
        self._failed()
        logger.warning("run failed", extra={"run_id": record.id, "reason": reason})

    async def _change(self, run_id: str, **columns: Any) -> RunRecord:
        def work(connection: sa.Connection) -> RunRecord:
            journal.change(connection, run_id, **columns)
            return journal.run_record(connection, run_id)

        record = self._records[run_id] = await self._db.write(work)
        self._runs.signal_change()
        return record
