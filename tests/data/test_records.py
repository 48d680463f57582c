"""Record sets give back what was written, and refuse what they cannot store."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triplane.proto.errors import Conflict, InvalidInput, NotFound
from triplane.unified_ir.data import records
from triplane.unified_ir.data.columns import Field, Ragged, schema_of
from triplane.unified_ir.data.kinds import is_table
from triplane.unified_ir.data.records import (
    RecordSource,
    RecordTable,
    RecordWriter,
    is_records,
    write_records,
)
from triplane.unified_ir.data.records.format import DTYPES

SIZES = st.integers(0, 3)
NUMBERS = st.builds(
    Field,
    st.sampled_from(sorted(DTYPES)),
    st.lists(SIZES, max_size=3).map(tuple),
)
RAGGED = st.builds(
    lambda dtype, sizes: Field(dtype, (None, *sizes)),
    st.sampled_from(sorted(DTYPES)),
    st.lists(st.integers(1, 3), max_size=2),
)
FIELDS = NUMBERS | RAGGED | st.just(Field("text")) | st.just(Field("bytes"))
SCHEMAS = st.dictionaries(st.text(min_size=1, max_size=9), FIELDS, min_size=1, max_size=4)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)  # no half of a pair


def objects(values):
    column = np.empty(len(values), object)
    column[:] = values
    return column


def taken(opened, rows) -> Any:
    return opened.take(rows)


def numbers(rng, dtype, shape):
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    return np.frombuffer(rng.bytes(size), dtype).reshape(shape)  # NaN and infinities included


@st.composite
def column(draw, field, n):
    if field.dtype == "text":
        return objects(draw(st.lists(TEXTS, min_size=n, max_size=n)))
    if field.dtype == "bytes":
        return objects(draw(st.lists(st.binary(max_size=9), min_size=n, max_size=n)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    if not field.is_ragged:
        return numbers(rng, field.dtype, (n, *field.shape))
    lengths = draw(st.lists(SIZES, min_size=n, max_size=n))
    offsets = np.cumsum([0, *lengths])
    return Ragged(numbers(rng, field.dtype, (offsets[-1], *field.shape[1:])), offsets)


@st.composite
def blocks(draw):
    schema = draw(SCHEMAS)
    counts = draw(st.lists(st.integers(0, 6), max_size=4))
    return schema, [
        {name: draw(column(field, n)) for name, field in schema.items()} for n in counts
    ]


def values(column):
    """The samples of a column as bytes and sizes, so that NaN equals itself."""
    if isinstance(column, np.ndarray) and column.dtype == object:
        return list(column)
    samples = [np.asarray(column[k]) for k in range(len(column))]
    return [(x.dtype, x.shape, x.tobytes()) for x in samples]


def oracle(schema, written):
    """The samples of all blocks, without the code under test."""
    return {name: [v for block in written for v in values(block[name])] for name in schema}


@given(blocks(), st.randoms(use_true_random=False), st.integers(1, 3))
def test_any_columns_come_back_in_any_order(tmp_path_factory, case, random, commits):
    schema, written = case
    path = tmp_path_factory.mktemp("set") / "a.tpr"
    with RecordWriter.create(path, schema, block_bytes=1 << 10, shard_bytes=1 << 10) as writer:
        for k, block in enumerate(written):
            writer.append(block)
            if k % commits == 0:
                writer.commit()
    expected = oracle(schema, written)
    opened = RecordTable(path)
    opened.verify()
    n = len(next(iter(expected.values())))
    assert len(opened) == n
    assert dict(opened.schema) == schema
    rows = [random.randrange(n) for _ in range(2 * n)]
    batch = taken(opened, np.array(rows, np.int64))
    assert schema_of(batch) == schema or not rows
    for name, samples in expected.items():
        assert values(batch[name]) == [samples[k] for k in rows]


@pytest.fixture
def images():
    rng = np.random.default_rng(0)
    return {
        "x": rng.integers(0, 256, (1000, 28, 28), dtype=np.uint8),
        "y": rng.integers(0, 10, 1000),
    }


def blocks_of(columns, n, size):
    for start in range(0, n, size):
        yield {name: c[start : start + size] for name, c in columns.items()}


def test_several_shards_and_blocks_are_gathered_at_once(tmp_path, images):
    path = tmp_path / "a.tpr"
    assert write_records(path, [images], block_bytes=10_000, shard_bytes=100_000) == 1000
    opened = RecordTable(path)
    facts = opened.shards
    assert len(facts) == 9
    assert sum(s.rows for s in facts) == 1000
    assert sum(s.bytes for s in facts) == images["x"].nbytes + images["y"].nbytes
    assert [s.bytes for s in facts] == [(path / s.name).stat().st_size for s in facts]
    rows = np.random.default_rng(1).permutation(1000)
    batch = taken(opened, rows)
    assert np.array_equal(batch["x"], images["x"][rows])
    assert np.array_equal(batch["y"], images["y"][rows])


def test_overhead_of_the_files_is_below_three_percent(tmp_path):
    x = np.zeros((20_000, 784), np.uint8)
    path = tmp_path / "a.tpr"
    write_records(path, [{"x": x}])
    assert sum(f.stat().st_size for f in path.iterdir()) < 1.001 * x.nbytes


def test_blocks_do_not_depend_on_how_samples_were_appended(tmp_path, images):
    for name, size in (("a", 1), ("b", 7), ("c", 1000)):
        write_records(tmp_path / name, blocks_of(images, 1000, size), block_bytes=10_000)
    files = [
        {f.name: f.read_bytes() for f in (tmp_path / name).iterdir()} for name in ("a", "b", "c")
    ]
    assert files[0] == files[1] == files[2]


def test_a_buffer_may_be_used_again_after_append(tmp_path):
    buffer = np.zeros((3, 2), np.float32)
    with RecordWriter.create(tmp_path / "a.tpr", {"x": Field("float32", (2,))}) as writer:
        for k in range(5):
            buffer[:] = k
            writer.append({"x": buffer})
    x = taken(RecordTable(tmp_path / "a.tpr"), np.arange(15))["x"]
    assert x[:, 0].tolist() == [k for k in range(5) for _ in range(3)]


def test_result_is_memory_of_its_own(tmp_path, images):
    write_records(tmp_path / "a.tpr", [images])
    opened = RecordTable(tmp_path / "a.tpr")
    taken(opened, np.arange(3))["x"][:] = 7
    assert np.array_equal(taken(opened, np.arange(3))["x"], images["x"][:3])


def test_rows_of_equal_length_may_come_as_an_array_where_the_schema_is_ragged(tmp_path):
    path = tmp_path / "a.tpr"
    with RecordWriter.create(path, {"x": Field("int16", (None, 2))}) as writer:
        writer.append({"x": np.arange(12, dtype=np.int16).reshape(2, 3, 2)})
        writer.append(
            {"x": Ragged(np.arange(4, dtype=np.int16).reshape(2, 2), np.array([0, 2, 2]))}
        )
    x = taken(RecordTable(path), np.arange(4))["x"]
    assert x.lengths.tolist() == [3, 3, 2, 0]
    assert x.values[:, 0].tolist() == [0, 2, 4, 6, 8, 10, 0, 2]


def test_a_ragged_view_of_longer_values_is_stored_without_the_rest(tmp_path):
    part = Ragged(np.arange(10), np.array([2, 5, 9]))
    write_records(tmp_path / "a.tpr", [{"x": part}])
    x = taken(RecordTable(tmp_path / "a.tpr"), np.array([1, 0]))["x"]
    assert x.values.tolist() == [5, 6, 7, 8, 2, 3, 4]


def test_metadata_and_the_name_are_kept_apart_from_the_records(tmp_path):
    write_records(
        tmp_path / "a.tpr", [{"x": np.arange(3)}], metadata={"classes": json.dumps(["ä", "b"])}
    )
    (tmp_path / "a.tpr").rename(tmp_path / "b")
    opened = RecordTable(tmp_path / "b")
    assert json.loads(opened.metadata["classes"]) == ["ä", "b"]
    assert taken(opened, np.arange(3))["x"].tolist() == [0, 1, 2]
    assert is_records(tmp_path / "b")
    assert not is_records(tmp_path)


def test_a_source_opens_its_set(tmp_path):
    write_records(tmp_path / "a.tpr", [{"x": np.arange(3)}])
    table = RecordSource(str(tmp_path / "a.tpr")).open()
    assert is_table(table)
    assert taken(table, np.array([2]))["x"].tolist() == [2]
    assert taken(table, np.array([], np.int64))["x"].shape == (0,)


def test_a_set_may_have_no_rows(tmp_path):
    schema = {"x": Field("float32", (2,)), "t": Field("text"), "r": Field("int8", (None,))}
    assert write_records(tmp_path / "a.tpr", [], schema) == 0
    opened = RecordTable(tmp_path / "a.tpr")
    opened.verify()
    assert len(opened) == 0
    assert opened.shards == ()
    assert schema_of(taken(opened, np.array([], np.int64))) == schema


def test_take_from_several_threads_gives_each_its_rows(tmp_path, images):
    write_records(tmp_path / "a.tpr", [images], block_bytes=1 << 10, shard_bytes=100_000)
    opened = RecordTable(tmp_path / "a.tpr")
    orders = [np.random.default_rng(k).permutation(1000) for k in range(16)]
    with ThreadPoolExecutor(4) as pool:
        for rows, batch in zip(orders, pool.map(opened.take, orders), strict=True):
            assert np.array_equal(np.asarray(batch["x"]), images["x"][rows])


def test_verify_tells_its_progress(tmp_path, images):
    write_records(tmp_path / "a.tpr", [images], block_bytes=100_000)
    calls = []
    RecordTable(tmp_path / "a.tpr").verify(lambda done, total: calls.append((done, total)))
    total = images["x"].nbytes + images["y"].nbytes
    assert calls[-1] == (total, total)
    assert sorted(calls) == calls
    assert len(calls) == 8


@pytest.mark.parametrize("rows", [[3], [-1], [0, 2**40], [-(2**63)]])
def test_rows_out_of_range_are_refused(tmp_path, rows):
    write_records(tmp_path / "a.tpr", [{"x": np.arange(3)}])
    with pytest.raises(InvalidInput, match=r"rows 0\.\.2"):
        taken(RecordTable(tmp_path / "a.tpr"), np.array(rows))


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"x": np.zeros((2, 3), np.float64), "t": objects(["a", "b"])}, "column 'x' holds float32"),
        (
            {"x": np.zeros((2, 4), np.float32), "t": objects(["a", "b"])},
            r"float32\[3\], got float32 in the shape \(2, 4\)",
        ),
        ({"x": np.zeros((2, 3), np.float32)}, r"have the columns \['t', 'x'\]"),
        ({"x": np.zeros((2, 3), np.float32), "t": objects(["a"])}, "lengths differ"),
        ({"x": np.zeros((2, 3), np.float32), "t": objects(["a", b"b"])}, "bytes in row 1"),
        ({"x": np.zeros((2, 3), np.float32), "t": objects(["a", "\ud800"])}, "without UTF-8"),
        ({"x": np.zeros((2, 3), np.float32), "t": np.array(["a", "b"])}, "'t' holds text"),
    ],
)
def test_a_block_that_differs_from_the_schema_is_refused_and_the_writer_goes_on(
    tmp_path, block, message
):
    good = {"x": np.ones((1, 3), np.float32), "t": objects(["ok"])}
    with RecordWriter.create(tmp_path / "a.tpr", schema_of(good)) as writer:
        with pytest.raises(InvalidInput, match=message):
            writer.append(block)
        writer.append(good)
    assert taken(RecordTable(tmp_path / "a.tpr"), np.array([0]))["t"].tolist() == ["ok"]


@pytest.mark.parametrize("offsets", [[0, 3, 2], [-1, 2, 3], [0, 2, 9]])
def test_offsets_that_leave_the_values_are_refused(tmp_path, offsets):
    with (
        RecordWriter.create(tmp_path / "a.tpr", {"x": Field("int64", (None,))}) as writer,
        pytest.raises(InvalidInput, match="do not ascend"),
    ):
        writer.append({"x": Ragged(np.arange(3), np.array(offsets))})


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({}, "1 to 1000 columns"),
        ({f"c{k}": Field("int8") for k in range(1001)}, "1 to 1000 columns"),
        ({"": Field("int8")}, "1 to 256 characters"),
        ({"n" * 257: Field("int8")}, "1 to 256 characters"),
        ({"x": Field(">f4")}, "astype"),
        ({"x": Field("longdouble")}, "astype"),
        ({"x": Field("int8", (0, 2**40))}, "at most"),
        ({"x": Field("int64", (2**28,))}, "at most"),
        ({"x": Field("int8", (2**29,)), "y": Field("int8", (2**30,))}, "at most"),
        ({"x": Field("int8", (None, 0))}, "no bytes"),
    ],
)
def test_schemas_beyond_the_limits_are_refused_and_leave_nothing(tmp_path, schema, message):
    with pytest.raises(InvalidInput, match=message):
        RecordWriter.create(tmp_path / "a.tpr", schema)
    assert list(tmp_path.iterdir()) == []


def test_other_limits_are_refused(tmp_path, monkeypatch):
    schema = {"x": Field("int64")}
    with pytest.raises(InvalidInput, match="shorten the metadata"):
        RecordWriter.create(tmp_path / "a", schema, metadata={"k": "v" * (1 << 20)})
    with pytest.raises(InvalidInput, match="texts to texts"):
        RecordWriter.create(tmp_path / "a", schema, metadata={"k": 1})  # type: ignore[dict-item]
    with pytest.raises(InvalidInput, match="block_bytes is in"):
        RecordWriter.create(tmp_path / "a", schema, block_bytes=0)
    with pytest.raises(InvalidInput, match="shard_bytes is in"):
        RecordWriter.open(tmp_path / "a", shard_bytes=1 << 60)
    with pytest.raises(InvalidInput, match="state the schema"):
        write_records(tmp_path / "a", [])
    monkeypatch.setattr("triplane.unified_ir.data.records.encoding.MAX_RECORD_BYTES", 100)
    with pytest.raises(InvalidInput, match="row 1 of the block has 104 bytes"):
        write_records(tmp_path / "a", [{"x": objects([b"", b"x" * 100])}])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("limit", "message"), [("MAX_SHARDS", "raise shard_bytes"), ("MAX_BLOCKS", "raise block_bytes")]
)
def test_a_set_beyond_the_limits_of_its_index_is_refused(tmp_path, monkeypatch, limit, message):
    monkeypatch.setattr(f"triplane.unified_ir.data.records.appending.{limit}", 3)
    with pytest.raises(InvalidInput, match=message):
        write_records(
            tmp_path / "a", [{"x": np.arange(1000)}], block_bytes=1 << 10, shard_bytes=1 << 10
        )
    assert list(tmp_path.iterdir()) == []


def test_rows_without_bytes_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr("triplane.unified_ir.data.records.encoding.MAX_BLOCK_ROWS", 10)
    monkeypatch.setattr("triplane.unified_ir.data.records.writer.MAX_BLOCK_ROWS", 10)
    write_records(tmp_path / "a", ({"x": np.zeros((4, 0))} for _ in range(6)))
    opened = RecordTable(tmp_path / "a")
    opened.verify()
    assert len(opened) == 24
    assert opened.shards[0].blocks == 3
    assert taken(opened, np.array([23, 0]))["x"].shape == (2, 0)


def test_a_path_that_exists_is_kept(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(Conflict, match="exists"):
        write_records(tmp_path / "a", [{"x": np.arange(3)}])
    writer = RecordWriter.create(tmp_path / "b", {"x": Field("int64")})
    writer.append({"x": np.arange(3)})
    (tmp_path / "b").write_text("of somebody else")
    with pytest.raises(Conflict, match="exists"):
        writer.commit()
    writer.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(NotFound, match="no file 'head'"):
        RecordTable(tmp_path / "a")
    with pytest.raises(NotFound, match="no file 'head'"):
        RecordWriter.open(tmp_path)
    assert not (tmp_path / "lock").exists()


def test_a_path_that_no_system_has_is_refused(tmp_path):
    path = tmp_path / "a\0b"
    for call in (RecordTable, RecordWriter.open, lambda p: write_records(p, [{"x": np.arange(3)}])):
        with pytest.raises(InvalidInput, match="not a path"):
            call(path)


@pytest.mark.parametrize("name", ["head", "index", "shard-00000", "lock"])
def test_links_and_pipes_are_refused(tmp_path, name):
    path = tmp_path / "a"
    write_records(path, [{"x": np.arange(3)}])
    (path / name).rename(tmp_path / "elsewhere")
    (path / name).symlink_to(tmp_path / "elsewhere")
    if name != "lock":
        with pytest.raises(InvalidInput, match="is a link"):
            RecordTable(path)
    with pytest.raises(InvalidInput, match="is a link"):
        RecordWriter.open(path)
    if name != "lock":
        (path / name).unlink()
        os.mkfifo(path / name)
        with pytest.raises(InvalidInput, match="not a regular file"):
            RecordTable(path)


def test_the_package_names_what_it_exports():
    assert all(hasattr(records, name) for name in records.__all__)


@settings(max_examples=20)
@given(st.binary(max_size=40))
def test_a_forged_boolean_is_one_of_the_two(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("set") / "a"
    n = len(content)
    write_records(path, [{"x": np.zeros(n, bool)}], {"x": Field("bool")})
    if n:
        (path / "shard-00000").write_bytes(content)
    x = taken(RecordTable(path, verify=False), np.arange(n))["x"]
    assert x.tolist() == [byte != 0 for byte in content]
    assert x.view(np.uint8).max(initial=0) <= 1
