"""Insert rows, or update those that exist, in one statement."""

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite


def upsert(
    connection: sa.Connection, table: sa.Table, rows: Sequence[dict[str, Any]], key: str = ""
) -> None:
    """Insert rows, or update those that exist. key: a unique column in place of the primary key."""
    if not rows:
        return
    keys = [key] if key else [column.name for column in table.primary_key]
    insert = (postgresql if connection.dialect.name == "postgresql" else sqlite).insert(table)
    # `excluded` is the row that was to be inserted, in both dialects.
    values = {name: insert.excluded[name] for name in rows[0] if name not in keys}
    connection.execute(insert.on_conflict_do_update(index_elements=keys, set_=values), rows)
