"""What a source gives once it is open: a `Table` of samples by number, or a `Feed` in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from triplane.unified_ir.data import columns
from triplane.unified_ir.data.columns import Column, Columns, Rows, Schema

MAX_MEMORY_BYTES: Final = 4 << 30
"""Limit for sources that are read into memory as a whole."""
BLOCK: Final = 256
"""Samples that are read at once where the pipeline does not say."""


class Table(Protocol):
    """Samples that are read by number, in any order."""

    @property
    def schema(self) -> Schema:
        """What each column holds."""
        ...

    def __len__(self) -> int: ...

    def take(self, rows: Rows) -> Columns:
        """Return the samples at `rows` (n,) int64 in 0..len-1, in that order.

        Called from several threads at once. Raises Corrupt or Unavailable, with the place.
        """
        ...


class Feed(Protocol):
    """Samples that can only be read one after the other."""

    @property
    def schema(self) -> Schema:
        """What each column holds."""
        ...

    def blocks(self, start: int) -> Iterator[Columns]:
        """Return all samples from number `start` on, in blocks; called once for each epoch."""
        ...


class Source(Protocol):
    """The description of a source: a frozen dataclass whose fields are its JSON form."""

    def open(self) -> Table | Feed:
        """Open the source. NotFound, InvalidInput (a limit, what is not supported) or Corrupt."""
        ...


@dataclass(frozen=True, eq=False)
class ArrayTable:
    """Columns in memory, or mapped from a file.

    labels: names of the classes in column y. pixels: by column of uint8, the byte that means 1.0.
    Any other table or feed may have these two attributes as well.
    """

    columns: Mapping[str, Column]
    labels: tuple[str, ...] = ()
    pixels: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        columns.schema_of(self.columns)  # refuses a single number, which has no length
        columns.count(self.columns)

    @property
    def schema(self) -> Schema:
        """See `Table`."""
        return columns.schema_of(self.columns)

    def __len__(self) -> int:
        return columns.count(self.columns)

    def take(self, rows: Rows) -> Columns:
        """See `Table`."""
        return columns.take(self.columns, rows)

    def column(self, name: str) -> Column:
        """Return one column of all rows."""
        return self.columns[name]
