"""The metadata object to which every part of the cloud attaches its tables.

Each part has a `tables.py`; `Database.open` creates the tables that are attached at that time.
Times are seconds since 1970 in `Double`, digests are `LargeBinary` of 32 bytes.
"""

from typing import Final

from sqlalchemy import BigInteger, CheckConstraint, Column, Integer, MetaData, Table

SCHEMA_VERSION: Final = 1
"""Version of all tables together; a higher one in a database comes from a newer release."""

METADATA: Final = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

BIG: Final = BigInteger().with_variant(Integer, "sqlite")
"""Signed 64-bit integer; as a primary key it increments by itself on both databases."""

SCHEMA: Final = Table(
    "schema",
    METADATA,
    Column("id", Integer, CheckConstraint("id = 1", name="one_row"), primary_key=True),
    Column("version", Integer, nullable=False),
)
