"""Queries to SQLite files as sources; Python's own cursor is the oracle."""

import math
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.tables import everything, opened

from triplane.proto.errors import Corrupt, InvalidInput, NotFound, TriplaneError
from triplane.unified_ir.data.sources import sqlite
from triplane.unified_ir.data.sources.sqlite import SqliteFeed, SqliteSource
from triplane.unified_ir.data.table import ArrayTable

ROWS = [(1, 1.5, "a", b"\0\1"), (-(2**63), 2.0, "ü", b""), (2**63 - 1, -1e300, "", b"x")]
ALL = "SELECT * FROM t ORDER BY rowid"


def store(path, rows, columns="a, b, c, d"):
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"CREATE TABLE t ({columns})")
        marks = ", ".join("?" * len(rows[0]))
        connection.executemany(f"INSERT INTO t VALUES ({marks})", rows)
    return str(path)


@pytest.fixture
def database(tmp_path):
    return store(tmp_path / "a.db", ROWS)


def test_types_follow_from_the_values(database):
    table = opened(SqliteSource(database, ALL))
    assert {k: str(f) for k, f in table.schema.items()} == {
        "a": "int64", "b": "float64", "c": "text", "d": "bytes"
    }  # fmt: skip
    columns = table.take(np.array([2, 0, 1]))
    for k, name in enumerate("abcd"):
        assert columns[name].tolist() == [ROWS[i][k] for i in (2, 0, 1)]


def test_the_query_may_compute_and_recurse(database):
    query = (
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 5) "
        "SELECT i, i * 0.5 AS half, upper('x' || i) AS name FROM n ORDER BY i DESC"
    )
    columns = everything(SqliteSource(database, query))
    assert columns["i"].tolist() == [5, 4, 3, 2, 1]
    assert columns["half"].tolist() == [2.5, 2.0, 1.5, 1.0, 0.5]
    assert columns["name"].tolist() == ["X5", "X4", "X3", "X2", "X1"]


def test_missing_values_are_refused_by_place_or_replaced(tmp_path):
    path = store(tmp_path / "a.db", [(1, "x"), (None, None)], "a, b")
    with pytest.raises(InvalidInput, match=r"column 'a' is NULL in row 1; .*state missing="):
        SqliteSource(path, "SELECT a FROM t").open()
    assert everything(SqliteSource(path, "SELECT a FROM t", missing=-3))["a"].tolist() == [1, -3]
    values = everything(SqliteSource(path, "SELECT a FROM t", missing=0.5))["a"]
    assert (values.dtype, values.tolist()) == (np.float64, [1.0, 0.5])
    with pytest.raises(InvalidInput, match="column 'b' is NULL in row 1; filter it"):
        SqliteSource(path, "SELECT b FROM t", missing=0).open()
    query = "SELECT coalesce(b, '-') AS b FROM t"
    assert everything(SqliteSource(path, query))["b"].tolist() == ["x", "-"]
    with pytest.raises(InvalidInput, match="finite"):
        SqliteSource(path, query, missing=math.nan)


def test_a_column_holds_one_type(tmp_path):
    path = store(tmp_path / "a.db", [(1, 1), ("x", 0.5), (2, 2)], "a, b")
    with pytest.raises(InvalidInput, match="int in row 0, str in row 1; use CAST"):
        SqliteSource(path, "SELECT a FROM t").open()
    assert everything(SqliteSource(path, "SELECT b FROM t"))["b"].tolist() == [1.0, 0.5, 2.0]
    path = store(tmp_path / "b.db", [(0.5,), (2**53 + 1,)], "a")
    with pytest.raises(InvalidInput, match="9007199254740993, which float64 cannot"):
        SqliteSource(path, "SELECT a FROM t").open()


FORBIDDEN = [
    "INSERT INTO t VALUES (1, 2, 3, 4)",
    "DELETE FROM t",
    "DROP TABLE t",
    "CREATE TABLE u (a)",
    "CREATE TEMP TABLE u AS SELECT 1",
    "PRAGMA query_only=OFF",
    "PRAGMA table_info(t)",
    "SELECT * FROM pragma_database_list",
    "ATTACH '/tmp/stolen.db' AS s",
    "VACUUM INTO '/tmp/stolen.db'",
    "SELECT load_extension('evil')",
    "SELECT random()",
    "SELECT 1; DROP TABLE t",
    "BEGIN",
    "COMMIT",
    "SELECT * FROM t WHERE a = ?",
    "SELECT * FROM nothing",
    "SELECT zeroblob(1000000000) AS x",
    "SELECT a, a FROM t",
    "SELEKT",
    "",
    "SELECT 1 FROM t WHERE 0",
    "SELECT '" + "x" * 70_000 + "'",
    "SELECT 1\0",
    "SELECT " + "(" * 5000 + "1" + ")" * 5000,
]


@pytest.mark.parametrize("query", FORBIDDEN, ids=range(len(FORBIDDEN)))
def test_a_query_can_only_read(database, query):
    before = Path(database).read_bytes()
    with pytest.raises(InvalidInput, match=r"a\.db"):
        SqliteSource(database, query).open()
    assert Path(database).read_bytes() == before


def test_a_query_without_end_is_stopped(database, monkeypatch):
    monkeypatch.setattr(sqlite, "MAX_INSTRUCTIONS", 10_000_000)
    for query in (
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n",
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT 1 FROM n) SELECT i FROM n",
    ):
        with pytest.raises(InvalidInput, match="more than 10000000 instructions"):
            SqliteSource(database, query).open()


def test_rows_beyond_memory_are_a_feed(tmp_path, monkeypatch):
    rows = [(k, k / 8, f"n{k}", bytes([k % 256])) for k in range(10_000)]
    path = store(tmp_path / "a.db", rows)
    table = opened(SqliteSource(path, ALL))
    assert isinstance(table, ArrayTable)
    monkeypatch.setattr(sqlite, "MAX_MEMORY_BYTES", 10_000)
    feed = opened(SqliteSource(path, ALL))
    assert isinstance(feed, SqliteFeed)
    assert feed.schema == table.schema
    for start in (0, 1, 4096, 5000, 9_999, 10_000):
        blocks: list[Any] = list(feed.blocks(start))
        for k, name in enumerate("abcd"):
            values = [v for block in blocks for v in block[name].tolist()]
            assert values == [row[k] for row in rows[start:]]
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE t SET a = 'x' WHERE a = 7")
    with pytest.raises(InvalidInput, match="now row 7 holds str; the file has changed"):
        list(feed.blocks(0))


def test_an_abandoned_feed_leaves_the_file_free(tmp_path, monkeypatch):
    path = store(tmp_path / "a.db", [(k,) for k in range(9000)], "a")
    monkeypatch.setattr(sqlite, "MAX_MEMORY_BYTES", 1)
    blocks = opened(SqliteSource(path, "SELECT a FROM t")).blocks(0)
    next(blocks)
    blocks.close()
    with closing(sqlite3.connect(path, timeout=0)) as connection, connection:
        connection.execute("DROP TABLE t")


def test_other_files_are_refused(tmp_path):
    with pytest.raises(NotFound):
        SqliteSource(str(tmp_path / "none.db"), ALL).open()
    assert not (tmp_path / "none.db").exists()
    (tmp_path / "a.db").write_bytes(b"")
    with pytest.raises(Corrupt, match=r"a\.db is not an SQLite file"):
        SqliteSource(str(tmp_path / "a.db"), ALL).open()
    path = store(tmp_path / "with ? and #.db", [(1,)], "a")
    assert everything(SqliteSource(path, ALL))["a"].tolist() == [1]


def test_text_that_is_not_utf8_is_damage(tmp_path):
    path = store(tmp_path / "a.db", [(b"\xff\xfe",)], "a")
    with pytest.raises(Corrupt, match="UTF-8"):
        SqliteSource(path, "SELECT CAST(a AS TEXT) AS a FROM t").open()


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "a.db"
    store(path, ROWS * 40)
    return path.read_bytes()


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_damaged_files_give_rows_or_a_named_error(tmp_path_factory, content, data):
    damaged = bytearray(content)
    for at in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=9)):
        damaged[at] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.db"
    path.write_bytes(bytes(damaged[: data.draw(st.integers(100, len(content)))]))
    try:
        table = SqliteSource(str(path), ALL).open()
        assert isinstance(table, ArrayTable)
    except TriplaneError as error:
        assert "damaged.db" in str(error)


def test_a_schema_that_is_not_utf8_is_damage(tmp_path, content):
    path = tmp_path / "a.db"
    path.write_bytes(content.replace(b"CREATE TABLE t (a", b"CREATE \x80ABLE t (a"))
    with pytest.raises(Corrupt, match=r"a\.db"):
        SqliteSource(str(path), ALL).open()
