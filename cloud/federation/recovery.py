"""Resume the runs of an earlier process; those that lack disk space are retried."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable

from triplane.cloud.federation import journal
from triplane.cloud.federation.flower.runs import FlowerRuns
from triplane.cloud.federation.journal import RunRecord
from triplane.cloud.federation.live import MAX_RETRY_S, RETRY_S, LiveRun
from triplane.cloud.federation.live_runs import LiveRuns
from triplane.cloud.federation.masked_cohorts import MaskedCohorts
from triplane.cloud.federation.results import Results
from triplane.cloud.federation.run_projection import RunProjection
from triplane.cloud.federation.update_store import UpdateStore
from triplane.cloud.store import Database
from triplane.cloud.tasks import BackgroundTasks
from triplane.proto.disk import NoRoom
from triplane.proto.errors import TriplaneError, Unavailable
from triplane.unified_ir.federated.core.run import RunState

logger = logging.getLogger(__name__)

OpenRun = Callable[[RunRecord, RunProjection], LiveRun]
"""Makes a prepared run live."""


class Recovery:
    """Makes every run that has not ended live again."""

    def __init__(
        self,
        db: Database,
        runs: LiveRuns,
        results: Results,
        flower: FlowerRuns,
        updates: UpdateStore,
        *,
        masked: MaskedCohorts,
        open_run: OpenRun,
    ) -> None:
        self._db, self._runs, self._results, self._flower = db, runs, results, flower
        self._updates, self._masked, self._open_run = updates, masked, open_run
        self._late = BackgroundTasks()  # by id of the run that waits for room on the disk

    async def start(self) -> list[RunRecord]:
        """Make prepared runs live and return those that have no plan yet."""
        stored = await self._db.read(journal.live)
        states = [projection.state for _, projection in stored if projection is not None]
        needed = {name for state in states for name in _updates(state)}
        since_s = min([s.round.opened_s for s in states if s.round], default=math.inf)
        # Before any run is live: no device can upload a file that this would remove.
        await asyncio.to_thread(self._updates.sweep, needed, since_s)
        await asyncio.to_thread(self._results.noise.keep_only, {r.id for r, _ in stored})
        self._runs.expect(record for record, projection in stored if projection is not None)
        for record, projection in stored:
            if projection is not None:
                try:
                    await self._take_up(record, projection)
                except NoRoom as error:
                    self._take_up_late(record, projection, error)
        return [record for record, projection in stored if projection is None]

    async def stop(self) -> None:
        """End with the process."""
        await self._late.stop()

    def check_taken_up(self, run_ids: Iterable[str] | None = None) -> None:
        """Raise Unavailable if one of the runs, by default of all, is not live again yet."""
        late = self._late.running
        asked = late if run_ids is None else run_ids
        waiting = [run_id for run_id in asked if run_id in late]
        if waiting:
            raise Unavailable(
                f"the cloud has not resumed run {waiting[0]} since its start: it "
                f"{self._runs.waits(waiting[0])}; make room on the cloud's disk"
            )

    async def _take_up(self, record: RunRecord, projection: RunProjection) -> None:
        """Make a run live. NoRoom: the disk has no room for it yet."""
        # Before the run is live: a power cut may have damaged small states, which devices would
        # fetch.
        await self._results.restore(record, projection)
        if record.spec.HasField("flower"):
            await self._flower.take_up(record)
        await self._masked.take_up(record, projection)
        run = self._open_run(record, projection)
        try:
            await run.put(self._runs.restarted)  # first: open leases are of another process
        except NoRoom:
            await self._runs.drop(run)
            raise

    def _take_up_late(self, record: RunRecord, projection: RunProjection, error: NoRoom) -> None:
        self._runs.wait_for_room(record.id, error)
        self._late.spawn(self._retry(record, projection), f"take up {record.id}", key=record.id)

    async def _retry(self, record: RunRecord, projection: RunProjection) -> None:
        pause_s = RETRY_S
        while True:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_RETRY_S)
            try:
                await self._take_up(record, projection)
            except NoRoom as error:
                self._runs.wait_for_room(record.id, error)
            except TriplaneError:
                logger.exception("run not taken up", extra={"run_id": record.id})
            else:
                break
        self._runs.stop_waiting(record.id)
        self._runs.signal_change()


def _updates(state: RunState) -> list[str]:
    """Return the blobs of the updates that the open round holds."""
    leases = state.round.leases if state.round else ()
    blobs = [lease.update.blob for lease in leases if lease.update]
    return blobs + [answer.file for lease in leases for answer in lease.answers if answer.file]
