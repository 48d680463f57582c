"""`triplane data`: samples of every kind are shown, written as records, checked and timed."""

import json
import sqlite3

import numpy as np
import pytest

from triplane.unified_ir import data
from triplane.unified_ir.cli import shell

CSV = "time,left,right,gait\n" + "".join(
    f"{k},{k / 8},{-k},{'walk' if k % 3 else 'run'}\n" for k in range(40)
)


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "steps.csv"
    path.write_text(CSV)
    return path


def run(capsys, *argv):
    code = shell.run(["data", *map(str, argv)])
    out = capsys.readouterr()
    return code, out.out, out.err


def record(capsys, *argv):
    code, out, error = run(capsys, *argv, "--json")
    assert code == 0, error
    return json.loads(out)


def test_inspect_shows_columns_and_the_first_samples(table, capsys):
    shown = record(capsys, "inspect", table, "--samples", 2)
    assert shown["samples"] == 40
    assert shown["columns"] == {
        "time": "int64", "left": "float64", "right": "int64", "gait": "text",
    }  # fmt: skip
    assert shown["first"][1] == {"time": "1", "left": "0.125", "right": "-1", "gait": "'walk'"}
    code, text, _ = run(capsys, "inspect", table)
    assert code == 0
    assert "40 samples of steps.csv" in text


def test_inspect_shows_a_text_and_not_the_numbers_of_its_characters(tmp_path, capsys):
    for name, text in {"a": "Größe\n", "b": "x" * 200}.items():
        (tmp_path / f"{name}.txt").write_text(text)
    code, text, _ = run(capsys, "inspect", tmp_path)
    assert code == 0
    assert f"text: 'Größe\\n{'x' * 60}" in text
    assert "sample 0" not in text
    code, text, _ = run(capsys, "inspect", tmp_path / "a.txt", "--json")
    assert json.loads(text)["text"] == "Größe\n"
    assert json.loads(text)["first"][0] == {"token": str(ord("G"))}


def test_a_choice_of_columns_is_shown_as_a_model_is_given_it(table, capsys):
    flags = ("--x", "left,right:1x2", "--y", "gait")
    shown = record(capsys, "inspect", table, *flags)
    assert shown["columns"] == {"x": "float32[1, 2]", "gait": "int64"}
    assert (shown["inputs"], shown["targets"]) == (["x"], ["gait"])
    assert shown["labels"] == ["run", "walk"]
    assert shown["first"][1] == {"x": "[ 0.125, -1.   ]", "gait": "1"}
    windows = record(capsys, "inspect", table, "--x", "*", "--group", "gait", "--window", 4)
    assert windows["columns"] == {"x": "float32[4, 3]", "gait": "text"}
    code, _, error = run(capsys, "inspect", table, "--x", "middle")
    assert code == 2
    assert "no column is called 'middle'" in error


def test_records_hold_the_same_samples_and_are_checked(table, tmp_path, capsys):
    out = tmp_path / "steps.tpr"
    written = record(capsys, "convert", table, out)
    assert (written["samples"], written["shards"]) == (40, 1)
    assert record(capsys, "verify", out)["blocks"] == written["blocks"]
    left = ["--x", "left,right"]
    a, b = (data.load(p, x=left[1:], y=["gait"]) for p in (table, out))
    assert np.array_equal(a.x, b.x)
    assert a.labels == b.labels == ("run", "walk")
    moved = out.rename(tmp_path / "moved.tpr")
    assert record(capsys, "inspect", moved)["samples"] == 40


def test_a_damaged_block_is_named(table, tmp_path, capsys):
    out = tmp_path / "steps.tpr"
    record(capsys, "convert", table, out)
    (shard,) = out.glob("shard-*")
    damaged = bytearray(shard.read_bytes())
    damaged[100] ^= 1
    shard.write_bytes(damaged)
    code, _, error = run(capsys, "verify", out)
    assert code != 0
    assert "block 0 (rows 0..39)" in error


def test_pixels_stay_bytes_in_records_and_are_scaled_when_they_are_loaded(tmp_path, capsys):
    out = tmp_path / "digits.tpr"
    record(capsys, "convert", "digits", out)
    assert record(capsys, "inspect", out)["columns"]["x"] == "uint8[1, 8, 8]"
    again, digits = data.load(out), data.digits()
    assert np.array_equal(again.x, digits.x)
    assert again.labels == digits.labels
    assert not again.notes


def test_a_query_gives_the_samples_of_a_database(tmp_path, capsys):
    path = tmp_path / "a.db"
    with sqlite3.connect(path) as base:
        base.execute("create table t (k integer, v real)")
        base.executemany("insert into t values (?, ?)", [(k, k / 2) for k in range(9)])
    base.close()
    shown = record(capsys, "inspect", path, "--sql", "select v from t where k > 4 order by k")
    assert (shown["samples"], shown["columns"]) == (4, {"v": "float64"})
    code, _, error = run(capsys, "inspect", path)
    assert code != 0
    assert "ORDER BY" in error


def test_profile_names_each_step(tmp_path, capsys):
    pipeline = tmp_path / "p.json"
    pipeline.write_text(data.digits().shuffle().batch(16).json())
    timed = record(capsys, "profile", pipeline, "--batches", 3)
    assert timed["samples"] == 48
    assert [s["step"].partition("(")[0] for s in timed["steps"]] == [
        "read digits", "scale", "cache", "shuffle", "batch",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["inspect", "absent.csv"], "does not exist"),
        (["convert", "digits", "digits.records"], r"a record set is called NAME.tpr"),
        (["verify", "absent.tpr"], "absent.tpr"),
        (["inspect", "digits", "--size", "big"], "HEIGHTxWIDTH"),
    ],
)
def test_mistakes_are_explained(argv, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, error = run(capsys, *argv)
    assert code != 0
    assert message in error


def test_records_do_not_replace_what_is_there(table, tmp_path, capsys):
    (tmp_path / "steps.tpr").mkdir()
    code, _, error = run(capsys, "convert", table, tmp_path / "steps.tpr")
    assert code != 0
    assert "exists" in error
