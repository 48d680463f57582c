"""Insert rows, or update those that exist, in one statement."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite


def upsert(
    connection: sa.Connection, table: sa.Table, rows: Sequence[dict[str, Any]], key: str = ""
) -> None:
    """Insert rows, or update those that exist. key: a unique column in place of the primary key."""
    if rows:
        statement = _statement(connection.dialect.name, table, tuple(rows[0]), key)
        connection.execute(statement, rows)


@cache
def _statement(dialect: str, table: sa.Table, columns: tuple[str, ...], key: str) -> sa.Insert:
    keys = [key] if key else [column.name for column in table.primary_key]
    insert = (postgresql if dialect == "postgresql" else sqlite).insert(table)
    # `excluded` is the row that was to be inserted, in both dialects.
    values = {name: insert.excluded[name] for name in columns if name not in keys}
    statement: sa.Insert = insert.on_conflict_do_update(index_elements=keys, set_=values)
    return statement
