"""Text tables (RFC 4180) as sources: a `Table` in memory, or a `Feed` if they do not fit.

The first row names the columns. The type of a column is inferred from the whole file, never from
its first rows: int64, float64, bool (true and false), else text.
"""

from __future__ import annotations

import csv
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from triplane.proto.errors import Corrupt, InvalidInput
from triplane.unified_ir.data.columns import MAX_COLUMNS, TEXT, Columns, Field
from triplane.unified_ir.data.sources.cells import (
    CELL_TYPES,
    TypeInference,
    converted,
    type_with_missing,
)
from triplane.unified_ir.data.sources.lines import LimitedLines
from triplane.unified_ir.data.sources.memory import check_missing, selection, table_of_feed
from triplane.unified_ir.data.table import MAX_MEMORY_BYTES, ArrayTable
from triplane.unified_ir.files import bounded

MAX_CSV_BYTES: Final = 64 << 30
"""Limit for the file, and for the characters that a compressed one inflates to. The limit for a row
is `lines.MAX_LINE_CHARS`, that for a cell the csv module's own, 131072 characters."""
BLOCK_ROWS: Final = 4096
BLOCK_CHARS: Final = 16 << 20


@dataclass(frozen=True)
class CsvSource:
    """A CSV file in UTF-8, through gzip if its name ends in .gz.

    delimiter: between cells. header: whether the first row names the columns; else they are named
    f0, f1, .... columns: those to read, by default all. types: (column, type) for columns whose
    type is not to be inferred: int64, float64, bool or text. missing: the number to take for empty
    and NaN cells, in columns of numbers; by default they are refused.

    A whole number beyond int64, or of more than 15 digits among decimals, makes a column text, as
    float64 would lose digits. Blank lines are skipped. A file whose columns take more than
    `MAX_MEMORY_BYTES` is a `Feed`, which reads block by block; if it is that large itself, stating
    all types saves the first pass over it.
    """

    path: str
    delimiter: str = ","
    header: bool = True
    columns: tuple[str, ...] = ()
    types: tuple[tuple[str, str], ...] = ()
    missing: float | None = None

    def __post_init__(self) -> None:
        if len(self.delimiter) != 1 or self.delimiter in '"\r\n\0':
            raise InvalidInput(f"a delimiter is one character, not a quote, got {self.delimiter!r}")
        for column, name in self.types:
            if name not in CELL_TYPES:
                raise InvalidInput(f"{column!r} has the type {name!r}; {', '.join(CELL_TYPES)} are")
        check_missing(self.missing)

    def names(self) -> tuple[str, ...]:
        """Return the names of all columns in the file. NotFound, InvalidInput or Corrupt."""
        reader = _CsvReader(Path(self.path), (), delimiter=self.delimiter, header=self.header)
        return reader.names

    def open(self) -> ArrayTable | CsvFeed:
        """Read the columns, or their types alone. NotFound, InvalidInput or Corrupt."""
        path = Path(self.path)
        reader = _CsvReader(path, self.columns, delimiter=self.delimiter, header=self.header)
        stated = dict(self.types)
        selection(path, reader.names, tuple(stated))
        if stated.keys() >= set(reader.names) and path.stat().st_size > MAX_MEMORY_BYTES:
            return CsvFeed(reader, tuple(stated[name] for name in reader.names), self.missing)
        survey = _survey(reader, stated, self.missing)
        feed = CsvFeed(reader, survey.types, self.missing)
        return feed if survey.n_bytes > MAX_MEMORY_BYTES else table_of_feed(path, feed, survey.rows)


@dataclass(frozen=True, eq=False)
class CsvFeed:
    """The rows of a CSV file, parsed again for each epoch."""

    reader: _CsvReader
    types: tuple[str, ...]
    missing: float | None

    @property
    def schema(self) -> dict[str, Field]:
        """See `Feed`."""
        return {n: Field(t) for n, t in zip(self.reader.names, self.types, strict=True)}

    def blocks(self, start: int) -> Iterator[Columns]:
        """See `Feed`."""
        for lines, columns in self.reader.blocks(start):
            yield {
                name: converted(cells, type_name, self.missing, self._place(name, lines))
                for name, type_name, cells in zip(
                    self.reader.names, self.types, columns, strict=True
                )
            }

    def _place(self, name: str, lines: Sequence[int]) -> Callable[[int], str]:
        return lambda k: f"{self.reader.path}:{lines[k]}: column {name!r}"


@dataclass(frozen=True)
class _Survey:
    """What a first pass over the file says: types by column, rows, bytes that columns take."""

    types: tuple[str, ...]
    rows: int
    n_bytes: int


class _CsvReader:
    """The rows of a file as text. names: of the columns that are read."""

    def __init__(
        self, path: Path, columns: tuple[str, ...], *, delimiter: str, header: bool
    ) -> None:
        self.path, self._delimiter, self._header = path, delimiter, header
        present = self._present()
        self.names = selection(path, present, columns)
        self._width = len(present)
        self._indices = [present.index(name) for name in self.names]

    def blocks(self, start: int = 0) -> Iterator[tuple[list[int], list[tuple[str, ...]]]]:
        """Yield (line of each row, cells of each column) from row `start` on."""
        records = itertools.islice(self._rows(), start, None)
        lines: list[int] = []
        rows: list[list[str]] = []
        chars = 0
        for line, cells in records:
            rows.append([cells[i] for i in self._indices])
            lines.append(line)
            chars += sum(map(len, rows[-1]))
            if len(rows) == BLOCK_ROWS or chars > BLOCK_CHARS:
                yield lines, list(zip(*rows, strict=True))
                lines, rows, chars = [], [], 0
        if rows:
            yield lines, list(zip(*rows, strict=True))

    def _rows(self) -> Iterator[tuple[int, list[str]]]:
        records = _records(self.path, self._delimiter)
        if self._header:
            next(records, None)
        for line, cells in records:
            if len(cells) != self._width:
                raise InvalidInput(
                    f"{self.path}:{line} has {len(cells)} cells, the first row has {self._width}; "
                    f"is {self._delimiter!r} the delimiter, and are cells with it quoted?"
                )
            yield line, cells

    def _present(self) -> list[str]:
        _, cells = next(_records(self.path, self._delimiter), (0, []))
        if not cells:
            raise InvalidInput(f"{self.path} is empty")
        if len(cells) > MAX_COLUMNS:
            raise InvalidInput(f"{self.path} has {len(cells)} columns; {MAX_COLUMNS} are read")
        if not self._header:
            return [f"f{k}" for k in range(len(cells))]
        if len(set(cells)) != len(cells) or not all(cells):
            wrong = next(name for name in cells if not name or cells.count(name) > 1)
            raise InvalidInput(
                f"{self.path}:1: the first row names each column once, {wrong[:40]!r} does not; "
                "state header=False if it holds values"
            )
        return cells


def _records(path: Path, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield (line number, cells) of each row."""
    with bounded.inflated(path, limit_bytes=MAX_CSV_BYTES) as file:
        lines = LimitedLines(path, file, MAX_CSV_BYTES, newline="")
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
        while True:
            line = reader.line_num + 1
            lines.start_record()
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                family = InvalidInput if "field limit" in str(error) else Corrupt
                raise family(f"{path}:{line} is not a row of CSV: {error}") from error
            if cells:
                yield line, cells


def _survey(reader: _CsvReader, stated: dict[str, str], missing: float | None) -> _Survey:
    inferences = [TypeInference() for _ in reader.names]
    rows = n_bytes = 0
    text_bytes = [0] * len(reader.names)
    for lines, columns in reader.blocks():
        rows += len(lines)
        for k, cells in enumerate(columns):
            if reader.names[k] not in stated:
                inferences[k].add(cells)
            text_bytes[k] += sum(map(sys.getsizeof, cells))
    types = tuple(
        stated.get(name) or type_with_missing(inference.type, missing)
        for name, inference in zip(reader.names, inferences, strict=True)
    )
    n_bytes = 8 * rows * len(types)
    n_bytes += sum(n for n, name in zip(text_bytes, types, strict=True) if name == TEXT)
    return _Survey(types, rows, n_bytes)
