"""Every run of a cloud: begun and steered by people, fed and told by devices' sessions.

A device that offered itself is a member of each run of its population that goes on. What it is told
is one document: a task for each open lease, oldest run first, and what became of its newest
contributions. Nothing that matters lives here only: after a start the rows and journals say all.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa

from triplane.cloud.federation import journal, messages
from triplane.cloud.federation.children import Children
from triplane.cloud.federation.flower.runs import FlowerRuns, Places
from triplane.cloud.federation.journal import Prepared, RunRecord
from triplane.cloud.federation.live import MAX_RETRY_S, RETRY_S, LiveRun, MakeEvent
from triplane.cloud.federation.presence import Presence
from triplane.cloud.federation.results import Results, means
from triplane.cloud.federation.run_projection import RunProjection
from triplane.cloud.federation.spec import check_population
from triplane.cloud.federation.update_store import LEASE_BYTES, UpdateStore, shown
from triplane.cloud.federation.work_documents import WorkDocuments
from triplane.cloud.identity import audit as audit_log
from triplane.cloud.registry.registry import Registry
from triplane.cloud.registry.values import KEY_BYTES
from triplane.cloud.store import Database
from triplane.proto import federation_pb2 as pb
from triplane.proto.disk import NoRoom
from triplane.proto.errors import Conflict, InvalidInput, NotFound, TriplaneError, Unavailable
from triplane.proto.transfer import BlobFolder
from triplane.unified_ir.federated.core.run import (
    ENDED,
    Answered,
    Arrived,
    Declined,
    Event,
    Joined,
    Left,
    Phase,
    Refused,
    Restarted,
    Resumed,
    RunState,
    Scored,
    Stopped,
)

logger = logging.getLogger(__name__)

ID_BYTES: Final = 8
MAX_RUN_CHARS: Final = 64
MAX_SOFTWARE_CHARS: Final = 200
MAX_EXAMPLES: Final = 1 << 32
"""That one device may offer."""
WAITS_S: Final = 0.5
"""After which it is said what a device waits for, so at most so often."""
MAX_LISTED: Final = 200
KEPT_ENDED: Final = 16
"""Ended runs whose settlements devices are still told unasked."""
Told = Callable[[str, pb.Work], None]
"""Sends a device its document, where it has a stream."""


def _nobody(model: str) -> None:
    raise InvalidInput(f"nothing here can release {model!r} by itself; leave release out")


@dataclass(slots=True)
class _Device:
    """A device with an open stream.

    answers: to contributions that no live run settles, by run and lease. saying: what it waits for
    is said then. is_asked: what it was last told of whether a run asks its population.
    """

    offer: pb.Offer | None = None
    saying: asyncio.TimerHandle | None = None
    is_asked: bool | None = None
    answers: dict[tuple[str, bytes], pb.Settlement] = field(default_factory=dict)


class Federation:
    """The runs of one cloud. All methods belong to one event loop.

    folder: for updates and the children's files. strategies: where the operator's own lie, of
    Flower's kind; without it in that folder. may_release: raises InvalidInput for a model whose
    versions nobody may release by themselves. clock: seconds since 1970. epoch: names this process
    in the leases it gives; random by default.
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
        audit: audit_log.RecordAudit = audit_log.record,
        may_release: Callable[[str], None] = _nobody,
        clock: Callable[[], float] = time.time,
        epoch: str = "",
    ) -> None:
        self._epoch = epoch or secrets.token_hex(8)
        self._may_release = may_release
        self._db, self._blobs, self._registry = db, blobs, registry
        self._audit, self._clock = audit, clock
        self.spool = UpdateStore(
            folder / "updates",
            blobs,
            self._small_update,
        )
        self._results = Results(
            db,
            blobs,
            self.spool,
            children or Children(folder / "children"),
            registry,
            self._shares_plan,
        )
        places = Places(folder / "flower", strategies or folder / "strategies")
        self._flower = FlowerRuns(
            db, blobs, self.spool, self._results, places=places, put=self._put
        )
        self._runs: dict[str, LiveRun] = {}
        self._waiting: dict[str, RunRecord] = {}  # runs without a plan yet
        self._preparing: dict[str, asyncio.Task[None]] = {}
        self._late: dict[str, asyncio.Task[None]] = {}  # runs that a full disk keeps from going on
        self._no_room: dict[str, str] = {}  # why runs that are not live wait
        self._devices: dict[str, _Device] = {}
        self._documents = WorkDocuments(self._runs.values, self._flower, blobs, clock)
        self._presence = Presence(self._write_presence)
        self._looks: set[tuple[str, str]] = set()  # (run, device) that a run is about to look at
        self._told: list[Told] = []
        self._moved, self._ended = asyncio.Event(), asyncio.Event()
        self._stopping = False

    async def start(self) -> None:
        """Take up the runs that an earlier process left; one that finds no room, when there is."""
        found = await self._db.read(journal.live)
        states = [projection.state for _, projection in found if projection is not None]
        needed = {name for state in states for name in _updates(state)}
        since_s = min([s.round.opened_s for s in states if s.round], default=math.inf)
        await asyncio.to_thread(self.spool.sweep, needed, since_s)
        for entry, projection in found:
            if projection is not None:
                try:
                    await self._take_up(entry, projection)
                except NoRoom as error:
                    self._take_up_late(entry, projection, error)
            else:
                self._waiting[entry.id] = entry
                if entry.before == "preparing":
                    self._prepare(entry)

    async def _take_up(self, entry: RunRecord, projection: RunProjection) -> None:
        """Have a run go on. NoRoom: it cannot yet, and is not live."""
        await self._results.restore(entry.id)
        if entry.spec.HasField("flower"):
            await self._flower.take_up(entry)
        self._begin(entry, projection)
        run = self._runs[entry.id]
        try:
            await run.put(self._restarted)  # before any other event: leases are of another process
        except NoRoom:
            del self._runs[entry.id]
            await run.stop()
            raise

    def _take_up_late(self, entry: RunRecord, projection: RunProjection, error: NoRoom) -> None:
        self._wait_for_room(entry, error)
        task = asyncio.create_task(self._took_up(entry, projection), name=f"take up {entry.id}")
        self._late[entry.id] = task
        task.add_done_callback(lambda _: self._late.pop(entry.id, None))

    async def _took_up(self, entry: RunRecord, projection: RunProjection) -> None:
        pause_s = RETRY_S
        while True:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_RETRY_S)
            try:
                await self._take_up(entry, projection)
            except NoRoom as error:
                self._wait_for_room(entry, error)
            except TriplaneError:
                logger.exception("run not taken up", extra={"run_id": entry.id})
            else:
                break
        self._no_room.pop(entry.id, None)
        self._move()

    def _wait_for_room(self, entry: RunRecord, error: NoRoom) -> None:
        logger.warning("run waits", extra={"run_id": entry.id, "reason": str(error)})
        self._no_room[entry.id] = f"waits, and goes on by itself: {error}"
        self._move()

    def _check_taken_up(self, runs: Iterable[str]) -> None:
        """Unavailable: one of the runs has not gone on since the cloud started."""
        late = next((run for run in runs if run in self._late), None)
        if late is not None:
            raise Unavailable(
                f"the cloud has not taken up run {late} since its start: it {self._no_room[late]}; "
                "make room on the cloud's disk"
            )

    def _restarted(self, _: RunState, at_s: float) -> Restarted:
        return Restarted(at_s=at_s, epoch=self._epoch)

    async def stop(self) -> None:
        """End with the process; every run goes on after `start`."""
        self._stopping = True
        self._presence.stop()
        waiting = [*self._preparing.values(), *self._late.values()]
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await asyncio.gather(*(run.stop() for run in self._runs.values()))
        await self._flower.stop()

    def on_work(self, told: Told) -> None:
        """Call with each device whose document changed, after the commit."""
        self._told.append(told)

    @property
    def moved(self) -> asyncio.Event:
        """Set at the next change of anything; take it before looking."""
        return self._moved

    @property
    def ended(self) -> asyncio.Event:
        """Set when a run is over; take it before looking."""
        return self._ended

    # People

    async def begin(self, request: pb.StartRequest, *, by: str) -> pb.Run:
        """Start a run; the same key gives the same one. InvalidInput, NotFound: it cannot be."""
        if len(request.key) != KEY_BYTES:
            raise InvalidInput(f"a key is {KEY_BYTES} random bytes, got {len(request.key)}")
        known = await self._db.read(lambda c: journal.by_key(c, request.key))
        spec = request.spec if known else await self._checked(request.spec)
        made = RunRecord(
            number=0,
            id=secrets.token_hex(ID_BYTES),
            key=request.key,
            asked=journal.asked_digest(request.spec),
            spec=spec,
            started_s=self._clock(),
            started_by=by,
        )

        def work(connection: sa.Connection) -> RunRecord:
            entry = journal.begin(connection, made)
            if entry.id == made.id:
                details = {"model": spec.model, "algorithm": means(spec)}
                self._note(connection, by, "federation.start", made.id, details)
            return entry

        entry = await self._db.write(work)
        if entry.id == made.id:
            self._waiting[entry.id] = entry
            self._prepare(entry)
            self._move()
            self._tell_whether_asked()
        return await self.run(entry.id)

    async def _checked(self, asked: pb.Spec) -> pb.Spec:
        spec = await asyncio.to_thread(self._flower.filled, asked)
        version = await self._registry.version(spec.model)
        spec.model = str(version)
        if spec.release:
            await asyncio.to_thread(self._may_release, version.model)
        if spec.HasField("flower"):
            going = [r.entry for r in self._live() if r.projection.state.phase is not Phase.STOPPED]
            entries = [*going, *self._waiting.values()]
            await self._flower.check(spec, sum(e.spec.HasField("flower") for e in entries))
        return spec

    async def runs(self) -> list[pb.Run]:
        """The newest, newest first, without their rounds."""
        found = await self._db.read(lambda c: journal.newest(c, MAX_LISTED))
        return [self._message(entry, projection, rounds=False) for entry, projection in found]

    async def run(self, id: str) -> pb.Run:  # noqa: A002 - the field's name
        """By id, its unique beginning, or "last". NotFound; Conflict where several begin so."""
        live = self._runs.get(id)
        if live is not None:
            return self._message(live.entry, live.projection)
        entry, projection = await self._found(id)
        return self._message(entry, projection)

    async def halt(self, id: str, *, reason: str, by: str) -> pb.Run:  # noqa: A002
        """Stop a run; it can be resumed. Conflict: it is over."""
        why = shown(reason) or f"stopped by {by}"
        entry = await self._steered(id, "federation.stop", by, reason)
        await self._halt_preparing(entry, why)
        run = self._runs.get(entry.id)
        if run is not None:
            await run.put(
                lambda s, at_s: None if s.phase is Phase.STOPPED else Stopped(at_s=at_s, reason=why)
            )
        return await self.run(entry.id)

    async def resume(self, id: str, *, reason: str, by: str) -> pb.Run:  # noqa: A002
        """Let a stopped run go on. Conflict: it is over."""
        why = shown(reason) or f"resumed by {by}"
        entry = await self._steered(id, "federation.resume", by, reason)
        run = self._runs.get(entry.id)
        if run is not None:
            await run.put(
                lambda s, at_s: Resumed(at_s=at_s, reason=why) if s.phase is Phase.STOPPED else None
            )
        elif entry.before == "stopped" and entry.id not in self._preparing:
            await self._change(entry, before="preparing", reason="")
            self._prepare(self._waiting[entry.id])
        return await self.run(entry.id)

    async def _steered(self, id: str, action: str, by: str, reason: str) -> RunRecord:  # noqa: A002
        entry, projection = await self._found(id)
        if entry.before == "failed" or (projection is not None and projection.state.phase in ENDED):
            raise Conflict(f"run {entry.id} is over; start a new one")
        self._check_taken_up([entry.id])
        await self._db.write(
            lambda c: self._note(c, by, action, entry.id, {"reason": shown(reason)})
        )
        return entry

    async def _found(self, id: str) -> tuple[RunRecord, RunProjection | None]:  # noqa: A002
        if not id or len(id) > MAX_RUN_CHARS:
            raise NotFound(f"no run {id[:MAX_RUN_CHARS]!r}; triplane federate ls names them")
        found = await self._db.read(lambda c: journal.find(c, id))
        if not found:
            raise NotFound(f"no run {id!r}; triplane federate ls names them")
        if len(found) > 1:
            raise Conflict(f"several runs begin with {id!r}; give more of the id")
        return found[0]

    def _small_update(self, run: str, sha256: bytes) -> bytes | None:
        """An inline update, committed or not; for threads."""
        live = self._runs.get(run)
        held = live.held_update(sha256) if live is not None else None
        if held is not None:
            return held
        return self._db.read_now(lambda c: journal.kept(c, run, sha256))

    def _message(
        self, entry: RunRecord, projection: RunProjection | None, *, rounds: bool = True
    ) -> pb.Run:
        live = self._runs.get(entry.id)
        down = sum(self._documents.given(live).values()) if live else 0
        waits = live.waits if live else self._no_room.get(entry.id, "")
        waiting = self._waits_of_devices() if live and not live.is_over else {}
        return messages.run_message(
            entry, projection, rounds=rounds, down=down, waits=waits, waiting=waiting
        )

    def _waits_of_devices(self) -> dict[str, str]:
        """Why devices with an open stream cannot work at the moment, of those that say so."""
        offers = {name: device.offer for name, device in self._devices.items()}
        return {name: shown(o.waits) for name, o in offers.items() if o is not None and o.waits}

    # Preparing

    def _prepare(self, entry: RunRecord) -> None:
        task = asyncio.create_task(self._prepared(entry), name=f"prepare {entry.id}")
        self._preparing[entry.id] = task
        task.add_done_callback(lambda _: self._preparing.pop(entry.id, None))

    async def _prepared(self, entry: RunRecord) -> None:
        pause_s = RETRY_S
        while True:
            try:
                await self._prepared_once(entry)
            except NoRoom as error:
                self._wait_for_room(entry, error)
            else:
                self._no_room.pop(entry.id, None)
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_RETRY_S)

    async def _prepared_once(self, entry: RunRecord) -> None:
        """NoRoom: for the plan, or to write down what came of it."""
        try:
            made = await self._results.prepare(entry, self._clock)
        except NoRoom:
            raise
        except Unavailable as error:
            await self._change(entry, before="stopped", reason=f"{error}; resume it later")
        except TriplaneError as error:
            await self._fail(entry, str(error))
        except Exception as error:
            logger.exception("run not prepared", extra={"run_id": entry.id})
            reason = f"internal error: {type(error).__name__}; see the cloud's log"
            await self._fail(entry, reason)
        else:
            await self._open(entry, made)

    async def _open(self, entry: RunRecord, made: Prepared) -> None:
        await self._db.write(lambda c: journal.prepare(c, entry.id, made))
        self._waiting.pop(entry.id, None)
        ready = replace(entry, prepared=made, before="", reason="")
        self._begin(ready, journal.first_projection(ready))
        self._runs[entry.id].note(self._restarted)  # its leases are those of this process, too
        logger.info("run prepared", extra={"run_id": entry.id, "plan": made.plan_digest})
        for name in list(self._devices):
            self._note_presence(self._runs[entry.id], name, _spend_nothing)
        self._move()

    def _begin(self, entry: RunRecord, projection: RunProjection) -> None:
        worker = self._flower if entry.spec.HasField("flower") else self._results
        run = LiveRun(self._db, entry, projection, worker, self, self._clock)
        ended = [id_ for id_, known in self._runs.items() if known.is_over]
        for forgotten in ended[:-KEPT_ENDED]:
            del self._runs[forgotten]
            self._documents.forget(forgotten)
        self._runs[entry.id] = run
        run.start()

    async def _halt_preparing(self, entry: RunRecord, why: str) -> None:
        """Only a run without a plan; it may have got one in this very moment."""
        task = self._preparing.get(entry.id)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        if entry.id in self._waiting:
            await self._change(entry, before="stopped", reason=why)

    async def _fail(self, entry: RunRecord, reason: str) -> None:
        await self._change(entry, before="failed", reason=reason, live=False, ended_s=self._clock())
        self._waiting.pop(entry.id, None)
        self._tell_whether_asked()
        logger.warning("run failed", extra={"run_id": entry.id, "reason": reason})

    async def _change(self, entry: RunRecord, **values: Any) -> None:
        def work(connection: sa.Connection) -> RunRecord:
            journal.change(connection, entry.id, **values)
            return journal.entry(connection, entry.id)

        self._waiting[entry.id] = await self._db.write(work)
        self._move()

    # Devices: what `Sessions` calls

    def greeting(self, name: str) -> pb.Work:
        """What a device is told when its stream opens.

        Unavailable: a run waits to be taken up. A document without its leases and settlements would
        have devices give up updates that counted.
        """
        self._check_taken_up(self._late)
        self._devices.setdefault(name, _Device())
        return self.work_of(name)

    async def take(self, name: str, message: Any) -> None:
        """What a device says; returns after the commit. InvalidInput: out of its limits."""
        if isinstance(message, pb.Offer):
            await self._offered(name, message)
        elif isinstance(message, pb.Contribution):
            await self._contributed(name, message)
        else:
            raise InvalidInput("a device sends offers and contributions")

    def left(self, name: str) -> None:
        """The device's stream ended."""
        device = self._devices.pop(name, None)
        if device and device.saying:
            device.saying.cancel()
        self._presence.changed(name)

    async def _offered(self, name: str, offer: pb.Offer) -> None:
        check_population(offer.population)
        if max(offer.examples, offer.held_out) > MAX_EXAMPLES:
            raise InvalidInput(f"a device offers at most {MAX_EXAMPLES} examples")
        if len(offer.software) > MAX_SOFTWARE_CHARS:
            raise InvalidInput(f"software has at most {MAX_SOFTWARE_CHARS} characters")
        offer.waits = shown(offer.waits)
        device = self._devices.setdefault(name, _Device())
        before, device.offer = device.offer, offer
        self._presence.changed(name)
        if before is None or before.population != offer.population:
            self.tell(name)
        if offer.waits != (before.waits if before else "") and device.saying is None:
            loop = asyncio.get_running_loop()
            device.saying = loop.call_later(WAITS_S, self._say_waits, name, device)

    def _say_waits(self, name: str, device: _Device) -> None:
        device.saying = None
        if device.offer is not None:
            logger.info("device waits", extra={"device": name, "reason": device.offer.waits})
            self._move()

    def _write_presence(self, name: str, spend: Callable[[], None]) -> None:
        """See `Presence`."""
        for run in self._live():
            self._note_presence(run, name, spend)

    def _note_presence(self, run: LiveRun, name: str, spend: Callable[[], None]) -> None:
        """Have a run look how the device stands, once for all that changes until its turn.

        spend: called with each event, also with one that is tried again.
        """
        looks = run.entry.id, name
        if looks in self._looks:
            return
        self._looks.add(looks)

        def make(state: RunState, at_s: float) -> Joined | Left | None:
            self._looks.discard(looks)
            event = self._presence_event(run, state, name, at_s)
            if event is not None:
                spend()
            return event

        run.note(make)

    def _presence_event(
        self, run: LiveRun, state: RunState, name: str, at_s: float
    ) -> Joined | Left | None:
        """How the device stands, where the run's state does not say so already."""
        member, offer = state.members.get(name), self._offer_to(run, name)
        is_there = member is not None and member.connected
        if offer is None:
            return Left(at_s=at_s, device=name) if is_there else None
        examples, held_out = offer.examples, offer.held_out
        if is_there and member and (member.examples, member.held_out) == (examples, held_out):
            return None
        return Joined(at_s=at_s, device=name, examples=examples, held_out=held_out)

    def _offer_to(self, run: LiveRun, name: str) -> pb.Offer | None:
        """What the device offers to the run now, where its stream is open."""
        device, spec = self._devices.get(name), run.entry.spec
        offer = device.offer if device is not None else None
        if offer is None or spec.population != offer.population or spec.flower.app > offer.app:
            return None
        return offer

    async def _contributed(self, name: str, told: pb.Contribution) -> None:
        if len(told.lease) != LEASE_BYTES or len(told.run) > MAX_RUN_CHARS:
            raise InvalidInput(f"a lease has {LEASE_BYTES} bytes and a run is named by its id")
        if told.WhichOneof("outcome") is None:
            raise InvalidInput("a contribution is an update, a score, or declined")
        run = self._runs.get(told.run)
        if run is None or run.is_over:
            await self._answer(name, told)
            return
        check = self._flower.check_reply if run.entry.spec.flower.app else None
        make = await self.spool.judged(run, name, told, check)
        data = told.update.inline if told.WhichOneof("outcome") == "update" else b""
        await run.put(weighed(make, self._documents.given(run).get(name, 0)), data)

    async def _answer(self, name: str, told: pb.Contribution) -> None:
        """Settle a contribution to a run that is over, from the run's last projection."""
        projection = await self._last_projection(told.run)
        member = projection.state.members.get(name) if projection else None
        answer = pb.Settlement(run=told.run, lease=told.lease, reason="its run is over")
        known = messages.settlements(told.run, member) if member else []
        answers = {(told.run, told.lease): answer, **{(x.run, x.lease): x for x in known}}
        self._devices.setdefault(name, _Device()).answers = answers
        self.tell(name)

    async def _last_projection(self, run: str) -> RunProjection | None:
        if run in self._runs:
            return self._runs[run].projection
        return await self._db.read(lambda c: journal.last_projection(c, run)) if run else None

    def tell(self, device: str) -> None:
        """See `live.Audience`."""
        if device in self._devices:
            work = self.work_of(device)
            for told in self._told:
                told(device, work)

    def moved_now(self, *, over: bool) -> None:
        """See `live.Audience`."""
        self._move()
        if over:
            ended, self._ended = self._ended, asyncio.Event()
            ended.set()
            self._tell_whether_asked()

    def work_of(self, name: str) -> pb.Work:
        """All the device shall do now, and what became of what it did."""
        device = self._devices.get(name)
        work = self._documents.work_of(name, device.answers if device else {})
        if device is not None and device.offer is not None:
            device.is_asked = device.offer.population in self._asked_populations()
            work.population_asked = device.is_asked
        return work

    def _asked_populations(self) -> set[str]:
        """Of the runs that are not over."""
        entries = [*(run.entry for run in self._live()), *self._waiting.values()]
        return {entry.spec.population for entry in entries}

    def _tell_whether_asked(self) -> None:
        """Tell the devices for which it changed whether a run asks their population."""
        asked = self._asked_populations()
        for name, device in list(self._devices.items()):
            if device.offer and device.is_asked is not (device.offer.population in asked):
                self.tell(name)

    async def _put(self, run: str, make: MakeEvent) -> RunProjection:
        """Have an event happen in a run. NotFound: it is not live."""
        if run not in self._runs:
            raise NotFound(f"run {run} is not live")
        return await self._runs[run].put(make)

    # Files of devices

    def check_readable(self, device: str, blob: bytes) -> None:
        """Raise unless an open task of the device names the blob; InvalidInput."""
        self._check_taken_up(self._late)
        self._documents.check_readable(device, blob)

    async def folder_for(self, device: str, sha256: bytes, size: int) -> BlobFolder:
        """Where a device's update goes; see `UpdateStore.admit`."""
        self._check_taken_up(self._late)
        return await self.spool.admit(self._live(), device, sha256, size)

    def _live(self) -> list[LiveRun]:
        return [run for run in self._runs.values() if not run.is_over]

    def _shares_plan(self, entry: RunRecord) -> bool:
        assert entry.prepared is not None
        digest = entry.prepared.plan_digest
        return any(
            run.entry.id != entry.id and run.entry.prepared.plan_digest == digest
            for run in self._live()
            if run.entry.prepared is not None
        )

    def _move(self) -> None:
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    def _note(
        self, connection: sa.Connection, by: str, action: str, subject: str, details: dict[str, Any]
    ) -> None:
        self._audit(
            connection,
            time_s=self._clock(),
            actor=by,
            action=action,
            subject=subject,
            details=details,
        )


def _spend_nothing() -> None:
    """That a run begins is no change of its devices."""


def weighed(make: MakeEvent, bytes_down: int) -> MakeEvent:
    """The event of a contribution, with what its device was given for it."""

    def made(state: RunState, at_s: float) -> Event | None:
        event = make(state, at_s)
        if isinstance(event, Arrived | Answered | Scored | Refused | Declined):
            return replace(event, bytes_down=bytes_down)
        return event

    return made


def _updates(state: RunState) -> list[str]:
    """Blobs of updates that the round at hand holds."""
    leases = state.round.leases if state.round else ()
    return [lease.update.blob for lease in leases if lease.update]
