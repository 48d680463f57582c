"""Reads and writes as functions of a connection, on SQLite or PostgreSQL.

Invariants: a write returns after its commit is on the disk; writes run one after another, in the
order of the calls; a read sees one state of the whole database from its first statement to its
last, and cannot write. The process that opened a database owns it until `close`.
"""

import asyncio
import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

from sqlalchemy import Connection, inspect, select
from sqlalchemy.exc import DatabaseError, DataError, DBAPIError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from triplane.cloud.store.engines import READERS, Engines, engines
from triplane.cloud.store.schema import METADATA, SCHEMA, SCHEMA_VERSION
from triplane.cloud.store.writing import CLOSED, Writer
from triplane.proto.disk import NoRoom
from triplane.proto.errors import Conflict, Corrupt, InvalidInput, Unavailable

T = TypeVar("T")

DISK_FULL: Final = "53100"
"""SQLSTATE of PostgreSQL."""


class Database:
    """An open database; `open` makes one.

    `work` is a function of a connection inside a transaction. It must neither commit nor store the
    connection. It may run more than once before its call returns, so its only effects are on the
    database. Unavailable: the database cannot be reached or its disk is full; nothing of the work
    remains. Corrupt: the file is damaged.
    """

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._writer = Writer(engines.writer)
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="store-reader")

    @classmethod
    def open(cls, url: str) -> "Database":
        """Open and own the database; missing tables are created.

        Conflict: another process owns it, or a newer release wrote it.
        """
        opened = engines(url)
        database = cls(opened)
        try:
            database.write_now(_prepare)
        except BaseException:
            database.close()
            raise
        return database

    async def write(self, work: Callable[[Connection], T]) -> T:
        """Run `work` in a transaction and return once it is durable.

        If the call is cancelled before its turn, the work does not run; later, it does.
        """
        with _families():
            # Cancelling the caller cancels the future only while it is queued; a running work
            # commits.
            return await asyncio.wrap_future(self._submit(work))

    async def read(self, work: Callable[[Connection], T]) -> T:
        """Run `work` on one state of the database, concurrently with writes and other reads."""
        self._check_open()
        with _families():
            return await asyncio.wrap_future(self._readers.submit(self._read, work))

    def write_now(self, work: Callable[[Connection], T]) -> T:
        """Do the same as `write`, for threads that may block."""
        with _families():
            return self._submit(work).result()

    def read_now(self, work: Callable[[Connection], T]) -> T:
        """Do the same as `read`, for threads that may block."""
        self._check_open()
        with _families():
            return self._read(work)

    def close(self) -> None:
        """Finish the queued writes, then release the database; later calls raise Unavailable."""
        self._writer.close()
        self._readers.shutdown()
        self._engines.dispose()

    def _check_open(self) -> None:
        if self._writer.is_closed:
            raise Unavailable(CLOSED)

    def _submit(self, work: Callable[[Connection], T]) -> "Future[T]":
        assert not self._writer.is_current, "work must not wait for another write"
        return self._writer.submit(work)

    def _read(self, work: Callable[[Connection], T]) -> T:
        with self._engines.reader.begin() as connection:
            return work(connection)


def _prepare(connection: Connection) -> None:
    """Create missing tables; refuse a newer schema."""
    if inspect(connection).has_table(SCHEMA.name):
        version = connection.scalar(select(SCHEMA.c.version)) or 0
        if version > SCHEMA_VERSION:
            raise Conflict(
                f"the database has schema {version}, this release reads up to {SCHEMA_VERSION}; "
                "use the newer release, or a backup made by this one"
            )
    # Only missing tables are created. New columns therefore get a table of their own, as databases
    # of earlier releases are never altered.
    METADATA.create_all(connection)
    if connection.scalar(select(SCHEMA.c.version)) is None:
        connection.execute(SCHEMA.insert().values(id=1, version=SCHEMA_VERSION))


@contextlib.contextmanager
def _families() -> Iterator[None]:
    try:
        yield
    except DBAPIError as error:
        raise _family(error) from error
    except PoolTimeout as error:
        raise Unavailable(f"every connection to the database is in use: {error}") from error


def _family(error: DBAPIError) -> Exception:
    """Map an operational error to a family; integrity and SQL errors are bugs and stay."""
    cause = error.orig
    # Checked first: the outcome of the last commit is unknown, so the text must not claim that
    # nothing was changed.
    if error.connection_invalidated:
        return Unavailable(
            f"the connection to the database broke: {cause}; whether the last write was committed "
            "is not known, so repeat it with the same key"
        )
    if _is_full(cause):
        return NoRoom(f"the database has no room: {cause}; free some space. Nothing was changed")
    if isinstance(error, OperationalError):
        return Unavailable(f"the database refused the operation: {cause}; nothing was changed")
    if isinstance(error, DataError):
        return InvalidInput(f"the database cannot hold a value: {cause}")
    # Its subclasses were handled above; SQLite raises the class itself for a malformed file.
    if type(error) is DatabaseError:
        return Corrupt(f"the database is damaged: {cause}; restore a backup")
    return error


def _is_full(cause: BaseException | None) -> bool:
    """Return whether the driver reports that the disk or the database's quota is full."""
    if isinstance(cause, sqlite3.Error):
        # The low byte is the primary code; the rest of an extended code says where it happened.
        return getattr(cause, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL
    return getattr(cause, "sqlstate", None) == DISK_FULL
