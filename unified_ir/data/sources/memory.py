"""What sources share that read columns into memory: choice of columns, native arrays, limits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triplane.proto.errors import Corrupt, InvalidInput, NotFound
from triplane.unified_ir.data.columns import MAX_COLUMNS, Array, count, schema_of
from triplane.unified_ir.data.table import ArrayTable, Feed


def selection(what: object, present: Sequence[str], columns: Sequence[str]) -> tuple[str, ...]:
    """Return the columns to read: those that are asked for, else all; what: names the file."""
    missing = [name for name in columns if name not in present]
    if missing:
        shown = ", ".join(present[:8]) or "nothing"
        raise NotFound(f"{what} has no column {missing[0]!r}; it holds {shown}")
    names = tuple(columns or present)
    if len(set(names)) != len(names):
        repeated = next(name for name in names if names.count(name) > 1)
        raise InvalidInput(f"{what}: each column is read once, {repeated!r} is named twice")
    if not 0 < len(names) <= MAX_COLUMNS:
        raise InvalidInput(f"{what}: 1..{MAX_COLUMNS} columns are read, it holds {len(names)}")
    return names


def check_missing(missing: float | None) -> None:
    """Raise InvalidInput unless the number to take for missing values is finite."""
    if missing is not None and not math.isfinite(missing):
        raise InvalidInput(f"missing= is a finite number, got {missing}")


def native(array: NDArray[Any]) -> NDArray[Any]:
    """Return the array in this machine's byte order; a copy only if it has the other."""
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def array_table(
    what: object, columns: Mapping[str, Array], *, pixels: Mapping[str, int] | None = None
) -> ArrayTable:
    """Return a table; InvalidInput names the file and the columns that do not fit together."""
    try:
        # Fields first: they refuse a single number, which has no length.
        schema_of(columns)
        return ArrayTable(columns, pixels=pixels or {})
    except InvalidInput as error:
        shown = ", ".join(f"{name} {column.shape}" for name, column in list(columns.items())[:8])
        raise InvalidInput(f"{what}: {error}; name the columns to read, of {shown}") from error


def table_of_feed(what: object, feed: Feed, rows: int) -> ArrayTable:
    """Read all samples of a feed of flat columns into memory; Corrupt unless there are `rows`."""
    columns = {
        name: np.empty(rows, field.dtype if field.is_number else object)
        for name, field in feed.schema.items()
    }
    at = 0
    for block in feed.blocks(0):
        size = count(block)
        if at + size > rows:
            break
        for name, column in block.items():
            columns[name][at : at + size] = column
        at += size
    if at != rows:
        raise Corrupt(f"{what} changed while it was read; it had {rows} rows")
    return ArrayTable(columns)
