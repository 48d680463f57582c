"""Parquet and Arrow IPC files as sources; pyarrow writes them and is the oracle."""

import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import feather, ipc, parquet
from tests.support.tables import everything, opened

from triplane.proto.errors import Corrupt, InvalidInput, MissingExtra, NotFound, TriplaneError
from triplane.unified_ir.data import load
from triplane.unified_ir.data.columns import Ragged
from triplane.unified_ir.data.sources import arrow
from triplane.unified_ir.data.sources.arrow import ArrowFeed, ArrowSource, ArrowTable
from triplane.unified_ir.data.table import ArrayTable


def to_parquet(table, path):
    parquet.write_table(table, path, row_group_size=3)


def to_file(table, path):
    with ipc.new_file(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)


def to_stream(table, path):
    with ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)


def to_lz4(table, path):
    feather.write_feather(table, path, compression="lz4", chunksize=3)


def to_zstd(table, path):
    feather.write_feather(table, path, compression="zstd", chunksize=3)


WRITERS = {f.__name__: f for f in (to_parquet, to_file, to_stream, to_lz4, to_zstd)}


@pytest.fixture(params=WRITERS)
def store(request, tmp_path):
    def stored(columns):
        table = columns if isinstance(columns, pa.Table) else pa.table(columns)
        WRITERS[request.param](table, str(tmp_path / "a.bin"))
        return str(tmp_path / "a.bin")

    return stored


KINDS = {
    "i1": pa.int8(), "i2": pa.int16(), "i4": pa.int32(), "i8": pa.int64(),
    "u1": pa.uint8(), "u2": pa.uint16(), "u4": pa.uint32(), "u8": pa.uint64(),
    "f2": pa.float16(), "f4": pa.float32(), "f8": pa.float64(),
}  # fmt: skip
NUMBERS = {name: pa.array([1, 0, 1, 0, 1, 1, 0], kind) for name, kind in KINDS.items()}
NUMBERS["?"] = pa.array([True, False, True, False, True, True, False])


def test_numbers_keep_their_types(store):
    table = opened(ArrowSource(store(NUMBERS)))
    assert isinstance(table, ArrayTable)
    block: dict[str, Any] = table.take(np.array([6, 0, 3]))
    for name, values in NUMBERS.items():
        assert str(table.schema[name]) == str(np.dtype(name))
        assert block[name].dtype == np.dtype(name)
        assert block[name].tolist() == values.take([6, 0, 3]).to_pylist()


def test_texts_and_bytes_become_objects(store):
    words = ["a", "", "ü", "a", "x" * 100, "b", "a"]
    source = ArrowSource(store({
        "text": pa.array(words),
        "large": pa.array(words, pa.large_string()),
        "category": pa.array(words).dictionary_encode(),
        "raw": pa.array([w.encode() for w in words], pa.binary()),
        "fixed": pa.array([b"%03d" % k for k in range(7)], pa.binary(3)),
    }))  # fmt: skip
    kinds = [str(f) for f in opened(source).schema.values()]
    assert kinds == ["text", "text", "text", "bytes", "bytes"]
    columns = everything(source)
    for name in ("text", "large", "category"):
        assert columns[name].tolist() == words
    assert columns["raw"].tolist() == [w.encode() for w in words]
    assert columns["fixed"].tolist() == [b"%03d" % k for k in range(7)]


def fixed(values, size):
    return pa.FixedSizeListArray.from_arrays(values, size)


def test_lists_become_ragged_or_have_a_shape(store):
    lists = [[1.5], [], [2, 3, 4], [5], [], [6, 7], [8]]
    pairs = np.arange(14, dtype=np.int32).reshape(7, 2)
    images = np.arange(42, dtype=np.uint8).reshape(7, 2, 3)
    ends = pa.array([0, 1, 1, 3, 4, 4, 6, 7], pa.int32())
    table = opened(ArrowSource(store({
        "ragged": pa.array(lists, pa.list_(pa.float32())),
        "large": pa.array(lists, pa.large_list(pa.float64())),
        "pair": fixed(pa.array(pairs.ravel()), 2),
        "image": fixed(fixed(pa.array(images.ravel()), 3), 2),
        "tensor": pa.FixedShapeTensorArray.from_numpy_ndarray(images),
        "points": pa.ListArray.from_arrays(ends, fixed(pa.array(pairs.ravel()), 2)),
    })))  # fmt: skip
    assert {k: str(f) for k, f in table.schema.items()} == {
        "ragged": "float32[*]", "large": "float64[*]", "pair": "int32[2]",
        "image": "uint8[2, 3]", "tensor": "uint8[2, 3]", "points": "int32[*, 2]",
    }  # fmt: skip
    rows = np.array([5, 0, 1, 2])
    block = table.take(rows)
    for name in ("ragged", "large"):
        assert isinstance(block[name], Ragged)
        assert [block[name][k].tolist() for k in range(4)] == [lists[r] for r in rows]
    assert (block["pair"] == pairs[rows]).all()
    assert (block["image"] == images[rows]).all()
    assert (block["tensor"] == images[rows]).all()
    assert block["points"][3].tolist() == pairs[1:3].tolist()


def test_nulls_are_refused_by_place_or_replaced(store):
    path = store({
        "i": pa.array([1, 2, 3, 4, None], pa.int16()),
        "f": pa.array([1, None, 3, 4, 5], pa.float32()),
        "s": pa.array(["a", "b", None, "d", "e"]),
        "b": pa.array([True, None, True, True, True]),
        "l": pa.array([[1], None, [2], [3], [4]], pa.list_(pa.int8())),
        "m": pa.array([[1], [None], [2], [3], [4]], pa.list_(pa.int8())),
    })  # fmt: skip
    for name, row in {"i": 4, "f": 1, "s": 2, "b": 1, "l": 1}.items():
        with pytest.raises(InvalidInput, match=f"column '{name}' is null in row {row}"):
            ArrowSource(path, columns=(name,)).open()
    with pytest.raises(InvalidInput, match="column 'm' is null"):
        ArrowSource(path, columns=("m",)).open()
    columns = everything(ArrowSource(path, columns=("i", "f"), missing=-1))
    assert columns["i"].tolist() == [1, 2, 3, 4, -1]
    assert columns["i"].dtype == np.int16
    assert columns["f"].tolist() == [1, -1, 3, 4, 5]
    with pytest.raises(InvalidInput, match=r"missing=0\.5"):
        ArrowSource(path, columns=("i",), missing=0.5).open()
    with pytest.raises(InvalidInput, match=r"column 'i' .*missing=40000"):
        ArrowSource(path, columns=("i",), missing=40_000).open()
    for name in ("s", "b", "l"):
        with pytest.raises(InvalidInput, match=f"column '{name}' is null"):
            ArrowSource(path, columns=(name,), missing=0).open()


def test_only_the_columns_that_are_chosen_are_read(store):
    table = {"a": [1, 2], "b": [3, 4], "age": [30, None], "y": ["run", "sit"]}
    stored = Path(store(table | {"when": pa.array([0, 1], pa.timestamp("s"))}))
    path = stored.rename(stored.with_suffix(".arrow"))  # the contents say which form it is
    dataset = load(path, x="b,a", y="y")
    assert np.asarray(dataset.x).tolist() == [[3, 1], [4, 2]]
    assert np.asarray(dataset.y).tolist() == [0, 1]
    with pytest.raises(InvalidInput, match="age"):
        load(path, x="age", y="y")
    with pytest.raises(NotFound, match="no column is called 'c'; there are a, b, age, y, when"):
        load(path, x="c", y="y")


def test_other_types_are_refused_by_name(store):
    path = store({
        "n": pa.array([1, 2]),
        "when": pa.array([1, 2], pa.timestamp("us")),
        "price": pa.array([1, 2], pa.decimal128(9, 2)),
        "both": pa.array([{"a": 1}, {"a": 2}]),
        "words": pa.array([["a"], ["b"]]),
        "deep": pa.array([[[1]], [[2]]]),
    })  # fmt: skip
    assert everything(ArrowSource(path, columns=("n",)))["n"].tolist() == [1, 2]
    for name in ("when", "price", "both", "words", "deep"):
        with pytest.raises(InvalidInput, match=f"column '{name}' is .*Cast it"):
            ArrowSource(path, columns=(name,)).open()
    with pytest.raises(NotFound, match="no column 'size'"):
        ArrowSource(path, columns=("size",)).open()
    twice = pa.table([pa.array([1]), pa.array([2])], names=["a", "a"])
    with pytest.raises(InvalidInput, match="several columns of one name"):
        ArrowSource(store(twice)).open()


class Unpickled:
    def __reduce__(self):
        return (pytest.fail, ("unpickled",))


@pytest.mark.parametrize("name", ["arrow.py_extension_type", "evil.type", "arrow.uuid"])
def test_extension_types_are_refused_and_never_run(store, name):
    data = b"" if name == "arrow.uuid" else pickle.dumps(Unpickled())
    metadata = {"ARROW:extension:name": name, "ARROW:extension:metadata": data}
    kind = pa.binary(16)
    schema = pa.schema([pa.field("x", kind, metadata=metadata)])
    path = store(pa.table([pa.array([b"0" * 16], kind)], schema=schema))
    with pytest.raises(InvalidInput, match=f"extension type '{name}'"):
        ArrowSource(path).open()


def test_a_file_without_rows_is_a_table(store):
    columns = {"a": pa.int64(), "t": pa.string(), "l": pa.list_(pa.int8())}
    path = store({name: pa.array([], kind) for name, kind in columns.items()})
    table = opened(ArrowSource(path))
    assert len(table) == 0
    assert [str(f) for f in table.schema.values()] == ["int64", "text", "int8[*]"]


def test_files_beyond_memory_are_a_feed(store, monkeypatch):
    n = 1100
    columns = {"a": pa.array(range(n)), "t": pa.array([f"n{k}" for k in range(n)])}
    path = store(columns)
    expected = everything(ArrowSource(path))
    # Beyond the limit by what the file announces, and by what is decoded.
    for limit in (100, 80_000):
        monkeypatch.setattr(arrow, "MAX_MEMORY_BYTES", limit)
        feed = opened(ArrowSource(path))
        if isinstance(feed, ArrowTable):
            assert limit == 100
            assert feed.take(np.array([n - 1]))["a"][0] == n - 1
            continue
        assert isinstance(feed, ArrowFeed)
        for start in (0, 1, 2, 3, 500, n - 1, n):
            blocks: list[Any] = list(feed.blocks(start))
            for name in columns:
                values = [v for block in blocks for v in block[name].tolist()]
                assert values == expected[name].tolist()[start:]
    monkeypatch.setattr(arrow, "MAX_PART_BYTES", 8)
    with pytest.raises(InvalidInput, match=r"a row group or record batch of .* at most 8"):
        list(feed.blocks(0))


@pytest.mark.parametrize("kind", ["to_file", "to_stream"])
def test_a_mapped_file_beyond_memory_is_read_in_any_order(tmp_path, monkeypatch, kind):
    images = np.arange(60, dtype=np.uint8).reshape(10, 2, 3)
    lists = [[k] * (k % 3) for k in range(10)]
    path = str(tmp_path / "a.arrow")
    WRITERS[kind](pa.table({
        "i": pa.array([*range(9), None]),
        "t": pa.array([f"n{k}" for k in range(10)]),
        "c": pa.array(list("aabbaabbcc")).dictionary_encode(),
        "l": pa.array(lists, pa.list_(pa.int16())),
        "x": pa.FixedShapeTensorArray.from_numpy_ndarray(images),
        "p": fixed(pa.array(np.arange(20.0)), 2),
        "h": pa.array(np.arange(10, dtype=np.float16)),
    }), path)  # fmt: skip
    expected = opened(ArrowSource(path, missing=-1))
    monkeypatch.setattr(arrow, "MAX_MEMORY_BYTES", 100)
    table = opened(ArrowSource(path, missing=-1))
    assert isinstance(table, ArrowTable)
    assert (len(table), table.schema) == (10, expected.schema)
    for rows in ([9, 0, 4, 4, 7], [3], [], list(range(10))):
        block: dict[str, Any] = dict(table.take(np.array(rows, np.int64)))
        for name, column in expected.take(np.array(rows, np.int64)).items():
            if isinstance(column, Ragged):
                assert (block[name].values == column.values).all()
                assert (block[name].offsets == column.offsets).all()
            else:
                assert block[name].dtype == column.dtype
                assert block[name].shape == column.shape
                assert (block[name] == column).all()
    with pytest.raises(InvalidInput, match="column 'i' is null in row 9"):
        opened(ArrowSource(path)).take(np.array([4, 9, 0]))


def test_a_buffer_that_announces_too_much_is_refused_before_it_is_inflated(tmp_path):
    path = tmp_path / "a.feather"
    feather.write_feather(pa.table({"x": np.zeros(4000)}), path, compression="lz4")
    content, size = path.read_bytes(), (32_000).to_bytes(8, "little")
    assert content.count(size) == 1
    path.write_bytes(content.replace(size, (1 << 45).to_bytes(8, "little")))
    with pytest.raises(InvalidInput, match=f"record batch of {1 << 45} bytes"):
        ArrowSource(str(path)).open()


def test_a_dictionary_of_parquet_is_not_expanded(tmp_path):
    n = 50_000
    words = pa.DictionaryArray.from_arrays(np.zeros(n, np.int32), pa.array(["x" * 10_000]))
    parquet.write_table(pa.table({"t": words}), tmp_path / "a", store_schema=False)
    texts = everything(ArrowSource(str(tmp_path / "a")))["t"]
    assert len(texts) == n
    assert len(set(map(id, texts))) <= n // arrow.BATCH_ROWS + 1


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "a.parquet"
    with pytest.raises(NotFound):
        ArrowSource(str(path)).open()
    for content in (b"", b"PAR1", b"PAR1PAR1", b"ARROW1\0\0", b"ARROW1", b"abc" * 100, b"\0" * 99):
        path.write_bytes(content)
        with pytest.raises(Corrupt, match=r"a\.parquet"):
            ArrowSource(str(path)).open()
    path.write_bytes(b"FEA1")
    with pytest.raises(InvalidInput, match="version 2"):
        ArrowSource(str(path)).open()


def test_without_pyarrow_the_error_names_the_extra(store, monkeypatch):
    path = store({"a": pa.array([1])})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtra, match=r"pip install 'triplane\[arrow\]'"):
        ArrowSource(path).open()


@pytest.fixture(scope="module")
def contents(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    table = pa.table({
        "i": pa.array(range(7)),
        "t": pa.array(list("abcdefg")),
        "c": pa.array(list("aabbaab")).dictionary_encode(),
        "l": pa.array([[1], [], [2, 3], [4], [], [5], [6]], pa.list_(pa.int16())),
    })  # fmt: skip
    for name, write in WRITERS.items():
        write(table, str(folder / name))
    return {name: (folder / name).read_bytes() for name in WRITERS}


@settings(deadline=None, max_examples=300)
@given(data=st.data(), kind=st.sampled_from(sorted(WRITERS)))
def test_damaged_files_give_rows_or_a_named_error(tmp_path_factory, contents, kind, data):
    content = bytearray(contents[kind])
    for at in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=5)):
        content[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.one_of(st.just(len(content)), st.integers(1, len(content))))
    path = tmp_path_factory.getbasetemp() / "damaged.arrow"
    path.write_bytes(bytes(content[:cut]))
    try:
        everything(ArrowSource(str(path)))
    except TriplaneError as error:
        assert "damaged.arrow" in str(error)
