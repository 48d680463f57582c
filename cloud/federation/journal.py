"""Runs in the database: their rows, their events, and how a run is read back.

`append` is called inside the one writer, so what it writes is durable together or not at all.
Reading folds the events after the newest snapshot; the same events give the same projection.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

import sqlalchemy as sa

from triplane.cloud.federation.coding import from_json, to_json
from triplane.cloud.federation.masked_spec import fewest_devices, first_norm, follows_updates
from triplane.cloud.federation.private_runs import privacy_of
from triplane.cloud.federation.run_projection import RunProjection, follow
from triplane.cloud.federation.spec import count_of, least_updates
from triplane.cloud.federation.tables import EVENTS, RUNS, SMALL, SMALL_STATES
from triplane.cloud.store.upsert import upsert
from triplane.proto import federation_pb2 as pb
from triplane.proto.errors import Conflict, Corrupt
from triplane.proto.messages import value_from
from triplane.unified_ir.federated.core import run as core
from triplane.unified_ir.federated.core.lease_changes import referenced_states
from triplane.unified_ir.federated.core.masked_step import PHASE_S
from triplane.unified_ir.federated.core.metric import ACCURACY, Scores
from triplane.unified_ir.federated.core.run import Event
from triplane.unified_ir.federated.core.run_plan import ADDED, RunPlan

KINDS: Final[Mapping[str, type[Event]]] = {
    "Joined": core.Joined,
    "Left": core.Left,
    "Restarted": core.Restarted,
    "Asked": core.Asked,
    "Arrived": core.Arrived,
    "Answered": core.Answered,
    "Masked": core.Masked,
    "Exchanged": core.Exchanged,
    "Scored": core.Scored,
    "Refused": core.Refused,
    "Declined": core.Declined,
    "Tick": core.Tick,
    "Reduced": core.Reduced,
    "Finished": core.Finished,
    "Stopped": core.Stopped,
    "Resumed": core.Resumed,
    "Failed": core.Failed,
}
"""Event classes by the name that is stored for them. A stored name never changes."""
_KIND_OF: Final = {event: kind for kind, event in KINDS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The output of the planning child. Blobs are SHA-256 in hexadecimal.

    plan_digest: the plan's root digest, which its states name. roles: the roles of the shared
    tensors. weighting, server: from the algorithm's row. since_s: when the plan was ready. rules:
    version of the rules by which the run's events are folded. metric: of the scores of devices.
    frozen: shared tensors that learning does not move; they get no noise.
    """

    plan: str
    plan_digest: str
    state: str
    roles: Mapping[str, str]
    weighting: str
    server: str
    since_s: float
    rules: int = core.RULES_OF_OLD
    metric: str = field(default=ACCURACY.name, metadata=ADDED)
    frozen: tuple[str, ...] = field(default=(), metadata=ADDED)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """A run's row, by its columns. before: its phase while it has no events.

    ended_s: 0 while the run goes on. asked: SHA-256 of the request's spec. slots: blob of the
    server's optimizer, or empty.
    """

    number: int
    id: str
    key: bytes
    asked: bytes
    spec: pb.Spec
    started_s: float
    started_by: str
    before: str = "preparing"
    reason: str = ""
    ended_s: float = 0.0
    prepared: Prepared | None = None
    slots: bytes = b""
    result: str = ""


def asked_digest(spec: pb.Spec) -> bytes:
    """Return the digest that distinguishes a repeated request from another with the same key."""
    return hashlib.sha256(spec.SerializeToString(deterministic=True)).digest()


def begin(connection: sa.Connection, new: RunRecord) -> RunRecord:
    """Write a new run, or return the one that the key began. Conflict: its request differs."""
    known = by_key(connection, new.key)
    if known is not None:
        if known.asked != new.asked:
            raise Conflict(
                f"key {new.key.hex()} began run {known.id} with another request; a new run needs "
                "a new random key"
            )
        return known
    columns = {f.name: getattr(new, f.name) for f in fields(RunRecord)}
    del columns["number"]  # given by the database
    columns |= {"spec": new.spec.SerializeToString(deterministic=True), "prepared": ""}
    connection.execute(RUNS.insert().values(**columns, live=True, snapshot="", snapshot_number=0))
    return run_record(connection, new.id)


def by_key(connection: sa.Connection, key: bytes) -> RunRecord | None:
    """Return the run that a key began."""
    row = connection.execute(sa.select(RUNS).where(RUNS.c.key == key)).first()
    return None if row is None else _record(row)


def run_record(connection: sa.Connection, run: str) -> RunRecord:
    """Return the row of a run that exists."""
    columns = [column for column in RUNS.c if column.name != "snapshot"]  # which may be long
    return _record(connection.execute(sa.select(*columns).where(RUNS.c.id == run)).one())


def live(connection: sa.Connection) -> list[tuple[RunRecord, RunProjection | None]]:
    """Return the runs that have not ended, oldest first."""
    runs = _runs(connection, sa.select(RUNS).where(RUNS.c.live).order_by(RUNS.c.number))
    return [(e, with_counted_leases(connection, e, b) if b else None) for e, b in runs]


def with_counted_leases(
    connection: sa.Connection, record: RunRecord, projection: RunProjection
) -> RunProjection:
    """Return the projection, each member with the lease of its newest contribution that counted.

    Snapshots of older releases lack these leases. A device that has not heard that its contribution
    counted would then hear only of a newer lease, and discard what counted. The lease is taken from
    the events since the run began.
    """
    unknown = [m for m in projection.state.members.values() if m.counted and not m.counted_lease]
    if not unknown:
        return projection
    # Folding from the start is slow, so it is done only for snapshots of older releases.
    again = first_projection(record)
    for event in events(connection, record.id)[: projection.revision]:
        again, _ = follow(again, event)
    members = {**projection.state.members}
    for member in unknown:
        lease = again.state.members[member.device].counted_lease
        members[member.device] = replace(member, counted_lease=lease)
    return replace(projection, state=replace(projection.state, members=members))


def newest(connection: sa.Connection, most: int) -> list[tuple[RunRecord, RunProjection | None]]:
    """Return the newest runs, newest first."""
    return _runs(connection, sa.select(RUNS).order_by(RUNS.c.number.desc()).limit(most))


def find(connection: sa.Connection, beginning: str) -> list[tuple[RunRecord, RunProjection | None]]:
    """Return up to two runs whose id begins so; the newest run for "last"."""
    query = sa.select(RUNS).order_by(RUNS.c.number.desc())
    if beginning == "last":
        query = query.limit(1)
    else:
        # Two are enough to know that the beginning is ambiguous. autoescape: "%" and "_" are
        # literal.
        query = query.where(RUNS.c.id.startswith(beginning, autoescape=True)).limit(2)
    return _runs(connection, query)


def last_projection(connection: sa.Connection, run: str) -> RunProjection | None:
    """Return the newest projection of the run with this whole id."""
    for record, projection in _runs(connection, sa.select(RUNS).where(RUNS.c.id == run)):
        if projection is not None:
            return with_counted_leases(connection, record, projection)
    return None


def _runs(
    connection: sa.Connection, query: sa.Select[Any]
) -> list[tuple[RunRecord, RunProjection | None]]:
    return [(_record(row), _projection(connection, row)) for row in connection.execute(query).all()]


def change(connection: sa.Connection, run: str, **values: Any) -> None:
    """Write columns of a run's row."""
    connection.execute(RUNS.update().where(RUNS.c.id == run).values(values))


def prepare(connection: sa.Connection, run: str, prepared: Prepared) -> None:
    """Record the plan of a run; from here on it takes events."""
    change(connection, run, prepared=to_json(prepared), before="", reason="")


def append(connection: sa.Connection, run: str, events: Sequence[Event], revision: int) -> None:
    """Append events, the last of which is number `revision`."""
    first = revision - len(events) + 1
    rows = [
        {"run": run, "number": number, "kind": _KIND_OF[type(event)], "body": to_json(event)}
        for number, event in enumerate(events, first)
    ]
    connection.execute(EVENTS.insert(), rows)


def save_small_updates(connection: sa.Connection, run: str, updates: Mapping[str, bytes]) -> None:
    """Write small updates, by SHA-256 in hexadecimal, in the commit of what names them.

    Devices with equal data may send equal updates, in one commit or in several.
    """
    rows = [{"run": run, "sha256": bytes.fromhex(k), "data": v} for k, v in updates.items()]
    upsert(connection, SMALL, rows)


def small_update(connection: sa.Connection, run: str, sha256: bytes) -> bytes | None:
    """Return a small update by its digest."""
    query = sa.select(SMALL.c.data).where(SMALL.c.run == run, SMALL.c.sha256 == sha256)
    data = connection.execute(query).scalar()
    return None if data is None else bytes(data)


def delete_small_updates(connection: sa.Connection, run: str) -> None:
    """Remove the small updates of rounds that are over."""
    connection.execute(SMALL.delete().where(SMALL.c.run == run))


def save_small_states(
    connection: sa.Connection,
    run: str,
    states: Mapping[str, bytes],
    kept: frozenset[bytes] = frozenset(),
) -> None:
    """Write a run's newest small states in place of those before; see `tables.SMALL_STATES`.

    kept: blobs whose rows stay.
    """
    rows = [{"run": run, "sha256": bytes.fromhex(k), "data": v} for k, v in states.items()]
    stay = kept - {row["sha256"] for row in rows}
    mine = SMALL_STATES.c.run == run
    connection.execute(SMALL_STATES.delete().where(mine, SMALL_STATES.c.sha256.not_in(stay)))
    if rows:
        connection.execute(SMALL_STATES.insert(), rows)


def small_states(connection: sa.Connection, run: str | None = None) -> dict[bytes, bytes]:
    """Return the newest small states of one run, or of all that are live, by SHA-256."""
    live_runs = sa.select(RUNS.c.id).where(RUNS.c.live)
    if run is not None:
        live_runs = live_runs.where(RUNS.c.id == run)
    query = sa.select(SMALL_STATES.c.sha256, SMALL_STATES.c.data)
    query = query.where(SMALL_STATES.c.run.in_(live_runs))
    return {bytes(row.sha256): bytes(row.data) for row in connection.execute(query)}


def snapshot(connection: sa.Connection, run: str, projection: RunProjection) -> None:
    """Keep the fold of all events so far."""
    change(connection, run, snapshot=to_json(projection), snapshot_number=projection.revision)


def events(connection: sa.Connection, run: str, after: int = 0) -> list[Event]:
    """Return the events numbered above `after`, in order. Corrupt: one is missing or unreadable."""
    query = sa.select(EVENTS).where(EVENTS.c.run == run, EVENTS.c.number > after)
    rows = connection.execute(query.order_by(EVENTS.c.number)).all()
    for number, row in enumerate(rows, after + 1):
        # Numbers have no gaps, so a missing row is noticed; folding past a gap would give another
        # state.
        if row.number != number or row.kind not in KINDS:
            raise Corrupt(
                f"event {number} of run {run} is missing or of an unknown kind; restore a backup"
            )
    return [from_json(KINDS[row.kind], row.body) for row in rows]


def first_projection(record: RunRecord) -> RunProjection:
    """Return the projection of a prepared run before its first event."""
    assert record.prepared is not None
    return RunProjection(
        state=core.RunState(
            plan=plan_of(record.spec),
            run=record.id,
            shared=record.prepared.state,
            since_s=record.prepared.since_s,
            rules=record.prepared.rules,
        ),
        at_s=record.prepared.since_s,
        metric=record.prepared.metric,
    )


def plan_of(spec: pb.Spec) -> RunPlan:
    """Return the machine's plan of a spec whose defaults are filled in."""
    cohort, privacy = spec.cohort, privacy_of(spec)
    budget = None if privacy is None else privacy.budget()
    return RunPlan(
        rounds=spec.rounds if budget is None else budget.most_rounds(spec.rounds),
        devices=cohort.devices,
        asked=cohort.devices + count_of(cohort.devices, cohort.over_selection),
        quorum=max(least_updates(cohort.devices, cohort.quorum), spec.masking.least),
        deadline_s=cohort.deadline_s,
        patience_s=cohort.patience_s,
        evaluate_every=spec.evaluate_every,
        seed=spec.seed,
        needs_scores=not spec.flower.app,
        returns=spec.robustness.returns,
        budget=budget,
        clip=first_norm(spec) if follows_updates(spec) else privacy.clip if privacy else 0.0,
        least=fewest_devices(spec.masking),
        phase_s=spec.masking.phase_s or PHASE_S,
        scores=Scores(spec.scores or Scores.CLEAR),
    )


def last_asked(connection: sa.Connection, run: str) -> core.Asked | None:
    """Return the newest event that records whom a strategy asked."""
    query = sa.select(EVENTS.c.body).where(
        EVENTS.c.run == run, EVENTS.c.kind == _KIND_OF[core.Asked]
    )
    row = connection.execute(query.order_by(EVENTS.c.number.desc()).limit(1)).first()
    return None if row is None else from_json(core.Asked, row.body)


def references(record: RunRecord, projection: RunProjection | None) -> frozenset[bytes]:
    """Return the blobs that a run needs or began from, without messages and updates.

    Whatever keeps, restores or removes states asks this function, so that what stays is the same
    for all of them.
    """
    prepared, names = record.prepared, {record.slots.hex()}
    if prepared is not None:
        names |= {prepared.plan, prepared.state}
    if projection is not None:
        names |= referenced_states(projection.state)
    return frozenset(map(bytes.fromhex, names - {""}))


def referenced(connection: sa.Connection) -> set[bytes]:
    """Return the blobs that all runs reference; updates are kept elsewhere."""
    blobs: set[bytes] = set()
    for row in connection.execute(sa.select(RUNS)).all():
        record, projection = _record(row), _projection(connection, row)
        blobs |= references(record, projection)
        # Messages of the open round are read by devices; those of ended runs are not needed.
        if row.live and record.spec.HasField("flower"):
            asked = last_asked(connection, record.id)
            messages = asked.messages.values() if asked else ()
            blobs |= {bytes.fromhex(name) for name in messages if name}
    return blobs


def _record(row: Any) -> RunRecord:
    return value_from(
        RunRecord,
        row,
        key=bytes(row.key),
        asked=bytes(row.asked),
        spec=pb.Spec.FromString(bytes(row.spec)),
        prepared=from_json(Prepared, row.prepared) if row.prepared else None,
        slots=bytes(row.slots),
    )


def _projection(connection: sa.Connection, row: Any) -> RunProjection | None:
    if not row.prepared:
        return None
    projection = (
        from_json(RunProjection, row.snapshot) if row.snapshot else first_projection(_record(row))
    )
    for event in events(connection, row.id, projection.revision):
        projection, _ = follow(projection, event)
    return projection
