"""Tables of nodes, what they hold, rollouts and incidents. Times are seconds since 1970, UTC."""

from typing import Final

import sqlalchemy as sa

from triplane.cloud.store.schema import BIG, METADATA

NODES: Final = sa.Table(
    "fleet_nodes",
    METADATA,
    sa.Column("name", sa.String(63), primary_key=True),
    sa.Column("labels", sa.Text, nullable=False),  # JSON object
    sa.Column("cordoned", sa.Boolean, nullable=False),
    sa.Column("gone", sa.String(256), nullable=False),  # why it left the fleet, or empty
    sa.Column("last_seen_s", sa.Double, nullable=False),
    sa.Column("desired_number", BIG, nullable=False),
    sa.Column("report", sa.LargeBinary),  # fleet.Report without its incidents
)

HELD: Final = sa.Table(
    "fleet_held",
    METADATA,
    sa.Column("node", sa.ForeignKey("fleet_nodes.name"), primary_key=True),
    sa.Column("model", sa.String(63), primary_key=True),
    sa.Column("version", sa.Integer, nullable=False),  # 0: nothing is assigned any more
    sa.Column("path", sa.String(256), nullable=False),
    sa.Column("rollout", sa.String(16), nullable=False),
    sa.Column("attempt", BIG, nullable=False),
    sa.Column("probation_s", sa.Double, nullable=False),
    sa.Column("good_version", sa.Integer, nullable=False),
    sa.Column("good_path", sa.String(256), nullable=False),
    sa.Column("back_version", sa.Integer, nullable=False),
    sa.Column("back_path", sa.String(256), nullable=False),
)

HELD_DIGESTS: Final = sa.Table(
    "fleet_held_digests",  # beside fleet_held, whose rows older releases wrote without these
    METADATA,
    sa.Column("node", sa.ForeignKey("fleet_nodes.name"), primary_key=True),
    sa.Column("model", sa.String(63), primary_key=True),
    sa.Column("sha256", sa.String(64), nullable=False),
    sa.Column("good_sha256", sa.String(64), nullable=False),
    sa.Column("back_sha256", sa.String(64), nullable=False),
)

ROLLOUTS: Final = sa.Table(
    "fleet_rollouts",
    METADATA,
    sa.Column("number", BIG, primary_key=True, autoincrement=True),
    sa.Column("id", sa.String(16), nullable=False, unique=True),
    sa.Column("key", sa.LargeBinary(64), nullable=False, unique=True),
    sa.Column("model", sa.String(63), nullable=False),
    sa.Column("ended", sa.Boolean, nullable=False, index=True),
    sa.Column("created_s", sa.Double, nullable=False),
    sa.Column("created_by", sa.String(63), nullable=False),
    sa.Column("request", sa.LargeBinary, nullable=False),  # fleet.DeployRequest
    sa.Column("body", sa.Text, nullable=False),  # JSON, written by storage.py
)

MEMBERS: Final = sa.Table(
    "fleet_members",
    METADATA,
    sa.Column("rollout", sa.ForeignKey("fleet_rollouts.id"), primary_key=True),
    sa.Column("name", sa.String(63), primary_key=True),
    sa.Column("body", sa.Text, nullable=False),
)

INCIDENTS: Final = sa.Table(
    "fleet_incidents",
    METADATA,
    sa.Column("number", BIG, primary_key=True, autoincrement=True),
    sa.Column("node", sa.ForeignKey("fleet_nodes.name"), nullable=False),
    sa.Column("time_s", sa.Double, nullable=False),
    sa.Column("kind", sa.String(64), nullable=False),
    sa.Column("text", sa.Text, nullable=False),
)
