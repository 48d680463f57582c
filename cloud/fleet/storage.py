"""The fleet in the database: writes what changed, reads nodes and running rollouts.

`save` writes the rows whose values are other objects than before, so its cost is that of the
change. Ended rollouts stay in the tables and leave the value.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, replace
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
from triplane.cloud.store.upsert import upsert
from triplane.proto.errors import Corrupt
from triplane.proto.fleet_pb2 import DeployRequest, Report
from triplane.proto.messages import value_from

Row = dict[str, Any]
_DIGESTS: Final = ("sha256", "good_sha256", "back_sha256")
"""Fields of a `NodeAssignment` with a table of their own."""


def save(connection: sa.Connection, before: FleetState, after: FleetState) -> None:
    """Write the rows that differ between two states."""
    # By identity: values are immutable, so an unchanged node is the same object. Comparing all
    # fields of a large fleet would cost more than writing.
    nodes = [node for name, node in after.nodes.items() if before.nodes.get(name) is not node]
    upsert(connection, NODES, [_node_row(node) for node in nodes])
    held = [
        (node.name, model, assignment)
        for node in nodes
        for model, assignment in node.held.items()
        if node.name not in before.nodes or before.nodes[node.name].held.get(model) != assignment
    ]
    upsert(connection, HELD, [_held_row(*x, HELD) for x in held])
    upsert(connection, HELD_DIGESTS, [_held_row(*x, HELD_DIGESTS) for x in held])
    for rollout_id, record in after.rollouts.items():
        known = before.rollouts.get(rollout_id)
        if known is not record:
            upsert(connection, ROLLOUTS, [_rollout_row(record)], key="id")
            members = known.rollout.members if known else {}
            changed = [m for n, m in record.rollout.members.items() if members.get(n) is not m]
            upsert(connection, MEMBERS, [_member_row(rollout_id, m) for m in changed])


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
        row.name: value_from(
            FleetNode, row,
            labels=json.loads(row.labels),
            report=None if row.report is None else Report.FromString(row.report),
            held=held.get(row.name, {}),
        )
        for row in connection.execute(sa.select(NODES).order_by(NODES.c.name))
    }  # fmt: skip
    going = load_rollouts(connection, ROLLOUTS.c.ended.is_(False))
    return FleetState(nodes, {record.rollout.id: record for record in going})


def load_rollouts(connection: sa.Connection, which: sa.ColumnElement[bool]) -> list[RolloutRecord]:
    """Return rollouts with their members, oldest first."""
    rows = connection.execute(sa.select(ROLLOUTS).where(which).order_by(ROLLOUTS.c.number))
    return [_rollout_record(row, _members(connection, row.id)) for row in rows]


def load_heads(connection: sa.Connection, most: int) -> list[RolloutRecord]:
    """Return the newest rollouts without their members, newest first."""
    rows = connection.execute(sa.select(ROLLOUTS).order_by(ROLLOUTS.c.number.desc()).limit(most))
    return [_rollout_record(row, ()) for row in rows]


def find_ids(connection: sa.Connection, beginning: str) -> list[str]:
    """Return up to two ids with this beginning; the newest id for "last"."""
    query = sa.select(ROLLOUTS.c.id).order_by(ROLLOUTS.c.number.desc())
    if beginning == "last":
        return list(connection.scalars(query.limit(1)))
    return list(connection.scalars(query.where(ROLLOUTS.c.id.startswith(beginning)).limit(2)))


def _node_row(node: FleetNode) -> Row:
    columns = ("name", "cordoned", "gone", "last_seen_s", "desired_number")
    return {
        **{column: getattr(node, column) for column in columns},
        "labels": json.dumps(dict(node.labels), sort_keys=True),
        "report": None if node.report is None else node.report.SerializeToString(),
    }


def _held_row(node: str, model: str, held: NodeAssignment, table: sa.Table) -> Row:
    row = {"node": node, "model": model, **asdict(held)}
    return {column.name: row[column.name] for column in table.columns}


def _rollout_row(record: RolloutRecord) -> Row:
    r = record.rollout
    body = asdict(replace(r, members={})) | {"state": r.state.name}
    del body["id"], body["members"]  # they have columns and rows of their own
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
        texts = {name: _text(body.get(name, "")) for name in ("reason", "left_out", "resumed")}
        rollout = Rollout(
            id=row.id,
            members={member.name: member for member in members},
            **body
            | texts
            | {
                "plan": RolloutPlan(**body["plan"] | {"waves": tuple(body["plan"]["waves"])}),
                "supplies": {t: _supply(supply) for t, supply in body["supplies"].items()},
                "state": RolloutState[body["state"]],
            },
        )
    except (KeyError, TypeError, ValueError) as error:
        raise Corrupt(f"rollout {row.id} in the database is damaged: {error!r}") from error
    request = DeployRequest.FromString(row.request)
    return value_from(RolloutRecord, row, rollout=rollout, request=request)


def _text(kept: str) -> str:
    """Replace half surrogate pairs, which rows of older releases may hold and no message can."""
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
    return BundleSupply(**body | {"needs": needed})
