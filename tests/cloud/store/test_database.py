"""Both databases: what a write promised is there, a read sees one state, one process owns it."""

import asyncio
import threading
import time

import pytest
from sqlalchemy import Column, Integer, Table, Text, func, insert, select, update

from triplane.cloud.store import BIG, METADATA, SCHEMA_VERSION, Database
from triplane.cloud.store.schema import SCHEMA
from triplane.proto.errors import Conflict, InvalidInput, Unavailable

PAIRS = Table(
    "test_pairs",
    METADATA,
    Column("id", BIG, primary_key=True),
    Column("a", Integer, nullable=False),
    Column("b", Integer, nullable=False),
    Column("text", Text, unique=True),
)
DEADLINE_S = 30


def add(a, b=0, text=None):
    def work(connection):
        return connection.execute(insert(PAIRS).values(a=a, b=b, text=text)).inserted_primary_key[0]

    return work


def count(connection):
    return connection.scalar(select(func.count()).select_from(PAIRS))


def values(connection):
    return list(connection.scalars(select(PAIRS.c.a).order_by(PAIRS.c.id)))


def test_what_was_written_is_there_when_opened_again(database_url):
    first = Database.open(database_url)
    assert first.write_now(add(7)) == 1
    first.close()
    second = Database.open(database_url)
    assert second.read_now(values) == [7]
    second.close()


def test_writes_happen_in_the_order_they_were_asked_for(database):
    async def main():
        await asyncio.gather(*[database.write(add(i)) for i in range(300)])
        return await database.read(values)

    assert asyncio.run(main()) == list(range(300))


def test_a_work_that_raises_leaves_nothing_and_its_neighbours_stand(database):
    def half(connection):
        add(-1)(connection)
        raise Conflict("no")

    async def main():
        works = [half if i % 3 == 0 else add(i) for i in range(100)]
        return await asyncio.gather(
            *[database.write(work) for work in works], return_exceptions=True
        )

    answers = asyncio.run(main())
    assert [isinstance(a, Conflict) for a in answers] == [i % 3 == 0 for i in range(100)]
    assert database.read_now(values) == [i for i in range(100) if i % 3]


def test_a_refusal_of_the_database_costs_only_the_work_that_met_it(database):
    async def main():
        works = [add(i, text=str(i % 40)) for i in range(60)]
        return await asyncio.gather(
            *[database.write(work) for work in works], return_exceptions=True
        )

    answers = asyncio.run(main())
    assert [isinstance(a, Exception) for a in answers] == [False] * 40 + [True] * 20
    assert database.read_now(values) == list(range(40))


def test_a_read_sees_one_state_while_writes_go_on(database):
    database.write_now(add(0, 0))
    stop = threading.Event()

    def keep_writing():
        i = 0
        while not stop.is_set():
            i += 1
            database.write_now(lambda c, i=i: c.execute(update(PAIRS).values(a=i, b=-i)).rowcount)

    def twice(connection):
        a = connection.scalar(select(PAIRS.c.a))
        time.sleep(0.002)  # a write ends in between
        return a, connection.scalar(select(PAIRS.c.b))

    async def main():
        return [pair for _ in range(10) for pair in
                await asyncio.gather(*[database.read(twice) for _ in range(8)])]  # fmt: skip

    writer = threading.Thread(target=keep_writing)
    writer.start()
    try:
        pairs = asyncio.run(main())
    finally:
        stop.set()
        writer.join()
    assert all(a == -b for a, b in pairs)
    assert len(set(pairs)) > 1


def test_reads_do_not_wait_for_a_long_write(database):
    entered, leave = threading.Event(), threading.Event()

    def long(connection):
        add(1)(connection)
        entered.set()
        assert leave.wait(DEADLINE_S)

    writer = threading.Thread(target=database.write_now, args=(long,))
    writer.start()
    assert entered.wait(DEADLINE_S)
    assert database.read_now(count) == 0
    leave.set()
    writer.join()
    assert database.read_now(count) == 1


def test_a_read_cannot_write(database):
    with pytest.raises(Exception, match=r"read-?only"):
        database.read_now(add(1))
    assert database.read_now(count) == 0


@pytest.mark.slow
def test_a_second_owner_is_refused(database, database_url):
    with pytest.raises(Conflict, match="another process runs on"):
        Database.open(database_url)
    database.write_now(add(1))
    assert database.read_now(count) == 1


def test_a_state_whose_owner_is_just_ending_is_waited_for(database_url):
    """As after a kill between fork and exec, when a child still holds the owner's lock."""
    first = Database.open(database_url)
    ending = threading.Timer(0.5, first.close)
    ending.start()
    Database.open(database_url).close()
    ending.join()


def test_a_newer_schema_is_refused_and_left_alone(database_url):
    first = Database.open(database_url)
    newer = update(SCHEMA).values(version=SCHEMA_VERSION + 1)
    first.write_now(lambda connection: connection.execute(newer).rowcount)
    first.close()
    with pytest.raises(Conflict, match=f"schema {SCHEMA_VERSION + 1}"):
        Database.open(database_url)
    with pytest.raises(Conflict, match="newer release"):
        Database.open(database_url)


def test_a_closed_database_says_so(database_url):
    database = Database.open(database_url)
    database.close()
    database.close()
    for call in (database.write_now, database.read_now):
        with pytest.raises(Unavailable, match="closed"):
            call(count)


def test_writes_that_were_asked_for_are_done_before_closing(database_url):
    database = Database.open(database_url)
    asked = [database._submit(add(i)) for i in range(200)]
    database.close()
    assert [future.result() for future in asked] == list(range(1, 201))


def test_a_cancelled_write_is_done_whole_or_not_at_all(database):
    async def main():
        tasks = [asyncio.create_task(database.write(add(i))) for i in range(100)]
        await tasks[0]
        for task in tasks[1::2]:
            task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    answers = asyncio.run(main())
    there = database.read_now(values)
    assert {i for i, answer in enumerate(answers) if isinstance(answer, int)} <= set(there)
    assert there == sorted(there)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nonsense", "sqlite:///FILE or postgresql"),
        ("mysql://host/name", "got 'mysql'"),
        ("sqlite://", "survive a restart"),
        ("sqlite:///:memory:", "survive a restart"),
        ("sqlite:////nowhere/at/all/cloud.db", "not a folder"),
    ],
)
def test_only_databases_that_keep_state_are_opened(url, message):
    with pytest.raises(InvalidInput, match=message):
        Database.open(url)


def test_a_server_that_is_not_there_is_unavailable(tmp_path):
    with pytest.raises(Unavailable, match="the database refused"):
        Database.open(f"postgresql://nobody@/none?host={tmp_path}")


def test_only_its_owner_reads_the_file(tmp_path):
    database = Database.open(f"sqlite:///{tmp_path / 'cloud.db'}")
    database.write_now(add(1))
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.glob("cloud.db*")}
    database.close()
    assert {"cloud.db", "cloud.db-wal"} <= set(modes)
    assert all(mode == 0o600 for name, mode in modes.items() if not name.endswith(".lock"))
