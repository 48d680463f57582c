"""Several datasets side by side, as one with the columns of all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.data import columns
from triplane.unified_ir.data.columns import Columns, Field, Rows, Schema
from triplane.unified_ir.data.kinds import is_table
from triplane.unified_ir.data.randomness import place_of_part
from triplane.unified_ir.data.table import BLOCK, Feed, Table
from triplane.unified_ir.data.views import View, blocks_of, rows_view

if TYPE_CHECKING:
    from triplane.unified_ir.data.dataset import Dataset


@dataclass(frozen=True, eq=False)
class ZipSource:
    """Samples with the columns of several datasets: sample k has those of sample k of each."""

    parts: tuple[Dataset, ...]

    def open(self) -> Table | Feed:
        """See `Source`."""
        if len(self.parts) < 2:
            raise InvalidInput(f"zip takes at least 2 datasets, got {len(self.parts)}")
        return _side_by_side(self, 0, 0, 0)

    @property
    def is_random(self) -> bool:
        """Whether epochs differ, since a step of a part is random."""
        return any(p.origin.is_random or any(s.is_random for s in p.steps) for p in self.parts)


def _side_by_side(source: ZipSource, seed: int, epoch: int, place: int) -> ZippedTable | ZippedFeed:
    views = tuple(
        rows_view(replace(part.opened(seed), place=place_of_part(place, k)).view(epoch), "zip")
        for k, part in enumerate(source.parts)
    )
    schema: dict[str, Field] = {}
    for view in views:
        if shared := schema.keys() & view.schema.keys():
            raise InvalidInput(
                f"zip: two datasets have a column {min(shared)!r}; rename one of them"
            )
        schema |= view.schema
    tables = [view for view in views if is_table(view)]
    if len(tables) < len(views):
        return ZippedFeed(source, views, schema)
    sizes = [len(table) for table in tables]
    if len(set(sizes)) > 1:
        raise InvalidInput(f"zip: the datasets have {sizes} samples; take as many of each")
    return ZippedTable(source, tuple(tables), schema, (seed, epoch, place))


@dataclass(frozen=True, eq=False)
class ZippedTable:
    """See `ZipSource`."""

    source: ZipSource
    tables: tuple[Table, ...]
    schema: Schema
    drawn_for: tuple[int, int, int]

    def of_epoch(self, seed: int, epoch: int, place: int) -> View:
        """Return the same of another epoch, since the parts may be shuffled."""
        if self.drawn_for == (seed, epoch, place) or not self.source.is_random:
            return self
        return _side_by_side(self.source, seed, epoch, place)

    def __len__(self) -> int:
        return len(self.tables[0])

    def take(self, rows: Rows) -> Columns:
        """See `Table`."""
        return {k: v for table in self.tables for k, v in table.take(rows).items()}


@dataclass(frozen=True, eq=False)
class ZippedFeed:
    """See `ZipSource`; at least one part is read in order."""

    source: ZipSource
    views: tuple[Table | Feed, ...]
    schema: Schema

    def of_epoch(self, seed: int, epoch: int, place: int) -> View:
        """Return the same of another epoch, since the parts may be shuffled."""
        return _side_by_side(self.source, seed, epoch, place)

    def blocks(self, start: int) -> Iterator[Columns]:
        """See `Feed`. InvalidInput if one dataset ends before another."""
        streams = [_Rows(blocks_of(view, start)) for view in self.views]
        while True:
            parts = [stream.next(BLOCK) for stream in streams]
            n = [columns.count(part) if part else 0 for part in parts]
            if len(set(n)) > 1:
                raise InvalidInput("zip: one dataset ends before another; take as many of each")
            if not n[0]:
                return
            yield {k: v for part in parts for k, v in part.items()}


class _Rows:
    """Rows of a stream of blocks, in portions of a chosen size."""

    def __init__(self, blocks: Iterator[Columns]) -> None:
        self._blocks = blocks
        self._held: Columns = {}

    def next(self, size: int) -> Columns:
        """Return the next `size` rows; fewer only at the end, {} after it."""
        parts = [self._held] if self._held else []
        rows = columns.count(self._held) if self._held else 0
        while rows < size and (block := next(self._blocks, None)) is not None:
            parts.append(block)
            rows += columns.count(block)
        if not parts:
            return {}
        whole = columns.joined(parts)
        self._held = columns.part(whole, size, rows) if rows > size else {}
        return columns.part(whole, 0, size)
