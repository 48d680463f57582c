"""Incidents of nodes: the newest of each node, without duplicates."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import sqlalchemy as sa

from triplane.cloud.fleet.tables import INCIDENTS
from triplane.proto.fleet_pb2 import Incident

KEPT_PER_NODE: Final = 64


def record_incidents(connection: sa.Connection, said: Iterable[tuple[str, Incident]]) -> None:
    """Add incidents that are new; an incident that is reported again is the same one."""
    by_node: dict[str, list[Incident]] = {}
    for node, incident in said:
        by_node.setdefault(node, []).append(incident)
    for node, incidents in by_node.items():
        _keep(connection, node, incidents)


def _keep(connection: sa.Connection, node: str, incidents: list[Incident]) -> None:
    c = INCIDENTS.c
    rows = connection.execute(sa.select(INCIDENTS).where(c.node == node).order_by(c.number)).all()
    known = {(row.time_s, row.kind, row.text) for row in rows}
    unique = {(i.time_s, i.kind, i.text): None for i in incidents}
    new = [key for key in unique if key not in known]
    if new:
        connection.execute(
            INCIDENTS.insert(),
            [{"node": node, "time_s": t, "kind": kind, "text": text} for t, kind, text in new],
        )
    # A node that reports without end fills only its own share of the table.
    spare = len(rows) + len(new) - KEPT_PER_NODE
    if spare > 0:
        old = [row.number for row in rows[:spare]]
        connection.execute(INCIDENTS.delete().where(c.number.in_(old)))


def newest_incidents(connection: sa.Connection, most: int) -> list[tuple[str, Incident]]:
    """Return the newest incidents of all nodes, newest first."""
    rows = connection.execute(sa.select(INCIDENTS).order_by(INCIDENTS.c.number.desc()).limit(most))
    return [(row.node, Incident(time_s=row.time_s, kind=row.kind, text=row.text)) for row in rows]
