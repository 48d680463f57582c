"""The registry's tables.

Versions are written once: no statement of this package updates one. A bundle's row is inserted with
the request for it (CONVERTING), so that a conversion that a crash interrupted is continued.
"""

from typing import Final

from sqlalchemy import (
    JSON,
    Boolean,
    Column,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Integer,
    LargeBinary,
    String,
    Table,
    Text,
)

from triplane.cloud.store import BIG, METADATA

MODELS: Final = Table(
    "models",
    METADATA,
    Column("name", String(63), primary_key=True),
    Column("latest", Integer, nullable=False),
)

VERSIONS: Final = Table(
    "versions",
    METADATA,
    Column("model", String(63), ForeignKey("models.name"), primary_key=True),
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("model_digest", LargeBinary(32), nullable=False),
    Column("blob", LargeBinary(32), nullable=False),
    Column("size", BIG, nullable=False),
    Column("created_s", Double, nullable=False),
    Column("created_by", String(63), nullable=False),
    Column("quantize", String(16), nullable=False),
    Column("calibration", LargeBinary(32), nullable=False),
    Column("entry", String(200), nullable=False),
    Column("max_accuracy_drop", Double, nullable=False),
    Column("evaluation", LargeBinary(32), nullable=False),
    Column("parent", String(80), nullable=False),
    Column("source", String(200), nullable=False),
    Column("note", Text, nullable=False),
    Column("push_key", LargeBinary(16), nullable=False, unique=True),
    Column("push_digest", LargeBinary(32), nullable=False),
)

ALIASES: Final = Table(
    "aliases",
    METADATA,
    Column("model", String(63), primary_key=True),
    Column("name", String(63), primary_key=True),
    Column("version", Integer, nullable=False),
    ForeignKeyConstraint(["model", "version"], ["versions.model", "versions.version"]),
)

BUNDLES: Final = Table(
    "bundles",
    METADATA,
    Column("model", String(63), primary_key=True),
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("target", String(63), primary_key=True),
    Column("state", String(16), nullable=False, index=True),
    Column("attempts", Integer, nullable=False),
    Column("reason", Text, nullable=False),
    # Whether another attempt may succeed: the child died rather than refused.
    Column("may_retry", Boolean, nullable=False),
    Column("blob", LargeBinary(32), nullable=False),
    Column("size", BIG, nullable=False),
    Column("root_digest", LargeBinary(32), nullable=False),
    Column("content_digest", LargeBinary(32), nullable=False),
    Column("signed_path", Text, nullable=False),
    Column("needs", JSON, nullable=False),
    ForeignKeyConstraint(["model", "version"], ["versions.model", "versions.version"]),
)

# The measured figures of a bundle's report, compressed: the only part that another conversion does
# not reproduce. It has its own table because databases of earlier releases have the others already.
REPORTS: Final = Table(
    "bundle_reports",
    METADATA,
    Column("model", String(63), primary_key=True),
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("target", String(63), primary_key=True),
    Column("report", LargeBinary, nullable=False),
    ForeignKeyConstraint(
        ["model", "version", "target"], ["bundles.model", "bundles.version", "bundles.target"]
    ),
)
