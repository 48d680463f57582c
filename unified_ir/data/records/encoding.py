"""Turn columns into the bytes of blocks, and cut blocks at the row where they are large enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.data import columns as of_columns
from triplane.unified_ir.data.columns import (
    TEXT,
    Array,
    Column,
    Columns,
    Ragged,
    Rows,
    offsets_of,
)
from triplane.unified_ir.data.records.format import (
    MAX_BLOCK_ROWS,
    MAX_RECORD_BYTES,
    OFFSET_BYTES,
    RecordLayout,
    StoredColumn,
)

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class EncodedRows:
    """Rows as bytes. records: (n, record bytes), the fixed columns. variable: (offsets, elements).

    offsets: (n + 1,) from 0, in bytes of `elements`.
    """

    records: Bytes
    variable: tuple[tuple[Rows, Bytes], ...]

    def __len__(self) -> int:
        return len(self.records)

    @property
    def row_bytes(self) -> Rows:
        """The bytes of each row in a block, with its offsets: (n,)."""
        total = np.full(len(self), self.records.shape[1], np.int64)
        for offsets, _ in self.variable:
            total += np.diff(offsets) + OFFSET_BYTES
        return total

    def part(self, start: int, stop: int) -> EncodedRows:
        """Return rows start..stop-1, as views of the values."""
        variable = []
        for offsets, elements in self.variable:
            here = offsets[start : stop + 1]
            variable.append((here - here[0], elements[here[0] : here[-1]]))
        return EncodedRows(self.records[start:stop], tuple(variable))

    def copy(self) -> EncodedRows:
        """Return rows that share no memory with the caller's arrays."""
        variable = ((offsets.copy(), elements.copy()) for offsets, elements in self.variable)
        return EncodedRows(self.records.copy(), tuple(variable))

    def content(self, layout: RecordLayout) -> tuple[list[Bytes], list[int]]:
        """Return the bytes of one block in order, and the elements of each variable column."""
        tables, counts = [], []
        for column, (offsets, _) in zip(layout.variable, self.variable, strict=True):
            table = offsets // column.item_bytes
            tables.append(table.astype("<u4").view(np.uint8))
            counts.append(int(table[-1]))
        records = np.ascontiguousarray(self.records).reshape(-1)
        return [records, *tables, *(elements for _, elements in self.variable)], counts


def encoded(layout: RecordLayout, columns: Columns) -> EncodedRows:
    """Return columns as bytes; InvalidInput names the column that is not as the schema says."""
    stored = layout.fixed + layout.variable
    names = {column.name for column in stored}
    if columns.keys() != names:
        raise InvalidInput(f"the records have the columns {sorted(names)}, got {sorted(columns)}")
    n = of_columns.count(columns)
    parts = [_fixed(column, columns[column.name]) for column in layout.fixed]
    # Joining one part would copy all that is appended.
    records = (
        parts[0] if len(parts) == 1 else np.concatenate([np.empty((n, 0), np.uint8), *parts], 1)
    )
    variable = (_variable(column, columns[column.name]) for column in layout.variable)
    rows = EncodedRows(records, tuple(variable))
    largest = int(rows.row_bytes.max(initial=0))
    if largest > MAX_RECORD_BYTES:
        raise InvalidInput(
            f"row {int(rows.row_bytes.argmax())} of the block has {largest} bytes; a record has at "
            f"most {MAX_RECORD_BYTES}"
        )
    return rows


def joined(parts: Sequence[EncodedRows]) -> EncodedRows:
    """Return rows one behind the other."""
    if len(parts) == 1:
        return parts[0]
    variable = []
    for each in zip(*(p.variable for p in parts), strict=True):
        lengths = np.concatenate([np.diff(offsets) for offsets, _ in each])
        variable.append((offsets_of(lengths), np.concatenate([x for _, x in each])))
    return EncodedRows(np.concatenate([p.records for p in parts]), tuple(variable))


def cut(rows: EncodedRows, block_bytes: int) -> tuple[list[EncodedRows], EncodedRows]:
    """Return blocks, each ending with the row that makes it large enough, and the rest."""
    ends = np.cumsum(rows.row_bytes)
    blocks, start = [], 0
    while start < len(rows):
        before = int(ends[start - 1]) if start else 0
        enough = int(np.searchsorted(ends, before + block_bytes)) + 1
        stop = min(enough, start + MAX_BLOCK_ROWS)
        if stop > len(rows):
            break
        blocks.append(rows.part(start, stop))
        start = stop
    return blocks, rows.part(start, len(rows))


def _fixed(column: StoredColumn, values: Column) -> Bytes:
    if isinstance(values, Ragged) or (values.dtype, values.shape[1:]) != (
        column.dtype,
        column.shape,
    ):
        raise _mismatch(column, values)
    return _bytes_of(values, column)


def _variable(column: StoredColumn, values: Column) -> tuple[Rows, Bytes]:
    if column.field.is_ragged:
        return _ragged(column, values)
    kind = str if column.field.dtype == TEXT else bytes
    if isinstance(values, Ragged) or values.dtype != object or values.ndim != 1:
        raise _mismatch(column, values)
    for row, value in enumerate(values):
        if not isinstance(value, kind):
            raise InvalidInput(
                f"column {column.name!r} holds {column.field}, got {type(value).__name__} in row "
                f"{row} of the block"
            )
    try:
        parts = [x.encode() for x in values] if kind is str else list(values)
    except UnicodeEncodeError as error:
        raise InvalidInput(f"column {column.name!r} holds text without UTF-8: {error}") from error
    lengths = np.fromiter(map(len, parts), np.int64, len(parts))
    return offsets_of(lengths), np.frombuffer(b"".join(parts), np.uint8)


def _ragged(column: StoredColumn, values: Column) -> tuple[Rows, Bytes]:
    if not isinstance(values, Ragged):
        # Samples of one block may agree in the axis that differs between blocks.
        if values.ndim < 2:
            raise _mismatch(column, values)
        n, length = values.shape[:2]
        flat = values.reshape(n * length, *values.shape[2:])
        values = Ragged(flat, np.arange(n + 1, dtype=np.int64) * length)
    if (values.values.dtype, values.values.shape[1:]) != (column.dtype, column.shape):
        raise _mismatch(column, values)
    offsets, end = np.asarray(values.offsets, np.int64), len(values.values)
    if offsets[0] < 0 or offsets[-1] > end or (np.diff(offsets) < 0).any():
        raise InvalidInput(f"the offsets of column {column.name!r} do not ascend within 0..{end}")
    elements = _bytes_of(values.values[offsets[0] : offsets[-1]], column)
    return (offsets - offsets[0]) * column.item_bytes, elements.reshape(-1)


def _bytes_of(values: Array, column: StoredColumn) -> Bytes:
    """Return (n, item bytes) of (n, ...) values."""
    if not column.item_bytes:
        return np.empty((len(values), 0), np.uint8)
    rows = np.ascontiguousarray(values)
    return rows.reshape(len(values), column.item_bytes // rows.itemsize).view(np.uint8)


def _mismatch(column: StoredColumn, values: Column) -> InvalidInput:
    kind, array = ("Ragged ", values.values) if isinstance(values, Ragged) else ("", values)
    return InvalidInput(
        f"column {column.name!r} holds {column.field}, got {kind}{array.dtype} in the shape "
        f"{array.shape}; convert it, or state a schema with the first size None where samples "
        "differ in it"
    )
