"""CSV files as sources; Python's csv module and numpy are the oracle."""

import csv
import gzip
import io
import re
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.tables import everything, opened

from triplane.proto.errors import Corrupt, InvalidInput, NotFound, TriplaneError
from triplane.unified_ir.data.sources import csv_files
from triplane.unified_ir.data.sources.csv_files import CsvFeed, CsvSource


@pytest.fixture
def write(tmp_path):
    def written(content, name="a.csv"):
        data = content.encode() if isinstance(content, str) else content
        path = tmp_path / name
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return str(path)

    return written


def column(path, name, **options):
    return everything(CsvSource(path, **options))[name]


TABLE = 'age,height,name,member\n31,1.5,Ada,true\n-7,2e3,"Lovelace, A.",FALSE\n'


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_types_follow_from_the_cells(write, name, mark):
    table = opened(CsvSource(write(mark + TABLE, name)))
    assert {k: str(f) for k, f in table.schema.items()} == {
        "age": "int64", "height": "float64", "name": "text", "member": "bool"
    }  # fmt: skip
    block = table.take(np.array([1, 0, 1]))
    assert block["age"].tolist() == [-7, 31, -7]
    assert block["height"].tolist() == [2000.0, 1.5, 2000.0]
    assert block["name"].tolist() == ["Lovelace, A.", "Ada", "Lovelace, A."]
    assert block["member"].tolist() == [False, True, False]


def test_the_type_follows_from_the_last_row_as_well(write):
    rows = "x\n" + "1\n" * 9000
    assert column(write(rows), "x").dtype == np.int64
    assert column(write(rows + "1.5\n"), "x").dtype == np.float64
    assert column(write(rows + "-\n"), "x")[0] == "1"


@pytest.mark.parametrize(
    "cell",
    [
        "1_000",
        "\u0661",
        "0x10",
        "1,5",
        "inf",
        "--1",
        "1e",
        ".",
        "e5",
        "1 2",
        "12345678901234567890",
        "99999999999999999999.",
        "true",
    ],
)
def test_what_only_python_or_nobody_takes_for_a_number_is_text(write, cell):
    if cell == "99999999999999999999.":
        assert column(write(f'x\n"{cell}"\n'), "x").dtype == np.float64
        return
    assert column(write(f'x\n1\n"{cell}"\n'), "x").tolist() == ["1", cell]


def test_whole_numbers_never_lose_digits(write):
    top = 2**63 - 1
    assert column(write(f"x\n{top}\n{-top - 1}\n"), "x").tolist() == [top, -top - 1]
    assert column(write(f"x\n{top + 1}\n"), "x").tolist() == [str(top + 1)]
    assert column(write(f"x\n0.5\n{top}\n"), "x").tolist() == ["0.5", str(top)]
    assert column(write(f"x\n0.5\n{top}\n"), "x", types=(("x", "float64"),))[1] == float(top)
    with pytest.raises(InvalidInput, match=r"a\.csv:3: column 'x'.*does not fit int64"):
        column(write(f"x\n1\n{top + 1}\n"), "x", types=(("x", "int64"),))


@pytest.mark.parametrize("cell", ["", " ", "NaN", "nan"])
def test_missing_values_are_refused_by_place_or_replaced(write, cell):
    path = write(f"x,y\n1,2\n{cell},3\n")
    with pytest.raises(InvalidInput, match=r"a\.csv:3: column 'x'.*missing="):
        CsvSource(path).open()
    assert column(path, "x", missing=-1).tolist() == [1, -1]
    assert column(path, "x", missing=-1).dtype == np.int64
    assert column(path, "x", missing=0.5).tolist() == [1.0, 0.5]
    with pytest.raises(InvalidInput, match=r"a\.csv:3"):
        column(path, "x", missing=0.5, types=(("x", "int64"),))
    assert column(path, "y", columns=("y",)).tolist() == [2, 3]
    assert column(write(f"x,y\na,2\n{cell},3\n"), "x").tolist() == ["a", cell]
    with pytest.raises(InvalidInput, match=r"a\.csv:3.*bool"):
        column(write(f"x,y\ntrue,2\n{cell},3\n"), "x", missing=1)


def test_a_column_without_values_is_text(write):
    assert column(write("x,y\n,1\nNaN,2\n"), "x").tolist() == ["", "NaN"]


CELLS = st.one_of(
    st.integers(-(10**15) + 1, 10**15 - 1).map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=9),
)


@settings(deadline=None, max_examples=80)
@given(
    rows=st.integers(1, 4).flatmap(
        lambda n: st.lists(st.lists(CELLS, min_size=n, max_size=n), min_size=1, max_size=9)
    ),
    delimiter=st.sampled_from([",", ";", "\t"]),
)
def test_what_the_csv_module_writes_is_read(tmp_path_factory, rows, delimiter):
    names = [f"c{k}" for k in range(len(rows[0]))]
    text = io.StringIO(newline="")
    csv.writer(text, delimiter=delimiter, quoting=csv.QUOTE_ALL).writerows([names, *rows])
    path = tmp_path_factory.getbasetemp() / "property.csv"
    path.write_bytes(text.getvalue().encode())
    table = opened(CsvSource(str(path), delimiter=delimiter, missing=0))
    for name, cells in zip(names, zip(*rows, strict=True), strict=True):
        values = table.columns[name]
        if values.dtype == object:
            assert values.tolist() == list(cells)
        elif values.dtype == bool:
            assert values.tolist() == [c.strip(" ").lower() == "true" for c in cells]
        else:
            expected = [float(c) if c.strip(" ") and c.lower() != "nan" else 0.0 for c in cells]
            assert values.tolist() == expected


def test_columns_and_names_are_chosen(write):
    assert list(CsvSource(write(TABLE), columns=("name", "age")).open().schema) == ["name", "age"]
    table = opened(CsvSource(write("1;2\n3;4\n"), delimiter=";", header=False))
    assert {k: v.tolist() for k, v in table.columns.items()} == {"f0": [1, 3], "f1": [2, 4]}
    with pytest.raises(NotFound, match="no column 'size'; it holds age, height"):
        CsvSource(write(TABLE), columns=("size",)).open()
    with pytest.raises(NotFound, match="no column 'size'"):
        CsvSource(write(TABLE), types=(("size", "text"),)).open()


@pytest.mark.parametrize(
    ("content", "family", "message"),
    [
        ("", InvalidInput, "is empty"),
        ("\n\n", InvalidInput, "is empty"),
        ("a,b\n1,2\n3\n", InvalidInput, r":3 has 1 cells, the first row has 2"),
        ('a,b\n"x\ny",2\n3\n', InvalidInput, r":4 has 1 cells"),
        ("a,a\n1,2\n", InvalidInput, r":1: .*'a' does not"),
        ("a,\n1,2\n", InvalidInput, r":1: .*'' does not"),
        ('a\n"b', Corrupt, r":2 is not a row of CSV"),
        ('a\n"b"c\n', Corrupt, r":2 is not a row of CSV"),
        (b"a\n\xff\xfe\n", Corrupt, "not UTF-8"),
        (b"a\n" + b"b" * 140_000, InvalidInput, "field limit"),
        (b"a\n" + b"b" * (1 << 20) + b"\n", InvalidInput, r":2: a row or line has at most 1048576"),
        (b"a\n" + b'"b",' * (1 << 18), InvalidInput, r":2 has 262145 cells"),
        (b"a\n" + b'"\n",' * (1 << 19), InvalidInput, r"a row or line has at most 1048576"),
        (b"a," * 10_001, InvalidInput, "10000 are read"),
    ],
)
def test_what_is_no_table_is_refused_by_place(write, content, family, message):
    with pytest.raises(family, match=r"a\.csv.*" + message):
        CsvSource(write(content)).open()


@pytest.mark.parametrize(
    "cell", ["1" * 100_000, "1." + "0" * 100_000, " " * 100_000 + "x", "1e" * 50_000]
)
def test_long_cells_take_no_quadratic_time(write, cell):
    assert column(write(f"x\n{cell}\n"), "x").tolist() == [cell]


def test_options_are_checked(write):
    wrong: list[dict[str, Any]] = [
        {"delimiter": ""}, {"delimiter": ";;"}, {"delimiter": '"'}, {"delimiter": "\n"},
        {"types": (("age", "float16"),)}, {"missing": float("nan")},
    ]  # fmt: skip
    for options in wrong:
        with pytest.raises(InvalidInput):
            CsvSource("a.csv", **options)


def test_a_cut_gzip_file_is_damage(write, tmp_path):
    path = write(TABLE * 100, "a.csv.gz")
    (tmp_path / "a.csv.gz").write_bytes((tmp_path / "a.csv.gz").read_bytes()[:-9])
    with pytest.raises(Corrupt, match=r"a\.csv\.gz is not a complete gzip file"):
        CsvSource(path).open()


def test_a_gzip_bomb_is_stopped_by_the_limit(write, monkeypatch):
    monkeypatch.setattr(csv_files, "MAX_CSV_BYTES", 1 << 20)
    with pytest.raises(InvalidInput, match="a file 1048576"):
        CsvSource(write("a\n" + "1\n" * (1 << 20), "a.csv.gz")).open()


def test_a_file_beyond_memory_is_a_feed(write, monkeypatch):
    rows = [(k, k / 8, f"n{k}") for k in range(10_000)]
    path = write("a,b,c\n" + "".join(f"{a},{b},{c}\n" for a, b, c in rows))
    table = opened(CsvSource(path))
    assert hasattr(table, "take")
    monkeypatch.setattr(csv_files, "MAX_MEMORY_BYTES", 10_000)
    types = (("a", "int64"), ("b", "float64"), ("c", "text"))
    for feed in (opened(CsvSource(path)), opened(CsvSource(path, types=types))):
        assert isinstance(feed, CsvFeed)
        assert feed.schema == table.schema
        for start in (0, 1, 4096, 5000, 9_999, 10_000):
            blocks: list[Any] = list(feed.blocks(start))
            for name in "abc":
                values = [v for block in blocks for v in block[name].tolist()]
                assert values == table.columns[name].tolist()[start:]


def test_a_feed_takes_little_memory(write, monkeypatch):
    monkeypatch.setattr(csv_files, "MAX_MEMORY_BYTES", 1000)
    path = write("a,b\n" + "12345,some text of a row\n" * 60_000)
    feed = opened(CsvSource(path))
    tracemalloc.start()
    try:
        assert sum(len(block["a"]) for block in feed.blocks(0)) == 60_000
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_a_feed_names_the_place_of_a_changed_cell(write, monkeypatch):
    monkeypatch.setattr(csv_files, "MAX_MEMORY_BYTES", 1)
    feed = opened(CsvSource(write("a\n1\n2\n")))
    write("a\n1\nx\n")
    with pytest.raises(InvalidInput, match=r"a\.csv:3: column 'a': 'x' is not of type int64"):
        list(feed.blocks(0))


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_damaged_files_give_rows_or_a_named_error(tmp_path_factory, data):
    content = bytearray(TABLE.encode())
    for at in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=5)):
        content[at] = data.draw(st.sampled_from(b'",\n\r\x00\xff\xc3 aN1'))
    path = tmp_path_factory.getbasetemp() / "damaged.csv"
    path.write_bytes(bytes(content))
    try:
        table = opened(CsvSource(str(path)))
        assert set(map(len, table.columns.values())) == {len(table)}
    except TriplaneError as error:
        assert re.search(r"damaged\.csv", str(error))
