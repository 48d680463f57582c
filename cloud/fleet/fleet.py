"""The live fleet: every change is computed, committed, and then announced (`cloud/machine.py`).

The next state is computed from the one before (`state.py`, pure), and the difference is committed
in one transaction with its audit entries. Sessions and watchers are notified after that. A change
that has begun is finished even if its caller leaves.

Bundles and signatures are polled while a rollout waits for them, so a crash at any instant costs
only time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any, Final, Never, Protocol

import sqlalchemy as sa

from triplane.cloud.fleet import messages, state, storage
from triplane.cloud.fleet.deploying import ResolvedDeploy, begin_rollout
from triplane.cloud.fleet.incidents import newest_incidents, record_incidents
from triplane.cloud.fleet.reports import check_report
from triplane.cloud.fleet.state import FleetNode, FleetState, RolloutRecord
from triplane.cloud.fleet.storage import load_rollouts
from triplane.cloud.fleet.tables import ROLLOUTS
from triplane.cloud.fleet.values import (
    Abort,
    BundleFailed,
    BundleReady,
    Event,
    Limit,
    Pause,
    Resume,
)
from triplane.cloud.identity import audit
from triplane.cloud.machine import Batch, Machine, MachineRules
from triplane.cloud.store import Database
from triplane.proto import fleet_pb2 as pb
from triplane.proto.documents import MAX_LABELS, check_label
from triplane.proto.errors import Conflict, InvalidInput, NotFound, TriplaneError, Unavailable

logger = logging.getLogger(__name__)

PERIOD_S: Final = 1.0
"""Time between two looks at deadlines, bundles and signatures."""
MAX_BATCH: Final = 256
"""Largest number of changes and reports in one transaction."""
MAX_WAITING: Final = 10_000
"""Largest number of reports that wait to be written. Others are refused and sent again later."""
ID_BYTES: Final = 4


class Bundles(Protocol):
    """The source of versions and bundles."""

    async def resolve(self, reference: str) -> tuple[str, int]:
        """Return the model and version that a reference means now. NotFound, InvalidInput."""
        ...

    async def look(
        self, model: str, version: int, target: str, role: str
    ) -> BundleReady | BundleFailed | None:
        """Return the state of a bundle and its signature; starts a conversion without waiting."""
        ...

    async def limit(self, model: str, version: int, role: str) -> Limit | None:
        """Return the limit on nodes for a release by this role; None for all nodes."""
        ...


@dataclass(frozen=True, slots=True)
class AuditedChange:
    """The audit entry of a change."""

    actor: str
    action: str
    subject: str
    details: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class FleetChange:
    """A change of the fleet with its audit entry, or the report of a node with its incidents."""

    make: Callable[[FleetState], FleetState] = lambda fleet: fleet
    audited: AuditedChange | None = None
    report: tuple[str, pb.Report] | None = None
    incidents: Sequence[tuple[str, pb.Incident]] = ()


FleetBatch = Batch[FleetState, FleetChange, Never]


class LiveFleet:
    """The fleet of one cloud process; its methods belong to one event loop.

    Unavailable: the database refused, and nothing was changed.
    """

    def __init__(
        self,
        database: Database,
        bundles: Bundles,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._database, self._bundles, self._clock = database, bundles, clock
        rules = MachineRules(
            fold=self._fold, commit=self._commit, act=self._act, refused=self._refused,
            failed=self._failed, max_batch=MAX_BATCH,
        )  # fmt: skip
        self._machine = Machine("fleet", FleetState(), rules)
        self._reports_waiting = 0
        self._nudged = asyncio.Event()
        self.moved = asyncio.Event()
        """Event that is set at the next change, then replaced. Take it before reading."""
        self._on_desired: list[Callable[[FleetNode], None]] = []
        self._on_report: list[Callable[[str, pb.Report], None]] = []
        self._rollouts_task: asyncio.Task[None] | None = None

    # Life

    async def start(self) -> None:
        """Load the stored fleet and continue its rollouts."""
        self._machine.start(await self._database.read(storage.load))
        self._rollouts_task = asyncio.create_task(self._go_on(), name="fleet rollouts")

    async def stop(self) -> None:
        """Finish the changes that have begun; reports that wait are refused."""
        if self._rollouts_task is not None:
            self._rollouts_task.cancel()
            await asyncio.gather(self._rollouts_task, return_exceptions=True)
            # An empty change at the end of the queue: when it is done, all changes before it are
            # committed.
            last = self._machine.put(FleetChange(), urgent=True)
            await asyncio.gather(last, return_exceptions=True)
        await self._machine.stop()

    def on_desired(self, callback: Callable[[FleetNode], None]) -> None:
        """Call with each node whose desired document changed, after the commit."""
        self._on_desired.append(callback)

    def on_report(self, callback: Callable[[str, pb.Report], None]) -> None:
        """Call with each node's report, without its incidents, after the commit."""
        self._on_report.append(callback)

    def nudge(self) -> None:
        """Look at bundles and signatures now: one of them may have changed."""
        self._nudged.set()

    # Asking

    @property
    def _fleet(self) -> FleetState:
        return self._machine.state

    def nodes(self) -> list[FleetNode]:
        """Return all nodes that have not left the fleet, by name."""
        return sorted((n for n in self._fleet.nodes.values() if not n.gone), key=lambda n: n.name)

    def node(self, name: str) -> FleetNode:
        """Return one node. NotFound."""
        node = self._fleet.nodes.get(name)
        if node is None or node.gone:
            raise NotFound(f"no node {name[:100]!r}; triplane fleet ls names them")
        return node

    async def rollouts(self, most: int) -> list[RolloutRecord]:
        """Return the newest rollouts without their nodes, newest first."""
        return await self._database.read(lambda connection: storage.load_heads(connection, most))

    async def rollout(self, id: str) -> RolloutRecord:  # noqa: A002 - the field's name
        """Return a rollout by its id, the start of it, or "last". NotFound; Conflict: ambiguous."""
        ids = await self._database.read(lambda connection: storage.find_ids(connection, id))
        if not ids or not id:
            raise NotFound(f"no rollout {id[:100]!r}; triplane rollout ls names them")
        if len(ids) > 1 and id not in ids:
            raise Conflict(f"several rollouts begin with {id!r}: {', '.join(ids)}, ...")
        rollout_id = id if id in ids else ids[0]
        return self._fleet.rollouts.get(rollout_id) or await self._ended(rollout_id)

    async def incidents(self, most: int) -> list[tuple[str, pb.Incident]]:
        """Return the newest incidents with their nodes, newest first."""
        return await self._database.read(lambda connection: newest_incidents(connection, most))

    # Nodes

    async def add_node(self, name: str, labels: Mapping[str, str]) -> None:
        """Add an enrolled node. One that is a node already keeps its labels."""
        known = self._fleet.nodes.get(name)
        if known is not None and not known.gone:
            return
        for key, value in labels.items():
            check_label(key, value)

        def make(fleet: FleetState) -> FleetState:
            before = fleet.nodes.get(name, FleetNode(name=name, gone="new"))
            if not before.gone:
                return fleet
            # A token without labels does not clear them: the machine has not moved.
            kept = dict(labels) or before.labels
            return state.with_node(fleet, replace(before, gone="", labels=kept))

        await self._change(make)

    async def remove_node(self, name: str, reason: str) -> None:
        """Remove a revoked node: it no longer counts in any rollout."""
        await self._change_node(name, lambda node: replace(node, gone=reason or "revoked"))

    async def set_labels(
        self, name: str, *, put: Mapping[str, str], remove: Sequence[str], by: str
    ) -> FleetNode:
        """Set and remove labels of a node."""
        for key, value in put.items():
            check_label(key, value)

        def make(node: FleetNode) -> FleetNode:
            labels = {k: v for k, v in node.labels.items() if k not in remove} | dict(put)
            if len(labels) > MAX_LABELS:
                raise InvalidInput(f"a node has at most {MAX_LABELS} labels, got {len(labels)}")
            return replace(node, labels=labels)

        self.node(name)
        audited = AuditedChange(by, "node.labels", name, {"set": dict(put), "remove": list(remove)})
        await self._change_node(name, make, audited)
        return self.node(name)

    async def cordon(self, name: str, *, cordoned: bool, by: str) -> FleetNode:
        """Cordon a node, so that it gets no new versions, or uncordon it."""
        self.node(name)
        audited = AuditedChange(by, "node.cordon" if cordoned else "node.uncordon", name, {})
        await self._change_node(name, lambda node: replace(node, cordoned=cordoned), audited)
        return self.node(name)

    async def report(self, name: str, report: pb.Report) -> None:
        """Take a node's report; return after its commit. InvalidInput: it breaks a limit."""
        check_report(report)
        if self._reports_waiting >= MAX_WAITING:
            raise Unavailable(f"{MAX_WAITING} reports wait to be written; report again later")
        incidents = [(name, incident) for incident in report.incidents]
        kept = pb.Report()
        kept.CopyFrom(report)
        # Incidents have a table of their own; the stored report would repeat them at every write.
        kept.ClearField("incidents")
        change = FleetChange(report=(name, kept), incidents=incidents)
        writing = asyncio.ensure_future(self._machine.put(change))
        self._reports_waiting += 1  # until it is written: it is in the queue if its sender leaves
        writing.add_done_callback(self._report_left_queue)
        try:
            # The report is committed even if its sender leaves: it may share a transaction with
            # others.
            await asyncio.shield(writing)
        except Exception as error:
            raise Unavailable("the report could not be written; report again") from error

    def _report_left_queue(self, writing: asyncio.Future[FleetState]) -> None:
        self._reports_waiting -= 1
        if not writing.cancelled():
            writing.exception()  # its sender, which gets it, may have left

    # Rollouts

    async def deploy(self, request: pb.DeployRequest, *, by: str) -> RolloutRecord:
        """Begin a rollout; a repeated request with the same key returns the same rollout.

        Conflict: another rollout of the model is running. NotFound: no such version, or no node.
        """
        messages.check_request(request)
        known = await self._by_key(request.key)
        if known is not None:
            return known
        model, version = await self._bundles.resolve(request.reference)
        limit = await self._bundles.limit(model, version, request.role)
        rollout_id = f"r-{secrets.token_hex(ID_BYTES)}"
        asked_for = pb.DeployRequest()
        asked_for.CopyFrom(request)
        asked_for.selector = asked_for.selector or "all"

        def make(fleet: FleetState) -> FleetState:
            # Checked again in the queue: a repeated request may have been computed meanwhile.
            if any(p.request.key == request.key for p in fleet.rollouts.values()):
                return fleet
            asked = ResolvedDeploy(rollout_id, asked_for, model, version, limit, by, self._clock())
            return begin_rollout(fleet, asked)

        details = {"model": model, "version": version, "selector": asked_for.selector}
        await self._change(make, AuditedChange(by, "rollout.deploy", rollout_id, details))
        begun_rollout = await self._by_key(request.key)
        assert begun_rollout is not None
        # Look before the answer, which then says whether a bundle or a signature is missing. The
        # rollout has begun, so an error here is not the caller's: the next look tries again.
        with contextlib.suppress(TriplaneError):
            await self._look_for(begun_rollout)
        self.nudge()
        return await self.rollout(begun_rollout.rollout.id)

    async def pause(self, id: str, *, reason: str, by: str) -> RolloutRecord:  # noqa: A002
        """Open no wave until it is resumed. Conflict: the rollout has ended."""
        reason = messages.checked_reason(reason)
        audited = AuditedChange(by, "rollout.pause", "", {"reason": reason})
        return await self._steer(id, Pause(reason or f"paused by {by}"), audited)

    async def resume(self, id: str, *, reason: str = "", by: str) -> RolloutRecord:  # noqa: A002
        """Resume a rollout; failed nodes are retried. Conflict: it has ended."""
        reason = messages.checked_reason(reason)
        note = f"resumed by {by}" + (f": {reason}" if reason else "")
        audited = AuditedChange(by, "rollout.resume", "", {"reason": reason})
        return await self._steer(id, Resume(note), audited)

    async def abort(self, id: str, *, reason: str, revert: bool, by: str) -> RolloutRecord:  # noqa: A002
        """End a rollout; nodes that did not commit keep what they had. Conflict: it has ended."""
        reason = messages.checked_reason(reason)
        event = Abort(reason or f"aborted by {by}", revert)
        details = {"reason": reason, "revert": revert}
        return await self._steer(id, event, AuditedChange(by, "rollout.abort", "", details))

    async def _steer(self, id: str, event: Event, audited: AuditedChange) -> RolloutRecord:  # noqa: A002
        rollout_id = (await self.rollout(id)).rollout.id

        if rollout_id not in self._fleet.rollouts:  # it has ended, which may forbid the event
            ended = FleetState(rollouts={rollout_id: await self._ended(rollout_id)})
            state.after_event(ended, rollout_id, event, self._clock())
        await self._change(self._applying(rollout_id, event), replace(audited, subject=rollout_id))
        self.nudge()
        return await self.rollout(rollout_id)

    def _applying(self, rollout_id: str, event: Event) -> Callable[[FleetState], FleetState]:
        def make(fleet: FleetState) -> FleetState:
            if rollout_id not in fleet.rollouts:
                return fleet
            return state.after_event(fleet, rollout_id, event, self._clock())

        return make

    async def _by_key(self, key: bytes) -> RolloutRecord | None:
        for record in self._fleet.rollouts.values():
            if record.request.key == key:
                return record
        records = await self._database.read(lambda c: load_rollouts(c, ROLLOUTS.c.key == key))
        return records[0] if records else None

    async def _ended(self, rollout_id: str) -> RolloutRecord:
        which = ROLLOUTS.c.id == rollout_id
        return (await self._database.read(lambda c: load_rollouts(c, which)))[0]

    # Changing

    async def _change_node(
        self,
        name: str,
        make: Callable[[FleetNode], FleetNode],
        audited: AuditedChange | None = None,
    ) -> None:
        def make_fleet(fleet: FleetState) -> FleetState:
            before = fleet.nodes.get(name)
            if before is None or before.gone or (after := make(before)) == before:
                return fleet
            return state.after_nodes_changed(state.with_node(fleet, after), self._clock())

        await self._change(make_fleet, audited)

    async def _change(
        self, make: Callable[[FleetState], FleetState], audited: AuditedChange | None = None
    ) -> None:
        await self._machine.put(FleetChange(make, audited), urgent=True)

    def _fold(
        self, fleet: FleetState, changes: list[FleetChange]
    ) -> Iterator[tuple[FleetChange, FleetState, Sequence[Never]]]:
        """Apply changes in their order; reports that come together settle their rollouts once."""
        for is_report, group in groupby(changes, lambda change: change.report is not None):
            if is_report:
                taken = list(group)
                reports = [change.report for change in taken if change.report is not None]
                fleet = state.after_reports(fleet, reports, self._clock())
                yield from ((change, fleet, ()) for change in taken)
                continue
            for change in group:
                before, fleet = fleet, change.make(fleet)
                if fleet is not before:
                    yield change, fleet, ()

    async def _commit(self, before: FleetState, batch: FleetBatch) -> FleetState:
        after = batch.state
        said = [x for change, _ in batch.steps for x in change.incidents if x[0] in after.nodes]

        def work(connection: sa.Connection) -> None:
            storage.save(connection, before, after)
            record_incidents(connection, said)
            for change, _ in batch.steps:
                if change.audited is not None:
                    audit.record(connection, time_s=self._clock(), **asdict(change.audited))

        await self._database.write(work)
        # Only after the commit, which has written their last state.
        return state.without_ended(after)

    def _act(self, before: FleetState, batch: FleetBatch) -> None:
        moved, self.moved = self.moved, asyncio.Event()
        moved.set()
        for name, node in batch.state.nodes.items():
            known = before.nodes.get(name)
            if known is not node and (known is None or known.desired_number != node.desired_number):
                _call_all(self._on_desired, node)
        for rollout_id, record in batch.state.rollouts.items():
            old = before.rollouts.get(rollout_id)
            if old is None or old.rollout.state is not record.rollout.state:
                facts = {"rollout_id": rollout_id, "state": record.rollout.state.name}
                logger.info("rollout state", extra=facts | {"reason": record.rollout.reason})
        for report in (change.report for change, _ in batch.steps if change.report is not None):
            _call_all(self._on_report, *report)

    def _refused(self, error: Exception) -> None:
        """Log it once for all reports; their senders report again."""
        if self._reports_waiting:
            extra = {"reports": self._reports_waiting}
            logger.error("reports not kept", exc_info=error, extra=extra)

    def _failed(self, change: FleetChange, error: Exception) -> None:
        if change.report is not None:
            self._refused(error)

    # Going on

    async def _go_on(self) -> None:
        while True:
            # Clear before looking, so that a nudge during the look starts the next one at once.
            self._nudged.clear()
            try:
                await self._look()
                await self._change(lambda fleet: state.after_tick(fleet, self._clock()))
            except Exception:  # the next look may succeed
                logger.exception("rollouts do not go on")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PERIOD_S):
                    await self._nudged.wait()

    async def _look(self) -> None:
        """Look at every bundle and signature that a rollout waits for."""
        for record in list(self._fleet.rollouts.values()):
            await self._look_for(record)

    async def _look_for(self, record: RolloutRecord) -> None:
        for target, supply in record.rollout.supplies.items():
            if not supply.path and not supply.refusal:
                await self._look_at(record, target)

    async def _look_at(self, record: RolloutRecord, target: str) -> None:
        plan, rollout_id = record.rollout.plan, record.rollout.id
        try:
            event: Event | None = await self._bundles.look(
                plan.model, plan.version, target, record.request.role
            )
        except (NotFound, InvalidInput) as error:
            event = BundleFailed(target, str(error))
        if event is not None:
            await self._change(self._applying(rollout_id, event))


def _call_all(callbacks: Iterable[Callable[..., None]], *values: object) -> None:
    """Call all callbacks: the change is committed, so an error of one must not stop the others."""
    for callback in callbacks:
        try:
            callback(*values)
        except Exception:
            logger.exception("a listener failed")
