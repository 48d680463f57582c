"""One suite over SQLite and PostgreSQL: the same work has the same effect on both.

What each part does with its tables is held by the part's own tests, which run on both too.
"""

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import (
    JSON,
    Boolean,
    Column,
    Double,
    ForeignKey,
    LargeBinary,
    String,
    Table,
    Text,
    delete,
    inspect,
    select,
)
from sqlalchemy.exc import IntegrityError
from tests.cloud.databases import SQLITE_FIRST

from triplane.cloud.identity import tables as identity_tables
from triplane.cloud.registry import tables as registry_tables
from triplane.cloud.store import BIG, METADATA, Database
from triplane.proto.errors import Conflict, InvalidInput, Unavailable

ROWS = Table(
    "test_rows",
    METADATA,
    Column("id", BIG, primary_key=True),
    Column("name", String(63), unique=True),
    Column("text", Text),
    Column("number", BIG),
    Column("flag", Boolean),
    Column("real", Double),
    Column("data", LargeBinary),
    Column("document", JSON),
    Column("parent", BIG, ForeignKey("test_rows.id")),
)
PARTS = (registry_tables, identity_tables)
SYMBOLS = st.characters(codec="utf-8", exclude_characters="\0")
TEXT = st.text(SYMBOLS, max_size=40)
ROW = st.fixed_dictionaries(
    {
        "text": TEXT,
        "number": st.integers(-(2**63), 2**63 - 1),
        "flag": st.booleans(),
        "real": st.floats(allow_nan=False, allow_infinity=False),
        "data": st.binary(max_size=64),
        "document": st.dictionaries(TEXT, st.integers(-(2**53), 2**53) | TEXT, max_size=4),
    }
)
WRITER = """
import asyncio, os, sys
from tests.conformance.test_stores import two_rows
from triplane.cloud.store import Database

async def main(database, life):
    async def write(number):
        await database.write(two_rows(number))
        os.write(1, f"{number}\\n".encode())

    for start in range(1000 * life, 1000 * life + 1000, 5):
        await asyncio.gather(*[write(number) for number in range(start, start + 5)])

asyncio.run(main(Database.open(sys.argv[1]), int(sys.argv[2])))
"""
ROOT = Path(__file__).parents[2]
DEADLINE_S = 60


def test_every_part_has_its_tables(database):
    there = set(database.read_now(lambda connection: inspect(connection).get_table_names()))
    assert set(METADATA.tables) <= there
    assert all(part.METADATA is METADATA for part in PARTS)


@pytest.mark.slow
def test_every_kind_of_value_comes_back_exactly(database):
    @given(ROW)
    @settings(max_examples=60)
    def holds(row):
        def there_and_back(connection):
            connection.execute(delete(ROWS))
            connection.execute(ROWS.insert().values(row))
            found = connection.execute(select(ROWS)).one()._mapping
            return {name: _plain(found[name]) for name in row}

        assert database.write_now(there_and_back) == row

    holds()


def _plain(value):
    return bytes(value) if isinstance(value, memoryview) else value


def test_a_row_cannot_refer_to_nothing(database):
    with pytest.raises(IntegrityError):
        database.write_now(lambda c: c.execute(ROWS.insert().values(parent=12345)).rowcount)


def test_a_name_is_given_once(database):
    def twice(connection):
        connection.execute(ROWS.insert().values(name="a"))
        connection.execute(ROWS.insert().values(name="a"))

    with pytest.raises(IntegrityError):
        database.write_now(twice)
    assert database.read_now(lambda c: c.execute(select(ROWS)).all()) == []


def test_numbers_count_on_from_one(database):
    def add(connection):
        return connection.execute(ROWS.insert().values(text="")).inserted_primary_key[0]

    assert [database.write_now(add) for _ in range(3)] == [1, 2, 3]


@SQLITE_FIRST
@pytest.mark.slow
def test_killed_writers_lose_nothing_they_acknowledged(database_url):
    """kill -9 in the middle of writes, eight times on one database; a fresh process reads."""
    rng = random.Random(0)
    acknowledged: set[int] = set()
    for life in range(8):
        acknowledged |= _killed(database_url, life, after=rng.randrange(1, 120))
    database = Database.open(database_url)
    pairs = database.read_now(lambda c: list(c.execute(select(ROWS.c.number, ROWS.c.text))))
    database.close()
    found = Counter(number for number, _ in pairs)
    assert acknowledged <= set(found)
    assert set(found.values()) == {2}, "a work of two rows was done by half"


def _killed(database_url, life, after):
    """Numbers that a process acknowledged before it was killed, `after` lines after its start."""
    command = [sys.executable, "-c", WRITER, database_url, str(life)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
    }
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, start_new_session=True, env=environment
    ) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(after)]
        os.killpg(process.pid, signal.SIGKILL)
        rest = process.stdout.read().splitlines(keepends=True)
    whole = [line for line in [*lines, *rest] if line.endswith(b"\n")]
    assert len(whole) >= after
    return {json.loads(line) for line in whole}


def test_a_full_disk_refuses_and_leaves_nothing_half_done(tmp_path):
    """SQLite at its page limit, which it treats as a full disk."""
    database = Database.open(f"sqlite:///{tmp_path / 'cloud.db'}")
    _limit(database, _pages(database) + 40)
    done: list[int] = []
    with pytest.raises(Unavailable, match="full"):
        _fill(database, done)
    assert done
    assert _numbers(database) == sorted(2 * done)
    _limit(database, 1 << 30)
    database.write_now(two_rows(-1))
    assert _numbers(database) == sorted([-1, -1, *done, *done])
    database.close()


def test_a_full_disk_refuses_works_that_share_a_commit_one_by_one(tmp_path):
    database = Database.open(f"sqlite:///{tmp_path / 'cloud.db'}")
    _limit(database, _pages(database) + 40)

    async def main():
        works = [database.write(two_rows(i)) for i in range(64)]
        return await asyncio.gather(*works, return_exceptions=True)

    answers = asyncio.run(main())
    done = [i for i, answer in enumerate(answers) if answer is None]
    assert 0 < len(done) < 64
    assert all(isinstance(a, Unavailable) for a in answers if a is not None)
    assert _numbers(database) == sorted(2 * done)
    database.close()


def _fill(database, done):
    for i in range(1000):
        database.write_now(two_rows(i))
        done.append(i)


def _pages(database):
    return database.write_now(lambda c: c.exec_driver_sql("PRAGMA page_count").scalar_one())


def _limit(database, pages):
    database.write_now(lambda c: c.exec_driver_sql(f"PRAGMA max_page_count={pages}").scalar_one())


def two_rows(number):
    def work(connection):
        for _ in range(2):
            connection.execute(ROWS.insert().values(number=number, data=bytes(3000)))

    return work


def _numbers(database):
    return sorted(database.read_now(lambda c: list(c.scalars(select(ROWS.c.number)))))


def test_a_damaged_file_is_corrupt_and_not_touched(tmp_path):
    path = tmp_path / "cloud.db"
    path.write_bytes(b"this is no database" * 300)
    before = path.read_bytes()
    with pytest.raises(Exception, match="not a database") as caught:
        Database.open(f"sqlite:///{path}")
    assert type(caught.value).__name__ == "Corrupt"
    assert path.read_bytes() == before


@pytest.mark.slow
def test_a_broken_connection_heals(postgres):
    name = f"heals_{os.getpid()}"
    postgres.execute(f"CREATE DATABASE {name}")
    database = Database.open(postgres.url(name))
    try:
        database.write_now(two_rows(1))
        _cut(postgres, name)
        database.write_now(two_rows(2))
        assert _numbers(database) == [1, 1, 2, 2]
    finally:
        database.close()
        postgres.execute(f"DROP DATABASE {name} WITH (FORCE)")


def test_a_connection_that_breaks_in_a_write_says_that_the_outcome_is_unknown(postgres):
    name = f"breaks_{os.getpid()}"
    postgres.execute(f"CREATE DATABASE {name}")
    database = Database.open(postgres.url(name))

    def work(connection):
        two_rows(1)(connection)
        _cut(postgres, name)
        two_rows(1)(connection)

    try:
        with pytest.raises(Unavailable, match="not known"):
            database.write_now(work)
        database.write_now(two_rows(2))
        assert _numbers(database) == [2, 2]
    finally:
        database.close()
        postgres.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.mark.slow
def test_an_owner_that_lost_its_connection_yields_to_the_next_and_comes_back(postgres):
    name = f"yields_{os.getpid()}"
    postgres.execute(f"CREATE DATABASE {name}")
    first = Database.open(postgres.url(name))
    try:
        _cut(postgres, name)
        second = Database.open(postgres.url(name))
        with pytest.raises(Conflict, match="another process runs on"):
            first.write_now(two_rows(1))
        second.write_now(two_rows(2))
        second.close()
        first.write_now(two_rows(3))
        assert _numbers(first) == [2, 2, 3, 3]
    finally:
        first.close()
        postgres.execute(f"DROP DATABASE {name} WITH (FORCE)")


def _cut(postgres, name):
    with contextlib.suppress(Exception):
        postgres.execute(
            f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'"
        )


def test_what_a_database_cannot_hold_is_refused_by_name(postgres):
    name = f"holds_{os.getpid()}"
    postgres.execute(f"CREATE DATABASE {name}")
    database = Database.open(postgres.url(name))
    try:
        with pytest.raises(InvalidInput, match="cannot hold"):
            database.write_now(lambda c: c.execute(ROWS.insert().values(text="a\0b")).rowcount)
    finally:
        database.close()
        postgres.execute(f"DROP DATABASE {name} WITH (FORCE)")
