"""The rows of a query to an SQLite file: a `Table` in memory, or a `Feed` if they do not fit.

The file is opened for reading only, and the query may read tables and compute, nothing else: no
writing, no pragmas, no other files, no extensions. Its work is limited by the instructions of
SQLite's machine, so the limit does not depend on the speed of the computer.
"""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np

from triplane.proto.errors import Corrupt, InvalidInput, TriplaneError, Unavailable
from triplane.unified_ir.data.columns import BYTES, TEXT, Array, Columns, Field
from triplane.unified_ir.data.sources.memory import check_missing, selection, table_of_feed
from triplane.unified_ir.data.table import MAX_MEMORY_BYTES, ArrayTable
from triplane.unified_ir.files import bounded

MAX_SQLITE_BYTES: Final = 1 << 40
MAX_VALUE_BYTES: Final = 16 << 20
MAX_QUERY_BYTES: Final = 64 << 10
MAX_INSTRUCTIONS: Final = 20_000_000_000
"""Limit for one run of the query; a row of ten columns takes about 15 instructions."""
BLOCK_ROWS: Final = 4096
BLOCK_BYTES: Final = 16 << 20
_CHECK_EVERY: Final = 100_000  # instructions
_MAGIC: Final = b"SQLite format 3\0"
_ACTIONS: Final = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
}
_FORBIDDEN_FUNCTIONS: Final = {"load_extension", "fts3_tokenizer", "random", "randomblob"}
# Advice of sqlite.org/security.html for files that may be hostile.
_PRAGMAS: Final = ("query_only=ON", "trusted_schema=OFF", "cell_size_check=ON", "mmap_size=0")
_LIMITS: Final = {
    sqlite3.SQLITE_LIMIT_LENGTH: MAX_VALUE_BYTES,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: MAX_QUERY_BYTES,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}
_FAMILIES: Final[dict[int | None, type[TriplaneError]]] = {
    sqlite3.SQLITE_CORRUPT: Corrupt,
    sqlite3.SQLITE_NOTADB: Corrupt,
    None: Corrupt,  # text that is not UTF-8, also that of SQLite's own message
    sqlite3.SQLITE_BUSY: Unavailable,
    sqlite3.SQLITE_LOCKED: Unavailable,
    sqlite3.SQLITE_IOERR: Unavailable,
    sqlite3.SQLITE_CANTOPEN: Unavailable,
    sqlite3.SQLITE_FULL: Unavailable,
}
_EXACT: Final = 2**53


@dataclass(frozen=True)
class SqliteSource:
    """The rows of `query`, one SELECT, in the order in which SQLite returns them.

    State ORDER BY with a key that is unique; without it the order may change with the file and with
    SQLite's version. The type of a column follows from all its values: int64, float64 (also for
    whole and other numbers together), text or bytes. missing: the number to take for NULL in
    columns of numbers; by default NULL is refused, as it always is for text and bytes.
    """

    path: str
    query: str
    missing: float | None = None

    def __post_init__(self) -> None:
        check_missing(self.missing)

    def open(self) -> ArrayTable | SqliteFeed:
        """Run the query to learn types and sizes, and once more to read it."""
        with _connected(Path(self.path)) as connection:
            feed, rows, n_bytes = _survey(self, connection)
            if n_bytes > MAX_MEMORY_BYTES:
                return feed
            snapshot = SqliteFeed(self, feed.schema, connection)
            return table_of_feed(self.path, snapshot, rows)


@dataclass(frozen=True, eq=False)
class SqliteFeed:
    """The rows of a query, which runs again for each epoch."""

    source: SqliteSource
    schema: dict[str, Field]
    connection: sqlite3.Connection | None = None

    def blocks(self, start: int) -> Iterator[Columns]:
        """See `Feed`."""
        if self.connection is not None:
            yield from self._blocks(self.connection, start)
            return
        with _connected(Path(self.source.path)) as connection:
            yield from self._blocks(connection, start)

    def _blocks(self, connection: sqlite3.Connection, start: int) -> Iterator[Columns]:
        at = start
        for _, _, columns in _blocks(self.source, connection, start):
            fields = zip(self.schema.items(), columns, strict=True)
            yield {
                name: _column(values, kind.dtype, self.source, name, at)
                for (name, kind), values in fields
            }
            at += len(columns[0])


@dataclass(slots=True)
class _ColumnSurvey:
    """The types of the values of a column, and the first row with each of them."""

    first: dict[type, int] = field(default_factory=dict)
    largest: int = 0

    def add(self, values: Sequence[Any], at: int) -> None:
        for kind in set(map(type, values)) - self.first.keys():
            self.first[kind] = at + next(k for k, v in enumerate(values) if type(v) is kind)
        if int in self.first:
            self.largest = max(
                self.largest, max((abs(v) for v in values if type(v) is int), default=0)
            )

    def dtype(self, what: str, missing: float | None) -> str:
        kinds = self.first.keys() - {type(None)}
        if type(None) in self.first:
            numbers = kinds <= {int, float}
            if missing is None or not numbers:
                raise InvalidInput(
                    f"{what} is NULL in row {self.first[type(None)]}; filter it in the query, use "
                    f"COALESCE{', or state missing=' if numbers else ''}"
                )
            kinds |= {int if float(missing).is_integer() else float}
        if kinds == {int, float} and self.largest > _EXACT:
            raise InvalidInput(
                f"{what} holds decimals and the whole number {self.largest}, which float64 cannot "
                "represent; use CAST in the query"
            )
        names = {
            frozenset({int}): "int64",
            frozenset({float}): "float64",
            frozenset({int, float}): "float64",
            frozenset({str}): TEXT,
            frozenset({bytes}): BYTES,
        }
        name = names.get(frozenset(kinds))
        if name is None:
            first = sorted(self.first.items(), key=lambda item: item[1])
            seen = ", ".join(f"{kind.__name__} in row {row}" for kind, row in first)
            raise InvalidInput(f"{what} holds one type of value, got {seen}; use CAST in the query")
        return name


def _survey(source: SqliteSource, connection: sqlite3.Connection) -> tuple[SqliteFeed, int, int]:
    """Return the feed, its rows and the bytes that they take."""
    surveys: list[_ColumnSurvey] = []
    names: tuple[str, ...] = ()
    rows = total = 0
    for names, n_bytes, columns in _blocks(source, connection, 0):
        surveys = surveys or [_ColumnSurvey() for _ in names]
        for survey, values in zip(surveys, columns, strict=True):
            survey.add(values, rows)
        rows += len(columns[0])
        total += n_bytes
    if not rows:
        raise InvalidInput(f"{source.path}: the query returns no row: {_shown(source.query)}")
    schema = {
        name: Field(survey.dtype(f"{source.path}: column {name!r}", source.missing))
        for name, survey in zip(names, surveys, strict=True)
    }
    return SqliteFeed(source, schema), rows, total


def _blocks(
    source: SqliteSource, connection: sqlite3.Connection, start: int
) -> Iterator[tuple[tuple[str, ...], int, list[tuple[Any, ...]]]]:
    """Yield (names of columns, bytes, values of each column) of the rows from `start` on."""
    budget = iter(range(MAX_INSTRUCTIONS // _CHECK_EVERY))
    connection.set_progress_handler(lambda: next(budget, None) is None, _CHECK_EVERY)
    try:
        with closing(connection.execute(source.query)) as cursor:
            names = selection(source.path, [d[0] for d in cursor.description or ()], ())
            rows: list[tuple[Any, ...]] = []
            n_bytes = 0
            for row in islice(cursor, start, None):
                rows.append(row)
                n_bytes += sum(map(sys.getsizeof, row))
                if len(rows) == BLOCK_ROWS or n_bytes > BLOCK_BYTES:
                    yield names, n_bytes, list(zip(*rows, strict=True))
                    rows, n_bytes = [], 0
            if rows:
                yield names, n_bytes, list(zip(*rows, strict=True))
    except (sqlite3.Error, sqlite3.Warning, UnicodeDecodeError) as error:
        raise _family(error)(
            f"{source.path}: the query {_shown(source.query)!r} failed: {_reason(error)}"
        ) from error


def _column(values: Sequence[Any], dtype: str, source: SqliteSource, name: str, at: int) -> Array:
    is_number = dtype not in {TEXT, BYTES}
    kinds = {TEXT: (str,), BYTES: (bytes,), "int64": (int,), "float64": (int, float)}[dtype]
    if is_number and source.missing is not None:
        missing = int(source.missing) if dtype == "int64" else source.missing
        values = [missing if v is None else v for v in values]
    for k, value in enumerate(values):
        if type(value) not in kinds:
            raise InvalidInput(
                f"{source.path}: column {name!r} was {dtype} when the source was opened, now row "
                f"{at + k} holds {type(value).__name__}; the file has changed, open it again"
            )
    column = np.empty(len(values), dtype if is_number else object)
    column[:] = values
    return column


@contextmanager
def _connected(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a file so that queries can only read it; what they read is one snapshot."""
    with bounded.opened(path, limit_bytes=MAX_SQLITE_BYTES) as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise Corrupt(f"{path} is not an SQLite file")
    uri = path.absolute().as_uri() + "?mode=ro"
    try:
        # A feed may be created in one thread and read in another.
        connection = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
    except sqlite3.Error as error:
        raise Unavailable(f"{path} could not be opened: {error}") from error
    with closing(connection):
        try:
            for category, limit in _LIMITS.items():
                connection.setlimit(category, limit)
            for pragma in _PRAGMAS:
                connection.execute(f"PRAGMA {pragma}").close()
            connection.execute("BEGIN")
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise _family(error)(f"{path} could not be opened: {error}") from error
        connection.set_authorizer(_permission)
        yield connection


def _permission(action: int, *names: str | None) -> int:
    if action not in _ACTIONS:
        return sqlite3.SQLITE_DENY
    if action == sqlite3.SQLITE_FUNCTION and (names[1] or "").lower() in _FORBIDDEN_FUNCTIONS:
        return sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_OK


def _family(error: Exception) -> type[TriplaneError]:
    if isinstance(error, sqlite3.ProgrammingError | sqlite3.DataError | sqlite3.Warning):
        return InvalidInput
    code = getattr(error, "sqlite_errorcode", None)
    return _FAMILIES.get(code if code is None else code & 0xFF, InvalidInput)


def _reason(error: Exception) -> str:
    if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_INTERRUPT:
        return f"it takes more than {MAX_INSTRUCTIONS} instructions; select less, or add an index"
    if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_AUTH:
        return f"{error}; one SELECT that reads tables of this file is permitted"
    return str(error)


def _shown(query: str) -> str:
    return " ".join(query.split())[:120]
