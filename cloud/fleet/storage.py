"""The fleet in the database: writes what changed, reads nodes and running rollouts.

`save` writes the rows whose values are other objects than before, so its cost is that of the
change. Ended rollouts stay in the tables and leave the value.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, Final

import sqlalchemy as sa

from triplane.cloud.fleet.capability import BundleNeeds, Capability
from triplane.cloud.fleet.state import FleetNode, FleetState, NodeAssignment, RolloutRecord
from triplane.cloud.fleet.tables import HELD, HELD_DIGESTS, MEMBERS, NODES, ROLLOUTS
from triplane.cloud.fleet.values import (
    ENDED,
    BundleSupply,
    NodeStage,
    Rollout,
    RolloutMember,
    RolloutPlan,
    RolloutState,
)
from triplane.proto.errors import Corrupt
from triplane.proto.fleet_pb2 import DeployRequest, Report

Row = dict[str, Any]
_DIGESTS: Final = ("sha256", "good_sha256", "back_sha256")
_KEYS: Final = {
    "fleet_nodes": ("name",),
    "fleet_held": ("node", "model"),
    "fleet_rollouts": ("id",),
    "fleet_members": ("rollout", "name"),
}


def save(connection: sa.Connection, before: FleetState, after: FleetState) -> None:
    """Write what differs."""
    _save_nodes(connection, before.nodes, after.nodes)
    for rollout_id, record in after.rollouts.items():
        known = before.rollouts.get(rollout_id)
        if known is not record:
            _save_rollout(connection, known, record)


def _save_nodes(
    connection: sa.Connection, before: Mapping[str, FleetNode], after: Mapping[str, FleetNode]
) -> None:
    changed = [node for name, node in after.items() if before.get(name) is not node]
    known = [before.get(node.name) for node in changed]
    _put(
        connection,
        NODES,
        new=[_node_row(n) for n, k in zip(changed, known, strict=True) if k is None],
        other=[_node_row(n) for n, k in zip(changed, known, strict=True) if k is not None],
    )
    differing = [
        (old, node.name, model, row)
        for node, k in zip(changed, known, strict=True)
        for model, row in node.held.items()
        if (old := k.held.get(model) if k else None) != row
    ]
    held = [(old is None, _held_row(name, model, row)) for old, name, model, row in differing]
    _put(
        connection,
        HELD,
        new=[row for is_new, row in held if is_new],
        other=[row for is_new, row in held if not is_new],
    )
    _save_digests(
        connection,
        [
            (name, model, row)
            for old, name, model, row in differing
            if old is None or any(getattr(old, key) != getattr(row, key) for key in _DIGESTS)
        ],
    )


def _save_rollout(
    connection: sa.Connection, before: RolloutRecord | None, after: RolloutRecord
) -> None:
    row = _rollout_row(after)
    _put(connection, ROLLOUTS, new=[] if before else [row], other=[row] if before else [])
    known = before.rollout.members if before else {}
    rollout = after.rollout
    changed = [m for name, m in rollout.members.items() if known.get(name) is not m]
    rows = [_member_row(rollout.id, member) for member in changed]
    _put(connection, MEMBERS, new=[] if before else rows, other=rows if before else [])


def _put(connection: sa.Connection, table: sa.Table, *, new: list[Row], other: list[Row]) -> None:
    if new:
        connection.execute(table.insert(), new)
    if other:
        keys = _KEYS[table.name]
        values: Row = {name: sa.bindparam(name) for name in other[0] if name not in keys}
        matches = sa.and_(*(table.c[key] == sa.bindparam(f"of_{key}") for key in keys))
        rows = [{f"of_{k}" if k in keys else k: v for k, v in row.items()} for row in other]
        connection.execute(table.update().where(matches).values(values), rows)


def load(connection: sa.Connection) -> FleetState:
    """Read every node and the rollouts that have not ended."""
    held: dict[str, dict[str, NodeAssignment]] = {}
    digests = {
        (row["node"], row["model"]): {key: row[key] for key in _DIGESTS}
        for row in connection.execute(sa.select(HELD_DIGESTS)).mappings()
    }
    for row in connection.execute(sa.select(HELD)).mappings():
        fields = {key: row[key] for key in row if key not in {"node", "model"}}
        of = digests.get((row["node"], row["model"]), {})
        held.setdefault(row["node"], {})[row["model"]] = NodeAssignment(**fields, **of)
    nodes = {
        row.name: FleetNode(
            name=row.name, labels=json.loads(row.labels), cordoned=row.cordoned, gone=row.gone,
            last_seen_s=row.last_seen_s, desired_number=row.desired_number,
            report=None if row.report is None else Report.FromString(row.report),
            held=held.get(row.name, {}),
        )
        for row in connection.execute(sa.select(NODES).order_by(NODES.c.name))
    }  # fmt: skip
    going = load_rollouts(connection, ROLLOUTS.c.ended.is_(False))
    return FleetState(nodes, {record.rollout.id: record for record in going})


def load_rollouts(connection: sa.Connection, which: sa.ColumnElement[bool]) -> list[RolloutRecord]:
    """Rollouts with their members, oldest first."""
    rows = connection.execute(sa.select(ROLLOUTS).where(which).order_by(ROLLOUTS.c.number))
    return [_rollout_record(row, _members(connection, row.id)) for row in rows]


def load_heads(connection: sa.Connection, most: int) -> list[RolloutRecord]:
    """The newest rollouts without their members, newest first."""
    rows = connection.execute(sa.select(ROLLOUTS).order_by(ROLLOUTS.c.number.desc()).limit(most))
    return [_rollout_record(row, ()) for row in rows]


def find_ids(connection: sa.Connection, beginning: str) -> list[str]:
    """Up to two ids that begin so; the newest id for "last"."""
    query = sa.select(ROLLOUTS.c.id).order_by(ROLLOUTS.c.number.desc())
    if beginning == "last":
        return list(connection.scalars(query.limit(1)))
    return list(connection.scalars(query.where(ROLLOUTS.c.id.startswith(beginning)).limit(2)))


def _node_row(node: FleetNode) -> Row:
    return {
        "name": node.name,
        "labels": json.dumps(dict(node.labels), sort_keys=True),
        "cordoned": node.cordoned,
        "gone": node.gone,
        "last_seen_s": node.last_seen_s,
        "desired_number": node.desired_number,
        "report": None if node.report is None else node.report.SerializeToString(),
    }


def _held_row(node: str, model: str, held: NodeAssignment) -> Row:
    fields = {key: value for key, value in asdict(held).items() if key not in _DIGESTS}
    return {"node": node, "model": model, **fields}


def _save_digests(
    connection: sa.Connection, changed: list[tuple[str, str, NodeAssignment]]
) -> None:
    """Rows of older releases have none yet, so a row is replaced whichever it is."""
    if not changed:
        return
    keys = [{"of_node": node, "of_model": model} for node, model, _ in changed]
    table = HELD_DIGESTS
    connection.execute(
        table.delete().where(
            table.c.node == sa.bindparam("of_node"), table.c.model == sa.bindparam("of_model")
        ),
        keys,
    )
    rows = [
        {"node": node, "model": model, **{key: getattr(held, key) for key in _DIGESTS}}
        for node, model, held in changed
    ]
    connection.execute(table.insert(), rows)


def _rollout_row(record: RolloutRecord) -> Row:
    r = record.rollout
    body = {
        "plan": asdict(r.plan),
        "supplies": {target: asdict(supply) for target, supply in r.supplies.items()},
        "allowed": r.allowed,
        "state": r.state.name,
        "reason": r.reason,
        "left_out": r.left_out,
        "resumed": r.resumed,
        "wave": r.wave,
        "ended_s": r.ended_s,
    }
    return {
        "id": r.id,
        "key": record.request.key,
        "model": r.plan.model,
        "ended": r.state in ENDED,
        "created_s": record.created_s,
        "created_by": record.created_by,
        "request": record.request.SerializeToString(),
        "body": json.dumps(body, sort_keys=True),
    }


def _member_row(rollout_id: str, member: RolloutMember) -> Row:
    body = asdict(member) | {"stage": member.stage.name}
    return {"rollout": rollout_id, "name": member.name, "body": json.dumps(body, sort_keys=True)}


def _rollout_record(row: Any, members: Iterable[RolloutMember]) -> RolloutRecord:
    try:
        body = json.loads(row.body)
        rollout = Rollout(
            id=row.id,
            plan=RolloutPlan(**body["plan"] | {"waves": tuple(body["plan"]["waves"])}),
            members={member.name: member for member in members},
            supplies={t: _supply(supply) for t, supply in body["supplies"].items()},
            allowed=body["allowed"],
            state=RolloutState[body["state"]],
            reason=_text(body["reason"]),
            left_out=_text(body.get("left_out", "")),
            resumed=_text(body.get("resumed", "")),
            wave=body["wave"],
            ended_s=body["ended_s"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise Corrupt(f"rollout {row.id} in the database is damaged: {error!r}") from error
    request = DeployRequest.FromString(row.request)
    return RolloutRecord(
        rollout=rollout, request=request, created_s=row.created_s, created_by=row.created_by
    )


def _text(kept: str) -> str:
    """Text of older releases may hold half a surrogate pair, which no message carries."""
    return kept.encode("utf-8", "replace").decode()


def _members(connection: sa.Connection, rollout_id: str) -> list[RolloutMember]:
    bodies = connection.scalars(
        sa.select(MEMBERS.c.body).where(MEMBERS.c.rollout == rollout_id).order_by(MEMBERS.c.name)
    )
    return [_member(json.loads(body)) for body in bodies]


def _member(body: Row) -> RolloutMember:
    stored = body["capability"]
    capability = stored and Capability(
        **stored
        | {"instructions": tuple(stored["instructions"]), "targets": tuple(stored["targets"])}
    )
    return RolloutMember(**body | {"stage": NodeStage[body["stage"]], "capability": capability})


def _supply(body: Row) -> BundleSupply:
    needs = body["needs"]
    needed = needs and BundleNeeds(**needs | {"instructions": tuple(needs["instructions"])})
    return BundleSupply(needed, body["path"], body["refusal"], body.get("sha256", ""))
