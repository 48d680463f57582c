"""Tables of runs and their events. Times are seconds since 1970, UTC.

An event is written once and never changed. A run's row has what its events do not say, and a
snapshot of their fold, so that reading a run back does not take all of them.
"""

from typing import Final

import sqlalchemy as sa

from triplane.cloud.store.schema import BIG, METADATA

RUNS: Final = sa.Table(
    "federation_runs",
    METADATA,
    sa.Column("number", BIG, primary_key=True, autoincrement=True),
    sa.Column("id", sa.String(16), nullable=False, unique=True),
    sa.Column("key", sa.LargeBinary(16), nullable=False, unique=True),
    sa.Column("asked", sa.LargeBinary(32), nullable=False),  # SHA-256 of the request's Spec
    sa.Column("spec", sa.LargeBinary, nullable=False),  # federation.Spec, defaults filled in
    sa.Column("started_s", sa.Double, nullable=False),
    sa.Column("started_by", sa.String(63), nullable=False),
    sa.Column("live", sa.Boolean, nullable=False, index=True),
    # Until it is prepared there are no events: "preparing", "stopped" or "failed", with the reason.
    sa.Column("before", sa.String(16), nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("ended_s", sa.Double, nullable=False),
    sa.Column("prepared", sa.Text, nullable=False),  # JSON of `Prepared`, or empty
    sa.Column("slots", sa.LargeBinary(32), nullable=False),  # blob of the server's optimizer
    sa.Column("snapshot", sa.Text, nullable=False),  # JSON of `RunProjection`, or empty
    sa.Column("snapshot_number", BIG, nullable=False),  # the last event in it
    sa.Column("result", sa.String(80), nullable=False),  # "digits@4", or empty
)

SMALL: Final = sa.Table(
    "federation_small_updates",
    METADATA,
    # Updates that came within their contribution, until their round is reduced.
    sa.Column("run", sa.ForeignKey("federation_runs.id"), primary_key=True),
    sa.Column("sha256", sa.LargeBinary(32), primary_key=True),
    sa.Column("data", sa.LargeBinary, nullable=False),
)

SMALL_STATES: Final = sa.Table(
    "federation_small_states",
    METADATA,
    # The newest states of a run and of its optimizer, if they are small. The file of the same
    # digest is not synced, and is written again from here if a power cut damaged it.
    sa.Column("run", sa.ForeignKey("federation_runs.id"), primary_key=True),
    sa.Column("sha256", sa.LargeBinary(32), primary_key=True),
    sa.Column("data", sa.LargeBinary, nullable=False),
)

EVENTS: Final = sa.Table(
    "federation_events",
    METADATA,
    sa.Column("run", sa.ForeignKey("federation_runs.id"), primary_key=True),
    sa.Column("number", BIG, primary_key=True, autoincrement=False),
    sa.Column("kind", sa.String(16), nullable=False),
    sa.Column("body", sa.Text, nullable=False),  # JSON, written by coding.py
)
