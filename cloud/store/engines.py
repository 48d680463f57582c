"""The two databases: how connections are made, and how one process at a time owns the state.

Each dialect has two engines. The writing one has a single connection, whose holder owns the state:
on SQLite through a lock on `FILE.lock`, on PostgreSQL through a session advisory lock taken by that
very connection, so that a lost connection never leaves an owner behind.
"""

import contextlib
import fcntl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final

from sqlalchemy import URL, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.pool import QueuePool

from triplane.proto.errors import Conflict, InvalidInput, Unavailable

READERS: Final = 4
"""Number of connections, and of threads, that read at the same time."""
BUSY_TIMEOUT_MS: Final = 10_000
FILE_MODE: Final = 0o600
"""Only for the owner: the state contains the keys of unused enrolment tokens."""
CONNECT_TIMEOUT_S: Final = 10
OWNER_TIMEOUT_MS: Final = 3000
"""How long a new owner waits for the previous one, which may have been killed.

A killed process's connection to PostgreSQL stays open until the server notices, and its lock on
SQLite's file stays until a child that it was just starting has begun its own program.
"""
LOCK_STEP_S: Final = 0.02
COMMON_PRAGMAS: Final = (f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}", "PRAGMA trusted_schema=OFF")
WRITER_PRAGMAS: Final = (
    # WAL: readers see one state while the writer commits. FULL: a commit is synced before it
    # returns.
    "PRAGMA journal_mode=WAL",
    "PRAGMA synchronous=FULL",
    "PRAGMA foreign_keys=ON",
)
ADVISORY_LOCK: Final = 0x7472_6970_6C61_6E65
"""Number of the owner's lock within one PostgreSQL database ("triplane" in ASCII)."""
OWNED: Final = "another process runs on {where}; stop it first: only one may own a cloud's state"


@dataclass(frozen=True, slots=True)
class Engines:
    """writer: one connection. reader: `READERS` read-only connections. lock: only of SQLite."""

    writer: Engine
    reader: Engine
    lock: BinaryIO | None = None

    def dispose(self) -> None:
        """Close every connection, then release the state."""
        self.reader.dispose()
        self.writer.dispose()
        if self.lock is not None:
            self.lock.close()


def engines(url: str) -> Engines:
    """Connect to `url`. InvalidInput: no such database. Conflict: another process owns it."""
    try:
        parsed = make_url(url)
        connect = _DIALECTS[parsed.get_backend_name()]
    except (ArgumentError, KeyError):
        shown = url.partition(":")[0]  # the rest may hold a password
        raise InvalidInput(
            f"a database is named by sqlite:///FILE or postgresql://HOST/NAME, got {shown!r}"
        ) from None
    return connect(parsed)


def _sqlite(url: URL) -> Engines:
    if not url.database or url.database == ":memory:":
        raise InvalidInput("the state must survive a restart; name a file: sqlite:///FILE")
    path = Path(url.database).absolute()
    if not path.parent.is_dir():
        raise InvalidInput(f"{path.parent} is not a folder; make it first (triplane cloud init)")
    # A lock file of our own: SQLite's locks are dropped when any descriptor of its file is closed.
    lock = _lock_file(path.with_name(f"{path.name}.lock"))
    path.touch(mode=FILE_MODE)  # SQLite gives its other files the same
    # IMMEDIATE takes the write lock at once; a read that turns into a write could fail with
    # SQLITE_BUSY.
    writer = _engine(url, size=1, pragmas=WRITER_PRAGMAS, begin="BEGIN IMMEDIATE")
    reader = _engine(url, size=READERS, pragmas=["PRAGMA query_only=ON"], begin="BEGIN")
    return Engines(writer, reader, lock)


def _lock_file(path: Path) -> BinaryIO:
    try:
        file = path.open("ab")
    except OSError as error:
        raise Unavailable(f"could not open {path}: {error}") from error
    until_s = time.monotonic() + OWNER_TIMEOUT_MS / 1000
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if time.monotonic() >= until_s:
                file.close()
                raise Conflict(OWNED.format(where=path.parent)) from error
            time.sleep(LOCK_STEP_S)
        else:
            return file


def _engine(url: URL, *, size: int, pragmas: Sequence[str], begin: str) -> Engine:
    engine = create_engine(
        url,
        poolclass=QueuePool,
        pool_size=size,
        max_overflow=0,
        # isolation_level None: the driver begins no transactions by itself, the listener below
        # does.
        connect_args={"check_same_thread": False, "isolation_level": None},
    )
    event.listen(engine, "connect", lambda raw, _: _run(raw, *COMMON_PRAGMAS, *pragmas))
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql(begin))
    return engine


def _run(raw: Any, *statements: str) -> None:
    with contextlib.closing(raw.cursor()) as cursor:
        for statement in statements:
            cursor.execute(statement)


def _postgresql(url: URL) -> Engines:
    url = url.set(drivername="postgresql+psycopg")
    connect = partial(
        create_engine,
        url,
        max_overflow=0,
        pool_pre_ping=True,
        connect_args={"connect_timeout": CONNECT_TIMEOUT_S},
    )
    writer = connect(pool_size=1)
    # REPEATABLE READ: all statements of a read see the state of its first one.
    reader = connect(pool_size=READERS, isolation_level="REPEATABLE READ")
    event.listen(writer, "connect", lambda raw, _: _postgresql_owns(raw, url))
    event.listen(reader, "connect", lambda raw, _: _postgresql_reads(raw))
    return Engines(writer, reader)


def _postgresql_owns(raw: Any, url: URL) -> None:
    import psycopg

    _run(raw, "SET synchronous_commit = on", f"SET lock_timeout = {OWNER_TIMEOUT_MS}")
    try:
        _run(raw, f"SELECT pg_advisory_lock({ADVISORY_LOCK})")
    except psycopg.errors.LockNotAvailable as error:
        raw.close()
        raise Conflict(OWNED.format(where=f"database {url.database!r}")) from error
    # The timeout was only for the lock above, not for the statements of works.
    _run(raw, "SET lock_timeout = 0")
    raw.commit()


def _postgresql_reads(raw: Any) -> None:
    _run(raw, "SET default_transaction_read_only = on")
    raw.commit()


_DIALECTS: Final = {"sqlite": _sqlite, "postgresql": _postgresql}
