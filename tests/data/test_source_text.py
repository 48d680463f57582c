"""Texts as sources; Python's own decoding and splitting are the oracle."""

import gzip
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.tables import everything, opened

from triplane.proto.errors import Corrupt, InvalidInput, NotFound, TriplaneError
from triplane.unified_ir.data.sources import lines, text
from triplane.unified_ir.data.sources.text import TextFeed, TextSource

POEM = "Über allen Gipfeln\nist Ruh',\r\n\n  In allen 🌲🌲\tWipfeln"
UNITS: dict[str, list[Any]] = {
    "characters": list(map(ord, POEM)),
    "words": POEM.split(),
    "lines": POEM.replace("\r\n", "\n").split("\n"),
}


@pytest.fixture
def poem(tmp_path):
    (tmp_path / "poem.txt").write_bytes(POEM.encode())
    return str(tmp_path / "poem.txt")


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("name", ["a.txt", "a.gz"])
def test_units_become_samples(tmp_path, unit, mark, name):
    data = (mark + POEM).encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name == "a.gz" else data)
    table = opened(TextSource(str(tmp_path / name), unit))
    assert hasattr(table, "take")
    column = "token" if unit == "characters" else "text"
    assert {k: str(f) for k, f in table.schema.items()} == {
        column: "int32" if unit == "characters" else "text"
    }
    assert table.take(np.arange(len(table)))[column].tolist() == UNITS[unit]
    assert table.take(np.array([3, 0]))[column].tolist() == [UNITS[unit][3], UNITS[unit][0]]


@settings(deadline=None, max_examples=80)
@given(
    content=st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
    unit=st.sampled_from(sorted(UNITS)),
)
def test_any_text_is_split_like_python_does(tmp_path_factory, content, unit):
    path = tmp_path_factory.getbasetemp() / "property.txt"
    path.write_bytes(content.encode())
    plain = content.removeprefix("\ufeff")
    translated = plain.replace("\r\n", "\n").replace("\r", "\n")
    expected = {
        "characters": list(map(ord, plain)),
        "words": plain.split(),
        "lines": translated.removesuffix("\n").split("\n") if plain else [],
    }[unit]
    if expected:
        (column,) = everything(TextSource(str(path), unit)).values()
        assert column.tolist() == expected
    else:
        with pytest.raises(InvalidInput, match="is empty"):
            TextSource(str(path), unit).open()


def test_the_texts_of_a_folder_follow_each_other_by_name(tmp_path):
    for name, content in {"b.txt": "two\n", "a.txt": "one\n", "c.md": "no", ".d.txt": "no"}.items():
        (tmp_path / name).write_text(content)
    assert everything(TextSource(str(tmp_path), "lines"))["text"].tolist() == ["one", "two"]
    tokens = everything(TextSource(str(tmp_path)))["token"]
    assert "".join(map(chr, tokens)) == "one\ntwo\n"


@pytest.mark.parametrize("unit", UNITS)
def test_texts_beyond_memory_are_a_feed(tmp_path, monkeypatch, unit):
    path = tmp_path / "a.txt"
    path.write_text(f"{POEM}\n" * 12_000)
    (expected,) = everything(TextSource(str(path), unit)).values()
    monkeypatch.setattr(text, "MAX_MEMORY_BYTES", 1000)
    feed = opened(TextSource(str(path), unit))
    assert isinstance(feed, TextFeed)
    for start in (0, 1, 4096, 29_999, len(expected) - 1, len(expected)):
        blocks: list[Any] = [column for block in feed.blocks(start) for column in block.values()]
        assert sum(map(len, blocks)) == len(expected) - start
        if blocks:
            assert (np.concatenate(blocks) == expected[start:]).all()
    tracemalloc.start()
    try:
        for _ in feed.blocks(0):
            pass
        assert tracemalloc.get_traced_memory()[1] < 12 << 20
    finally:
        tracemalloc.stop()


def test_lines_without_end_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(b"x" * (lines.MAX_LINE_CHARS + 1)))
    for unit in ("words", "lines"):
        with pytest.raises(InvalidInput, match=r"a\.gz:1: a row or line has at most 1048576"):
            TextSource(str(path), unit).open()
    monkeypatch.setattr(text, "MAX_TEXT_BYTES", 1 << 20)
    with pytest.raises(InvalidInput, match=r"a\.gz inflates to more than 1048576 bytes"):
        TextSource(str(path)).open()


@pytest.mark.parametrize("unit", UNITS)
def test_what_is_no_text_is_refused(tmp_path, unit):
    with pytest.raises(NotFound, match=r"none\.txt"):
        TextSource(str(tmp_path / "none.txt"), unit).open()
    with pytest.raises(NotFound, match="no file"):
        TextSource(str(tmp_path), unit).open()
    (tmp_path / "a.txt").write_bytes(b"fine\n" + "ü".encode()[:1])
    with pytest.raises(Corrupt, match=r"a\.txt is not UTF-8"):
        TextSource(str(tmp_path / "a.txt"), unit).open()
    (tmp_path / "a.gz").write_bytes(gzip.compress(POEM.encode())[:-5])
    with pytest.raises(Corrupt, match=r"a\.gz is not a complete gzip file"):
        TextSource(str(tmp_path / "a.gz"), unit).open()


def test_the_unit_is_checked(poem):
    with pytest.raises(InvalidInput, match="unit is one of characters, words, lines, got 'tokens'"):
        TextSource(poem, "tokens")


@settings(deadline=None, max_examples=60)
@given(content=st.binary(max_size=40), unit=st.sampled_from(sorted(UNITS)))
def test_any_bytes_give_samples_or_a_named_error(tmp_path_factory, content, unit):
    path = Path(tmp_path_factory.getbasetemp()) / "bytes.txt"
    path.write_bytes(content)
    try:
        TextSource(str(path), unit).open()
    except TriplaneError as error:
        assert "bytes.txt" in str(error)


@pytest.mark.parametrize("unit", UNITS)
def test_a_folder_may_say_which_file_each_sample_is_from(tmp_path, unit, monkeypatch):
    (tmp_path / "b.txt").write_text("abc\nd e")
    (tmp_path / "a.txt").write_bytes(POEM.encode())
    source = TextSource(str(tmp_path), unit, "author")
    units = everything(TextSource(str(tmp_path), unit))
    block = everything(source)
    first = len(UNITS[unit])
    assert block.pop("author").tolist() == ["a"] * first + ["b"] * (len(opened(source)) - first)
    assert {k: v.tolist() for k, v in block.items()} == {k: v.tolist() for k, v in units.items()}
    monkeypatch.setattr(text, "MAX_MEMORY_BYTES", 100)
    feed = opened(source)
    assert isinstance(feed, TextFeed)
    for start in (0, 1, first, first + 2):
        names = [name for part in feed.blocks(start) for name in np.asarray(part["author"])]
        assert names == ["a"] * max(0, first - start) + ["b"] * (
            len(units[next(iter(units))]) - max(first, start)
        )


def test_the_column_of_files_has_a_name_of_its_own(tmp_path):
    with pytest.raises(InvalidInput, match="another name than 'token'"):
        TextSource(str(tmp_path), files="token")
