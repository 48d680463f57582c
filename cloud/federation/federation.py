"""The federated runs of one cloud: people start, list, stop and resume them here.

Each concern has an owner: `live_runs` the runs that take events, `preparation` those without a
plan, `recovery` the start of the process, `device_sessions` the devices, their messages and files.
All that must survive the process is in the rows and journals of the database.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import sqlalchemy as sa

from triplane.cloud.federation import journal, messages
from triplane.cloud.federation.children import Children
from triplane.cloud.federation.device_sessions import MAX_RUN_CHARS, DeviceSessions, SendWork
from triplane.cloud.federation.flower.runs import FlowerRuns
from triplane.cloud.federation.journal import Prepared, RunRecord
from triplane.cloud.federation.live import LiveRun
from triplane.cloud.federation.live_runs import LiveRuns
from triplane.cloud.federation.masked_cohorts import MaskedCohorts
from triplane.cloud.federation.noise_store import NoiseStore
from triplane.cloud.federation.plan_signing import PlanSignatures
from triplane.cloud.federation.preparation import Preparation
from triplane.cloud.federation.recovery import Recovery
from triplane.cloud.federation.results import Results, algorithm_text
from triplane.cloud.federation.run_projection import RunProjection
from triplane.cloud.federation.update_store import UpdateStore, printable
from triplane.cloud.federation.work_documents import WorkDocuments
from triplane.cloud.identity import audit
from triplane.cloud.registry.registry import Registry
from triplane.cloud.registry.values import KEY_BYTES
from triplane.cloud.store import Database
from triplane.proto import federation_pb2 as pb
from triplane.proto.blobs import BlobFolder
from triplane.proto.errors import Conflict, InvalidInput, NotFound
from triplane.proto.roster import Roster
from triplane.unified_ir.federated.core.masked_round import is_masking
from triplane.unified_ir.federated.core.run import ENDED, Phase, Resumed, RunState, Stopped

ID_BYTES: Final = 8
MAX_LISTED: Final = 200
MASKED_STOP_S: Final = 20.0
"""Longest time for which a stop waits for a masked round whose devices were asked for an input."""


def _nobody(model: str) -> None:
    raise InvalidInput(f"this cloud cannot release {model!r} automatically; leave release out")


def _send_nothing(device: str, work: pb.Work) -> None:
    """Drop the work: there are no streams."""


class Federation:
    """The runs of one cloud. All methods belong to one event loop.

    folder: for updates and the children's files. strategies: folder with the operator's own Flower
    strategies, by default inside `folder`. send: sends a device its document if it has a stream.
    may_release: raises InvalidInput for a model whose versions are not released automatically.
    signatures: of plans, which a run waits for; without them, no run waits.
    clock: seconds since 1970. epoch: names this process in the leases it gives; random by default.
    """

    def __init__(
        self,
        db: Database,
        blobs: BlobFolder,
        registry: Registry,
        folder: Path,
        *,
        children: Children | None = None,
        strategies: Path | None = None,
        send: SendWork = _send_nothing,
        may_release: Callable[[str], None] = _nobody,
        signatures: PlanSignatures | None = None,
        clock: Callable[[], float] = time.time,
        epoch: str = "",
    ) -> None:
        self._db, self._registry, self._may_release = db, registry, may_release
        self._clock, self._signatures = clock, signatures
        self.live = LiveRuns(db, clock, epoch or secrets.token_hex(8))
        self.updates = UpdateStore(folder / "updates", blobs, self.live.small_update)
        children = children or Children(folder / "children")
        masked = MaskedCohorts(self.updates, blobs, self._roster)
        self._results = Results(
            db, blobs, self.updates, children, registry, self.live.shares_plan,
            noise=NoiseStore(folder / "noise"), masked=masked,
        )  # fmt: skip
        self._flower = FlowerRuns(
            db, blobs, self.updates, self._results, folder=folder / "flower",
            strategies=strategies or folder / "strategies", put=self.live.put,
        )  # fmt: skip
        self._documents = WorkDocuments(self.live.all, self._flower, masked, blobs, clock)
        self._preparation = Preparation(
            db, self.live, self._results, clock, opened=self._begin_prepared,
            failed=lambda: self.devices.tell_whether_asked(),  # noqa: PLW0108 -- made below
            lacking=self._lacking_signature,
        )  # fmt: skip
        self._recovery = Recovery(
            db, self.live, self._results, self._flower, self.updates,
            masked=masked, open_run=self._begin_live,
        )  # fmt: skip
        self.devices = DeviceSessions(
            self.live, self._preparation, self._recovery, self._documents, self.updates,
            flower=self._flower, masked=masked, send=send,
        )  # fmt: skip

    async def start(self) -> None:
        """Resume the runs of an earlier process; those that lack disk space are retried later."""
        for record in await self._recovery.start():
            self._preparation.add(record)

    async def stop(self) -> None:
        """End with the process; every run goes on after `start`."""
        self.devices.stop()
        await self._preparation.stop()
        await self._recovery.stop()
        await self.live.stop()
        await self._flower.stop()

    @property
    def moved(self) -> asyncio.Event:
        """Event that is set at the next change. Take it before reading, so none is missed."""
        return self.live.changed

    @property
    def ended(self) -> asyncio.Event:
        """Event that is set when a run ends. Take it before reading, so none is missed."""
        return self.live.ended

    async def begin(self, request: pb.StartRequest, *, by: str) -> pb.Run:
        """Start a run; a repeated request with the same key returns the same run.

        InvalidInput, NotFound: the request is wrong.
        """
        if len(request.key) != KEY_BYTES:
            raise InvalidInput(f"a key is {KEY_BYTES} random bytes, got {len(request.key)}")
        # A repeated request is not checked again: its model or strategy may have changed since.
        # `journal.begin` compares the request with the stored one.
        known = await self._db.read(lambda c: journal.by_key(c, request.key))
        spec = request.spec if known else await self._checked(request.spec)
        new = RunRecord(
            number=0,
            id=secrets.token_hex(ID_BYTES),
            key=request.key,
            asked=journal.asked_digest(request.spec),
            spec=spec,
            started_s=self._clock(),
            started_by=by,
        )

        def work(connection: sa.Connection) -> RunRecord:
            record = journal.begin(connection, new)
            if record.id == new.id:
                details = {"model": spec.model, "algorithm": algorithm_text(spec)}
                audit.record(connection, self._clock(), by, "federation.start", new.id, details)
            return record

        record = await self._db.write(work)
        # Another id means that this key began a run before, which is under way already.
        if record.id == new.id:
            self._preparation.add(record)
            self.live.signal_change()
            self.devices.tell_whether_asked()
        return await self.run(record.id)

    async def _checked(self, asked: pb.Spec) -> pb.Spec:
        spec = await asyncio.to_thread(self._flower.with_defaults, asked)
        version = await self._registry.version(spec.model)
        spec.model = str(version)
        if spec.release:
            await asyncio.to_thread(self._may_release, version.model)
        if spec.HasField("flower"):
            runs = [r for r in self.live.going() if r.projection.state.phase is not Phase.STOPPED]
            records = [*(run.record for run in runs), *self._preparation.records]
            await self._flower.check(spec, sum(r.spec.HasField("flower") for r in records))
        return spec

    def note_published(self) -> None:
        """Look again whether plans that runs wait for are signed now."""
        self._preparation.look_again()

    async def _lacking_signature(self, record: RunRecord, prepared: Prepared) -> str:
        if self._signatures is None:
            return ""
        version = await self._registry.version(record.spec.model)
        runs = (run.record.prepared for run in self.live.going())
        used = {p.plan_digest for p in runs if p is not None}
        return await asyncio.to_thread(
            self._signatures.lacking, record.id, record.spec, prepared, version.model_digest, used
        )

    def _begin_live(self, record: RunRecord, projection: RunProjection) -> LiveRun:
        worker = self._flower if record.spec.HasField("flower") else self._results
        for run_id in self.live.forget_ended():
            self._documents.forget(run_id)
        return self.live.add(record, projection, worker, self.devices)

    def _begin_prepared(self, record: RunRecord) -> None:
        run = self._begin_live(record, journal.first_projection(record))
        run.note(self.live.restarted)  # its leases are those of this process, too
        self.devices.introduce(run)

    async def runs(self) -> list[pb.Run]:
        """Return the newest runs without their rounds, newest first."""
        rows = await self._db.read(lambda c: journal.newest(c, MAX_LISTED))
        return [self._message(record, projection, rounds=False) for record, projection in rows]

    async def run(self, id: str) -> pb.Run:  # noqa: A002 - the field's name
        """Return a run by id, its unique beginning, or "last". NotFound; Conflict: ambiguous."""
        live = self.live.get(id)
        return self._message(*((live.record, live.projection) if live else await self._find(id)))

    async def halt(self, id: str, *, reason: str, by: str) -> pb.Run:  # noqa: A002
        """Stop a run; it can be resumed. Conflict: it is over."""
        why = printable(reason) or f"stopped by {by}"
        record = await self._record_change(id, "federation.stop", by, reason)
        # First end the preparation: the run may get its plan just now, and then it is live below.
        await self._preparation.halt(record.id, why)
        run = self.live.get(record.id)
        if run is not None:
            await self._stop(run, why)
        return await self.run(record.id)

    async def _stop(self, run: LiveRun, why: str) -> None:
        """Stop a live run, once no device masks its update for a round: that would spend it."""
        until_s, waits = time.monotonic() + MASKED_STOP_S, True

        def make(state: RunState, at_s: float) -> Stopped | None:
            nonlocal waits
            waits = is_masking(state) and time.monotonic() < until_s
            return None if waits or state.phase is Phase.STOPPED else Stopped(at_s=at_s, reason=why)

        while waits:
            moved = self.moved
            await run.put(make)
            if waits:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(until_s - time.monotonic()):
                        await moved.wait()

    async def resume(self, id: str, *, reason: str, by: str) -> pb.Run:  # noqa: A002
        """Let a stopped run go on. Conflict: it is over."""
        why = printable(reason) or f"resumed by {by}"
        record = await self._record_change(id, "federation.resume", by, reason)
        run = self.live.get(record.id)
        if run is not None:
            await run.put(
                lambda s, at_s: Resumed(at_s=at_s, reason=why) if s.phase is Phase.STOPPED else None
            )
        else:
            await self._preparation.resume(record)
        return await self.run(record.id)

    async def _record_change(self, id: str, action: str, by: str, reason: str) -> RunRecord:  # noqa: A002
        """Record a person's change of a run that has not ended, and return the run."""
        record, projection = await self._find(id)
        if record.before == "failed" or (
            projection is not None and projection.state.phase in ENDED
        ):
            raise Conflict(f"run {record.id} is over; start a new one")
        self._recovery.check_taken_up([record.id])
        await self._db.write(
            lambda c: audit.record(
                c, self._clock(), by, action, record.id, {"reason": printable(reason)}
            )
        )
        return record

    async def _find(self, id: str) -> tuple[RunRecord, RunProjection | None]:  # noqa: A002
        if not id or len(id) > MAX_RUN_CHARS:
            raise NotFound(f"no run {id[:MAX_RUN_CHARS]!r}; triplane federate ls names them")
        matches = await self._db.read(lambda c: journal.find(c, id))
        if not matches:
            raise NotFound(f"no run {id!r}; triplane federate ls names them")
        if len(matches) > 1:
            raise Conflict(f"several runs begin with {id!r}; give more of the id")
        return matches[0]

    def _message(
        self, record: RunRecord, projection: RunProjection | None, *, rounds: bool = True
    ) -> pb.Run:
        live = self.live.get(record.id)
        return messages.run_message(
            record,
            projection,
            rounds=rounds,
            down=sum(self._documents.bytes_down(live).values()) if live else 0,
            waits=self.live.waits(record.id),
            waiting=self.devices.waiting() if live and not live.is_over else {},
            roster=roster.version if (roster := self._roster()) else 0,
        )

    def _roster(self) -> Roster | None:
        return self._signatures.roster() if self._signatures else None
