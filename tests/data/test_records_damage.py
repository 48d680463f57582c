"""Damaged and forged record sets are refused, or give the right rows; never anything else."""

import json
import os
import random
import shutil
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from triplane.proto.errors import Corrupt, InvalidInput, NotFound, Unavailable
from triplane.unified_ir.data.columns import Ragged
from triplane.unified_ir.data.records import RecordTable, RecordWriter, write_records
from triplane.unified_ir.data.records.format import MAGIC, PREAMBLE
from triplane.unified_ir.data.records.reader import read_bytes

N = 60
ALL = np.arange(N)


def objects(values):
    column = np.empty(len(values), object)
    column[:] = values
    return column


def samples():
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 4, N)
    offsets = np.cumsum([0, *lengths])
    return {
        "x": rng.integers(0, 256, (N, 30), dtype=np.uint8),
        "r": Ragged(rng.integers(0, 99, (offsets[-1], 2)).astype(np.int16), offsets),
        "t": objects([f"text {k} ä" for k in range(N)]),
        "b": objects([b"b" * (k % 5) for k in range(N)]),
    }


def plain(columns):
    return {name: [one(column[k]) for k in range(len(column))] for name, column in columns.items()}


def one(value):
    return value if isinstance(value, bytes) else np.asarray(value).tolist()


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "a.tpr"
    write_records(path, [samples()], block_bytes=1 << 10, shard_bytes=2500)
    assert len(RecordTable(path).shards) == 2
    return path


EXPECTED = plain(samples())


def outcome(path):
    """The rows in a random order and after `verify`; None if they are refused."""
    try:
        opened = RecordTable(path)
        rows = np.random.default_rng(1).permutation(N)
        first = opened.take(rows)
        opened.verify()
        assert len(opened) == N
        back = np.argsort(rows)
        return {name: [values[k] for k in back] for name, values in plain(first).items()}
    except (Corrupt, InvalidInput, NotFound):
        return None


def files_of(path):
    return [p for p in sorted(path.iterdir()) if p.name != "lock"]


def test_a_flip_of_any_bit_of_a_committed_byte_is_noticed(path):
    assert outcome(path) == EXPECTED
    rng = random.Random(0)
    for file in files_of(path):
        content = file.read_bytes()
        places = range(len(content)) if len(content) < 500 else rng.sample(range(len(content)), 300)
        for at in places:
            spoilt = bytearray(content)
            spoilt[at] ^= 1 << rng.randrange(8)
            file.write_bytes(spoilt)
            assert outcome(path) is None, f"{file.name} at {at}"
        file.write_bytes(content)
    assert outcome(path) == EXPECTED


def test_random_damage_gives_the_right_rows_or_a_named_error(path):
    rng = random.Random(1)
    for _ in range(300):
        file = rng.choice(files_of(path))
        content = file.read_bytes()
        spoilt = bytearray(content)
        start = rng.randrange(len(spoilt))
        stop = min(len(spoilt), start + rng.choice([1, 4, 50]))
        kind = rng.randrange(4)
        if kind == 0:
            spoilt[start:stop] = rng.randbytes(stop - start)
        elif kind == 1:
            del spoilt[start:stop]
        elif kind == 2:
            spoilt[start:start] = rng.randbytes(stop - start)
        else:
            spoilt += rng.randbytes(9)
        file.write_bytes(spoilt)
        assert outcome(path) in (None, EXPECTED)
        file.write_bytes(content)


def test_a_file_cut_at_any_byte_is_refused(path):
    rng = random.Random(2)
    for file in files_of(path):
        content = file.read_bytes()
        for size in {0, 1, len(content) - 1, *rng.sample(range(len(content)), 60)}:
            os.truncate(file, size)
            with pytest.raises((Corrupt, InvalidInput)):
                RecordTable(path)
            file.write_bytes(content)


def test_bytes_behind_the_committed_ones_are_ignored(path):
    for file in files_of(path):
        if file.name != "head":
            with file.open("ab") as opened:
                opened.write(b"of a crash")
    assert outcome(path) == EXPECTED


def test_a_missing_file_is_named(path):
    for name, error in (("shard-00001", Corrupt), ("index", Corrupt), ("head", NotFound)):
        (path / name).unlink()
        with pytest.raises(error, match=name):
            RecordTable(path)


def test_a_damaged_block_is_named_and_the_others_are_read(path):
    shard = path / "shard-00001"
    content = bytearray(shard.read_bytes())
    content[5] ^= 1
    shard.write_bytes(content)
    opened = RecordTable(path)
    start = opened.shards[0].rows
    assert plain(opened.take(np.arange(start))) == {k: v[:start] for k, v in EXPECTED.items()}
    for _ in range(2):  # it does not count as checked after the first refusal
        with pytest.raises(Corrupt, match=rf"shard-00001: block \d+ \(rows {start}\.\."):
            opened.take(np.array([start]))
    with pytest.raises(Corrupt, match="shard-00001: block"):
        opened.verify()
    unchecked: Any = RecordTable(path, verify=False)
    assert unchecked.take(np.array([start]))["x"][0, 5] == content[5]


def test_each_block_is_compared_once_per_open_set(path, monkeypatch):
    calls = []
    monkeypatch.setattr(
        "triplane.unified_ir.data.records.reader.check_crc32",
        lambda *arguments: calls.append(arguments[-1]),
    )
    opened = RecordTable(path)
    calls.clear()  # those of the index
    opened.take(np.array([0, 1]))
    assert len(calls) == 1
    for _ in range(2):
        opened.take(ALL)
    assert len(calls) == len(set(calls)) == sum(s.blocks for s in opened.shards)
    unchecked = RecordTable(path, verify=False)
    calls.clear()
    unchecked.take(ALL)
    assert calls == []


def rewrite(path, change):
    """Change the JSON of the head, with its checksum."""
    file = path / "head"
    document = json.loads(file.read_bytes()[PREAMBLE.size :])
    text = change(document)
    text = text if isinstance(text, bytes) else json.dumps(document).encode()
    file.write_bytes(PREAMBLE.pack(MAGIC, 1, len(text), zlib.crc32(text)) + text)


CHANGES = {
    "more rows": lambda d: d.update(rows=61),
    "negative rows": lambda d: d.update(rows=-1),
    "rows beyond 64 bits": lambda d: d.update(rows=1 << 70),
    "a fraction of rows": lambda d: d.update(rows=60.0),
    "true blocks": lambda d: d.update(blocks=True),
    "fewer blocks": lambda d: d.update(blocks=1),
    "millions of blocks": lambda d: d.update(blocks=1 << 24),
    "no columns": lambda d: d.update(columns=[]),
    "columns as an object": lambda d: d.update(columns={"x": 1}),
    "no metadata": lambda d: d.pop("metadata"),
    "metadata of numbers": lambda d: d.update(metadata={"a": 1}),
    "a repeated column": lambda d: d["columns"].append(d["columns"][0]),
    "an unknown type": lambda d: d["columns"].append(["z", "object", []]),
    "a type with fields": lambda d: d["columns"].append(["z", "i4,i4", []]),
    "a type that is a list": lambda d: d["columns"].append(["z", ["int8"], []]),
    "a name that is a number": lambda d: d["columns"].append([1, "int8", []]),
    "a negative size": lambda d: d["columns"].append(["z", "int8", [-1]]),
    "a huge size": lambda d: d["columns"].append(["z", "int8", [1 << 62, 1 << 62]]),
    "a huge size beside none": lambda d: d["columns"].append(["z", "int8", [0, 1 << 62]]),
    "a size of text": lambda d: d["columns"].append(["z", "int8", ["1"]]),
    "too many axes": lambda d: d["columns"].append(["z", "int8", [1] * 9]),
    "a second size of null": lambda d: d["columns"].append(["z", "int8", [1, None]]),
    "text with a shape": lambda d: d["columns"].append(["z", "text", [1]]),
    "ragged rows without bytes": lambda d: d["columns"].append(["z", "int8", [None, 0]]),
    "a wider column": lambda d: d["columns"][0].__setitem__(2, [31]),
    "too deep": lambda _: b"[" * 100_000,
    "no object": lambda _: b"7",
    "no JSON": lambda _: b"{",
    "not UTF-8": lambda _: b'{"a": "\xff"}',
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_forged_head_is_refused(path, name):
    rewrite(path, CHANGES[name])
    with pytest.raises((Corrupt, InvalidInput), match=r"a\.tpr"):
        RecordTable(path).take(ALL)


def test_a_head_of_another_version_or_size_is_refused(path):
    head = (path / "head").read_bytes()
    (path / "head").write_bytes(head[:8] + struct.pack("<I", 2) + head[12:])
    with pytest.raises(InvalidInput, match="format version 2"):
        RecordTable(path)
    (path / "head").write_bytes(head + bytes(1 << 20))
    with pytest.raises(InvalidInput, match="limit of a head"):
        RecordTable(path)


def forge_index(path, change):
    """Change the entries of the index, with their checksum."""
    opened = RecordTable(path)
    entries = np.fromfile(path / "index", opened._layout.entry)
    change(entries)
    entries.tofile(path / "index")
    rewrite(path, lambda d: d.update(index_crc32=zlib.crc32(entries.tobytes())))


def assign(field, block, value):
    def change(entries):
        entries[field][block] = value

    return change


ENTRIES = {
    "no rows": assign("rows", 0, 0),
    "too many rows": assign("rows", 0, 1 << 21),
    "most rows": assign("rows", 0, 0xFFFFFFFF),
    "a first shard that is not the first": assign("shard", slice(None), 1),
    "a shard that is left out": assign("shard", -1, 2),
    "shards that go back": assign("shard", 0, 1),
    "the last shard there is": assign("shard", -1, 0xFFFFFFFF),
    "more elements than bytes": assign("elements", (0, 1), 0xFFFFFFFF),
    "a larger block": assign("elements", (-1, 1), 1 << 20),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_a_forged_index_is_refused(path, name):
    forge_index(path, ENTRIES[name])
    with pytest.raises(Corrupt, match=r"a\.tpr"):
        RecordTable(path)


def forge_block(path, change):
    """Change the bytes of the first block, with its checksum."""
    opened = RecordTable(path)
    content = bytearray((path / "shard-00000").read_bytes())
    size = int(opened._blocks.sizes[0])
    rows = int(opened._blocks.rows[0])
    change(content, rows)
    (path / "shard-00000").write_bytes(content)
    forge_index(path, assign("crc32", 0, zlib.crc32(content[:size])))


@pytest.mark.parametrize("table", [0, 1, 2])
@pytest.mark.parametrize("at", [0, 1, 5, -1])
@pytest.mark.parametrize("offset", [1 << 31, 0xFFFFFFFF, 7])
@pytest.mark.parametrize("verify", [True, False])
def test_offsets_that_do_not_ascend_are_refused(path, table, at, offset, verify):
    def change(content, rows):
        begin = 30 * rows + 4 * table * (rows + 1)
        place = begin + 4 * (at % (rows + 1))
        old = struct.unpack_from("<I", content, place)[0]
        struct.pack_into("<I", content, place, offset if offset > 7 else old ^ 0x100)

    forge_block(path, change)
    with pytest.raises(Corrupt, match="offsets of column"):
        RecordTable(path, verify=verify).take(np.array([0]))


def test_text_that_is_not_utf8_is_refused(path):
    def change(content, rows):
        content[content.index("ä".encode())] = 0xFF

    forge_block(path, change)
    with pytest.raises(Corrupt, match=r"a\.tpr: a text is not valid UTF-8"):
        RecordTable(path).take(ALL)


def test_an_appender_refuses_what_a_reader_refuses(path, tmp_path):
    for name in ("head", "index", "shard-00000"):
        copy = tmp_path / f"copy of {name}"
        shutil.copytree(path, copy)
        os.truncate(copy / name, (copy / name).stat().st_size - 1)
        sizes = {f.name: f.stat().st_size for f in copy.iterdir()}
        with pytest.raises(Corrupt):
            RecordWriter.open(copy)
        assert sizes == {f.name: f.stat().st_size for f in copy.iterdir()}


def test_errors_of_the_system_are_named(path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(Unavailable, match="Input/output error"):
            RecordTable(path)
    with monkeypatch.context() as patch:
        patch.setattr("mmap.mmap", refuse)
        with pytest.raises(Unavailable, match="could not be mapped"):
            RecordTable(path)
    memory = Path("/proc/self/mem")  # a file whose first page cannot be read
    with memory.open("rb") as file, pytest.raises(Unavailable, match="could not be read"):
        read_bytes(file, 8, memory)
