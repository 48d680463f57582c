"""What a pipeline gives in one epoch: rows or batches, by number or in order.

There are four kinds. `Table` and `Feed` (module `table`) give rows; `Batches` and `BatchFeed` give
batches. Tables and batches are read by number, so that workers may read them in any order; feeds
are read from a given row or batch on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from threading import RLock
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.data import columns
from triplane.unified_ir.data.columns import Column, Columns, Rows, Schema
from triplane.unified_ir.data.kinds import is_batch_feed, is_batches, is_feed, is_table
from triplane.unified_ir.data.table import BLOCK, MAX_MEMORY_BYTES, ArrayTable, Feed, Table


class Batches(Protocol):
    """Batches that are read by number; the first axis of each column counts samples."""

    @property
    def schema(self) -> Schema:
        """What each column holds for one sample."""
        ...

    def __len__(self) -> int: ...

    def batch(self, k: int) -> Columns:
        """Return batch `k`. Called from several threads at once."""
        ...

    def rows_of(self, k: int) -> Rows:
        """Return the numbers of its samples among the rows that were batched, (n,) int64."""
        ...


class BatchFeed(Protocol):
    """Batches that can only be read one after the other."""

    @property
    def schema(self) -> Schema:
        """What each column holds for one sample."""
        ...

    def batches(self, start: int) -> Iterator[tuple[Rows, Columns]]:
        """Return all batches from number `start` on, each with the numbers of its samples."""
        ...


View = Table | Feed | Batches | BatchFeed
Upstream = Callable[[int], View]
"""The input of a step in an epoch, by the number of the epoch."""


@dataclass(eq=False)
class ComputedOnce:
    """A value that is computed when it is first needed, by one thread while others wait.

    Not `cached_property`: in Python 3.11 all instances of a class share its lock, and a pipeline
    that computes one while it holds the lock of `Memo` would wait for one that does the reverse.
    """

    _value: Any = None
    _lock: Any = field(default_factory=RLock)

    def get(self, compute: Callable[[], Any]) -> Any:
        """Return the value, computed by the first call."""
        with self._lock:
            if self._value is None:
                self._value = compute()
            return self._value


@dataclass(frozen=True, eq=False)
class Reordered:
    """Rows of a table in another order, some perhaps several times or not at all.

    compute: returns the numbers of the rows, called when they are first needed, since it may take a
    pass over all samples. size: how many there are, if that is known without it.
    """

    table: Table
    compute: Callable[[], Rows]
    size: int | None = None
    _once: ComputedOnce = field(default_factory=ComputedOnce)

    @property
    def order(self) -> Rows:
        """The numbers of the rows in the table, (N,) int64."""
        rows: Rows = self._once.get(self.compute)
        return rows

    @property
    def schema(self) -> Schema:
        """See `Table`."""
        return self.table.schema

    def __len__(self) -> int:
        return len(self.order) if self.size is None else self.size

    def take(self, rows: Rows) -> Columns:
        """See `Table`."""
        return self.table.take(self.order[rows])

    def column(self, name: str) -> Column:
        """Return a column of all rows."""
        return columns.take({name: whole_column(self.table, name)}, self.order)[name]


def rows_in_memory(table: Table) -> tuple[Mapping[str, Column], Rows] | None:
    """Return columns in memory and the numbers of their rows that a reordered table gives."""
    if not isinstance(table, Reordered):
        return None
    source, order = table.table, table.order
    while isinstance(source, Reordered):
        order = source.order[order]
        source = source.table
    # A cached table holds another.
    source = getattr(source, "held", source)
    return (source.columns, order) if isinstance(source, ArrayTable) else None


def source_rows(view: View, source: View) -> Rows | None:
    """Return the numbers in `source` of the rows of a view that was made from it, (N,) int64.

    None if they have none: a step joins or makes rows, or the source is read in order or is another
    one in each epoch.
    """
    if not is_table(view):
        return None
    if view is source:
        return np.arange(len(view))
    if isinstance(view, (Reordered, Strided)):
        rows = source_rows(view.table, source)
        return None if rows is None else rows[view.order]
    if isinstance(view, MappedTable):
        return source_rows(view.source, source)
    rows_in: Callable[[View], Rows | None] | None = getattr(view, "rows_in", None)
    return None if rows_in is None else rows_in(source)


@dataclass(frozen=True, eq=False)
class Strided:
    """Every `stride`-th row of a table from row `start` on, `size` rows in all."""

    table: Table
    start: int
    stride: int
    size: int

    @property
    def order(self) -> Rows:
        """The numbers of the rows in the table, (N,) int64."""
        return self.start + self.stride * np.arange(self.size)

    @property
    def schema(self) -> Schema:
        """See `Table`."""
        return self.table.schema

    def __len__(self) -> int:
        return self.size

    def take(self, rows: Rows) -> Columns:
        """See `Table`."""
        return self.table.take(self.start + self.stride * rows)

    def column(self, name: str) -> Column:
        """Return a column of all rows."""
        return columns.take({name: whole_column(self.table, name)}, self.order)[name]


RowFunction = Callable[[Columns, Rows], Columns]
"""From a block and the numbers of its rows to the block after a step."""


V = TypeVar("V", bound=View)


@dataclass(frozen=True, eq=False)
class _Mapped(Generic[V]):
    """A view whose blocks or batches go through a function.

    schema_of: the schema after it by that before; None for a function of the user's.
    """

    source: V
    function: RowFunction
    schema_of: Callable[[Schema], Schema] | None
    _once: ComputedOnce = field(default_factory=ComputedOnce, init=False)

    @property
    def schema(self) -> Schema:
        """See `Table`; of a function of the user's, what it gives for what comes first."""
        schema: Schema = self._once.get(self._schema)
        return schema

    def _schema(self) -> Schema:
        if self.schema_of is not None:
            return self.schema_of(self.source.schema)
        first = self._first()
        return {} if first is None else columns.schema_of(first)

    def _first(self) -> Columns | None:
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class MappedTable(_Mapped[Table]):
    """A table whose blocks go through a function. kept: columns that it leaves as they are."""

    kept: Callable[[str], bool] = lambda _: False

    def _first(self) -> Columns | None:
        return self.take(np.zeros(1, np.int64)) if len(self) else None

    def __len__(self) -> int:
        return len(self.source)

    def take(self, rows: Rows) -> Columns:
        """See `Table`."""
        return self.function(self.source.take(rows), rows)

    def column(self, name: str) -> Column | None:
        """Return a column of all rows if the function leaves it as it is."""
        return whole_column(self.source, name) if self.kept(name) else None


class MappedFeed(_Mapped[Feed]):
    """A feed whose blocks go through a function."""

    def _first(self) -> Columns | None:
        return next(self.blocks(0), None)

    def blocks(self, start: int) -> Iterator[Columns]:
        """See `Feed`."""
        for block in self.source.blocks(start):
            n = columns.count(block)
            yield self.function(block, np.arange(start, start + n))
            start += n


class MappedBatches(_Mapped[Batches]):
    """Batches that go through a function."""

    def _first(self) -> Columns | None:
        return self.batch(0) if len(self) else None

    def __len__(self) -> int:
        return len(self.source)

    def batch(self, k: int) -> Columns:
        """See `Batches`."""
        return self.function(self.source.batch(k), self.rows_of(k))

    def rows_of(self, k: int) -> Rows:
        """See `Batches`."""
        return self.source.rows_of(k)


class MappedBatchFeed(_Mapped[BatchFeed]):
    """A feed of batches that go through a function."""

    def _first(self) -> Columns | None:
        return next((batch for _, batch in self.batches(0)), None)

    def batches(self, start: int) -> Iterator[tuple[Rows, Columns]]:
        """See `BatchFeed`."""
        for rows, batch in self.source.batches(start):
            yield rows, self.function(batch, rows)


def mapped(
    view: View,
    function: RowFunction,
    schema_of: Callable[[Schema], Schema] | None,
    kept: Callable[[str], bool] = lambda _: False,
) -> View:
    """Return the view with every block, or every batch, passed through a function."""
    if is_table(view):
        return MappedTable(view, function, schema_of, kept)
    if is_feed(view):
        return MappedFeed(view, function, schema_of)
    if is_batches(view):
        return MappedBatches(view, function, schema_of)
    return MappedBatchFeed(view, function, schema_of)


def blocks_of(view: Table | Feed, start: int = 0, size: int = BLOCK) -> Iterator[Columns]:
    """Return all rows from `start` on, in blocks."""
    if is_feed(view):
        yield from view.blocks(start)
        return
    for at in range(start, len(view), size):
        yield view.take(np.arange(at, min(at + size, len(view))))


def whole_column(table: Table, name: str) -> Column:
    """Return one column of all rows, read without the others where the table can do that."""
    if name not in table.schema:
        raise InvalidInput(f"there is no column {name!r}; there are {', '.join(table.schema)}")
    read = getattr(table, "column", None)
    column: Column | None = None if read is None else read(name)
    if column is not None:
        return column
    if not len(table):
        return table.take(np.zeros(0, np.int64))[name]
    parts, size = [], 0
    for block in blocks_of(table):
        # A copy, which does not keep the other columns of its block in memory.
        parts.append(columns.take({name: block[name]}, np.arange(columns.count(block))))
        size += columns.n_bytes(parts[-1])
        if size > MAX_MEMORY_BYTES:
            raise InvalidInput(
                f"column {name!r} takes more than {MAX_MEMORY_BYTES} bytes in memory; read it in "
                "batches"
            )
    return columns.joined(parts)[name]


def table_of(view: View, step: str, hint: str) -> Table:
    """Return the view as a table; InvalidInput names the step that needs rows by number."""
    if is_table(view):
        return view
    if is_batches(view) or is_batch_feed(view):
        raise InvalidInput(f"{step} works on samples; put it before batch")
    raise InvalidInput(f"{step} needs samples that are read by number, this source {hint}")


def rows_view(view: View, step: str) -> Table | Feed:
    """Return the view if it gives rows; InvalidInput names the step that stands after batch."""
    if is_table(view) or is_feed(view):
        return view
    raise InvalidInput(f"{step} works on samples; put it before batch")
