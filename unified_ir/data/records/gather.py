"""Gather the values of any rows out of mapped shards: one fancy index for each fixed column.

The bytes of a shard are seen as overlapping items, one starting at each byte. An item's address is
then its index, so blocks of any size are gathered by one index, as from one array.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triplane.unified_ir.data.columns import TEXT, Array, Column, Ragged, Rows, offsets_of
from triplane.unified_ir.data.records.format import (
    OFFSET_BYTES,
    BlockTable,
    RecordLayout,
    StoredColumn,
)


@dataclass(slots=True, eq=False)  # made for each batch: freezing one takes a microsecond
class RecordGather:
    """The places of n rows, whose blocks are checked.

    block, row: (n,) each row's block, and its number in the set. at: (n,) the address of its record
    in its shard. shard: (n,), or None if there is only one.
    """

    maps: Sequence[memoryview]
    blocks: BlockTable
    layout: RecordLayout
    block: Rows
    row: Rows
    at: Rows
    shard: Rows | None

    def column(self, column: StoredColumn) -> Column:
        """Return the values of one column. UnicodeDecodeError: a text is not UTF-8."""
        return self._variable(column) if column.is_variable else self._fixed(column)

    def _fixed(self, column: StoredColumn) -> Array:
        shape = (len(self.at), *column.shape)
        if not column.item_bytes:
            return np.empty(shape, column.dtype)
        items = self._items(self.at, column.item_bytes, column.before)
        return _numbers(items, column).reshape(shape)

    def _variable(self, column: StoredColumn) -> Column:
        first, start, stop = self._bounds(column)
        parts = self._parts(first + start * column.item_bytes, first + stop * column.item_bytes)
        if column.field.is_ragged:
            values = _numbers(np.frombuffer(bytearray().join(parts), np.uint8), column)
            return Ragged(values.reshape(-1, *column.shape), offsets_of(stop - start))
        objects = np.empty(len(parts), object)
        if column.field.dtype == TEXT:
            objects[:] = [str(part, "utf-8") for part in parts]
        else:
            objects[:] = list(map(bytes, parts))
        return objects

    def _bounds(self, column: StoredColumn) -> tuple[Rows, Rows, Rows]:
        """Return the address of the block's first element, and where each row starts and stops."""
        rows = self.blocks.rows[self.block]
        table_bytes = OFFSET_BYTES * (rows + 1)
        tables = self.blocks.bases[self.block] + rows * self.layout.row_bytes
        row = self.row - self.blocks.starts[self.block]
        place = tables + column.before * table_bytes + OFFSET_BYTES * row
        pairs = self._items(place, 2 * OFFSET_BYTES).view("<u4").reshape(-1, 2)
        first = tables + len(self.layout.variable) * table_bytes
        for other in self.layout.variable[: column.before]:
            first += self.blocks.elements[self.block, other.before] * other.item_bytes
        start, stop = pairs.astype(np.int64).T
        return first, start, stop

    def _items(self, at: Rows, item_bytes: int, offset: int = 0) -> NDArray[np.void]:
        """Return the items of so many bytes, `offset` behind these addresses: (n,)."""
        if self.shard is None:
            return _overlapping(self.maps[0], item_bytes, offset)[at]
        items = np.empty(len(at), f"V{item_bytes}")
        for k in np.unique(self.shard):
            here = np.flatnonzero(self.shard == k)
            items[here] = _overlapping(self.maps[k], item_bytes, offset)[at[here]]
        return items

    def _parts(self, start: Rows, stop: Rows) -> list[memoryview]:
        places = zip(start.tolist(), stop.tolist(), strict=True)
        if self.shard is None:
            content = self.maps[0]
            return [content[a:b] for a, b in places]
        return [self.maps[k][a:b] for k, (a, b) in zip(self.shard.tolist(), places, strict=True)]


def _overlapping(content: memoryview, item_bytes: int, offset: int) -> NDArray[np.void]:
    # An index into items of type `void` copies each with one memcpy; rows of bytes take longer.
    count = len(content) - offset - item_bytes + 1
    return np.ndarray((count,), f"V{item_bytes}", content, offset, (1,))


def _numbers(items: NDArray[Any], column: StoredColumn) -> Array:
    # A forged byte would make a boolean that is neither of the two.
    return items.view(np.uint8) != 0 if column.dtype.kind == "b" else items.view(column.dtype)
