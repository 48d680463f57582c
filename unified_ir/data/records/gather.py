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


@dataclass(frozen=True, slots=True, eq=False)
class RecordGather:
    """The places of n rows; their blocks are checked.

    block, base, rows: (n,) number of the row's block, its offset in the shard, its rows. row: (n,)
    number of the row in its block. shard: (n,), or None if there is only one.
    """

    maps: Sequence[memoryview]
    blocks: BlockTable
    layout: RecordLayout
    block: Rows
    base: Rows
    rows: Rows
    row: Rows
    shard: Rows | None

    @classmethod
    def of(
        cls,
        maps: Sequence[memoryview],
        blocks: BlockTable,
        layout: RecordLayout,
        block: Rows,
        rows: Rows,
    ) -> RecordGather:
        """Return the places of these rows of the set, which are in these blocks."""
        shard = None if len(maps) == 1 else blocks.shards[block]
        return cls(
            maps, blocks, layout, block, blocks.bases[block], blocks.rows[block],
            rows - blocks.starts[block], shard,
        )  # fmt: skip

    def column(self, column: StoredColumn) -> Column:
        """Return the values of one column. UnicodeDecodeError: a text is not UTF-8."""
        return self._variable(column) if column.is_variable else self._fixed(column)

    def _fixed(self, column: StoredColumn) -> Array:
        shape = (len(self.row), *column.shape)
        if not column.item_bytes:
            return np.empty(shape, column.dtype)
        at = self.base + self.rows * column.before + self.row * column.item_bytes
        return _numbers(self._items(at, column.item_bytes), column).reshape(shape)

    def _variable(self, column: StoredColumn) -> Column:
        start, stop = self._bounds(column)
        first = self._first_element(column)
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

    def _bounds(self, column: StoredColumn) -> tuple[Rows, Rows]:
        """Return where each row starts and stops among its block's elements."""
        table = self.base + self.rows * self.layout.row_bytes
        table += OFFSET_BYTES * column.before * (self.rows + 1)
        pairs = self._items(table + OFFSET_BYTES * self.row, 2 * OFFSET_BYTES)
        start, stop = pairs.view("<u4").reshape(-1, 2).astype(np.int64).T
        return start, stop

    def _first_element(self, column: StoredColumn) -> Rows:
        """Return the address of the first element of each row's block."""
        tables = OFFSET_BYTES * len(self.layout.variable) * (self.rows + 1)
        address: Rows = self.base + self.rows * self.layout.row_bytes + tables
        for other in self.layout.variable[: column.before]:
            address += self.blocks.elements[self.block, other.before] * other.item_bytes
        return address

    def _items(self, at: Rows, item_bytes: int) -> NDArray[np.void]:
        """Return the items of so many bytes at these addresses, (n,)."""
        if self.shard is None:
            return _overlapping(self.maps[0], item_bytes)[at]
        items = np.empty(len(at), f"V{item_bytes}")
        for k in np.unique(self.shard):
            here = np.flatnonzero(self.shard == k)
            items[here] = _overlapping(self.maps[k], item_bytes)[at[here]]
        return items

    def _parts(self, start: Rows, stop: Rows) -> list[memoryview]:
        places = zip(start.tolist(), stop.tolist(), strict=True)
        if self.shard is None:
            content = self.maps[0]
            return [content[a:b] for a, b in places]
        return [self.maps[k][a:b] for k, (a, b) in zip(self.shard.tolist(), places, strict=True)]


def _overlapping(content: memoryview, item_bytes: int) -> NDArray[np.void]:
    # An index into items of type `void` copies each with one memcpy; rows of bytes take longer.
    count = max(len(content) - item_bytes + 1, 0)
    return np.ndarray((count,), f"V{item_bytes}", buffer=content, strides=(1,))


def _numbers(items: NDArray[Any], column: StoredColumn) -> Array:
    # A forged byte would make a boolean that is neither of the two.
    return items.view(np.uint8) != 0 if column.dtype.kind == "b" else items.view(column.dtype)
