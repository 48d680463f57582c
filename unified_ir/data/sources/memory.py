"""What sources share that read columns of numbers into memory: choice of columns, native arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from triplane.proto.errors import InvalidInput, NotFound
from triplane.unified_ir.data.columns import MAX_COLUMNS, Array, schema_of
from triplane.unified_ir.data.table import ArrayTable


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


def native(array: NDArray[Any]) -> NDArray[Any]:
    """Return the array in this machine's byte order; a copy only if it has the other."""
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def array_table(
    what: object, columns: Mapping[str, Array], *, labels: tuple[str, ...] = ()
) -> ArrayTable:
    """Return a table; InvalidInput names the file and the columns that do not fit together."""
    try:
        # Fields first: they refuse a single number, which has no length.
        schema_of(columns)
        return ArrayTable(columns, labels)
    except InvalidInput as error:
        shown = ", ".join(f"{name} {column.shape}" for name, column in list(columns.items())[:8])
        raise InvalidInput(f"{what}: {error}; name the columns to read, of {shown}") from error
