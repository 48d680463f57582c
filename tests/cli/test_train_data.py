"""`triplane train` on sensor data, several inputs, texts and tables, with losses for each."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from triplane.unified_ir import load
from triplane.unified_ir.cli.shell import run

NETS = """
from triplane.unified_ir import nn, ops
from triplane.unified_ir.nn import Cell, Conv1d, Dense, Embedding


class Gait(Cell):
    def __init__(self):
        super().__init__()
        self.conv, self.head = Conv1d(2, 4, 5), Dense(4, 1)

    def construct(self, x):
        return self.head(ops.relu(self.conv(x)).mean([2]))


class Two(Cell):
    def __init__(self):
        super().__init__()
        self.left, self.right = Dense(3, 4), Dense(2, 4)

    def construct(self, a, b):
        return self.left(a) + self.right(b)


class Line(Cell):
    def __init__(self):
        super().__init__()
        self.head = Dense(3, 4)

    def construct(self, x):
        return self.head(x)


class CharLM(Cell):
    def __init__(self):
        super().__init__()
        self.embed, self.head = Embedding(32, 8), Dense(8, 32)

    def construct(self, token):
        return self.head(self.embed(token))
"""


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "nets.py").write_text(NETS)
    return tmp_path / "nets.py"


def train(cell: str, data: Path, *more: str) -> int:
    out = data.with_name("out.tpm")
    flags = ["--data", str(data), "--out", str(out), "--epochs", "2", *more]
    return run(["train", cell, *flags])


def measures(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    validation: dict[str, Any] = json.loads(capsys.readouterr().out)["validation"]
    return validation


def sensors(n: int = 300) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    x = rng.standard_normal((n, 2, 64)).astype(np.float32)
    return x, (3 * x.mean((1, 2)) + 1).astype(np.float32)


def test_real_targets_are_compared_by_mse(
    nets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x, y = sensors()
    np.savez(tmp_path / "s.npz", x=x, y=y)
    flags = ("--y", "y:1", "--metric", "r2", "--metric", "rmse", "--metric", "mae", "--lr", "0.05")
    assert train(f"{nets}:Gait", tmp_path / "s.npz", *flags, "--epochs", "20", "--json") == 0
    out, err = capsys.readouterr()
    assert "y holds real numbers, so the loss is mse" in err
    assert "r2, rmse: no mean of batches, so the functions of the model file do not" in err
    row = json.loads(out)["validation"]
    assert row["rmse"] == pytest.approx(row["loss"] ** 0.5, rel=1e-4)
    assert row["r2"] > 0.5
    assert load(tmp_path / "out.tpm").meta["loss"] == "MSE"


def test_a_target_without_an_axis_is_refused_with_the_option_that_adds_one(
    nets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x, y = sensors(40)
    np.savez(tmp_path / "s.npz", x=x, y=y)
    assert train(f"{nets}:Gait", tmp_path / "s.npz") == 2
    error = capsys.readouterr().err
    assert "another shape is chosen as in --y 'y:1'" in error
    assert "--x" not in error


def test_an_input_that_the_cell_refuses_gets_a_hint_about_itself_alone(
    nets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x, y = sensors(40)
    np.savez(tmp_path / "s.npz", x=x[:, 0], y=y)
    assert train(f"{nets}:Gait", tmp_path / "s.npz") == 2
    error = capsys.readouterr().err
    assert "another shape is chosen as in --x 'x:1x64'" in error
    assert "--y" not in error


@pytest.mark.parametrize("loss", ["l1", "huber", "smooth-l1"])
def test_the_result_of_numbers_names_their_metric(
    nets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], loss: str
) -> None:
    x, y = sensors(40)
    np.savez(tmp_path / "s.npz", x=x, y=y)
    assert train(f"{nets}:Gait", tmp_path / "s.npz", "--y", "y:1", "--loss", loss) == 0
    out = capsys.readouterr().out
    assert ", mae " in out
    assert "accuracy" not in out


@pytest.mark.parametrize("more", [(), pytest.param(("--processes",), marks=pytest.mark.slow)])
def test_two_inputs_go_to_the_cell_in_the_order_of_the_options(
    nets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...]
) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.random((60, 3), "f4"), rng.random((60, 2), "f4")
    np.savez(tmp_path / "t.npz", a=a, b=b, y=np.arange(60) % 4)
    flags = ("--x", "a", "--x", "b", "--workers", "2", *more, "--json")
    assert train(f"{nets}:Two", tmp_path / "t.npz", *flags) == 0
    assert {"accuracy", "loss"} <= measures(capsys).keys()
    assert json.loads(load(tmp_path / "out.tpm").meta["inputs"]).keys() == {"a", "b"}
    assert train(f"{nets}:Two", tmp_path / "t.npz", "--x", "b", "--x", "a") == 2


def test_shares_are_compared_by_bce_with_its_accuracy(
    nets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    x = rng.random((60, 3), "f4")
    np.savez(tmp_path / "t.npz", x=x, y=(rng.random((60, 4)) > 0.5).astype("f4"))
    assert train(f"{nets}:Line", tmp_path / "t.npz", "--loss", "bce", "--json") == 0
    assert 0 < measures(capsys)["accuracy"] < 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--loss", "mse", "--class-weights", "1,2"), "--class-weights are for losses of classes"),
        (("--loss", "mse", "--metric", "f1"), "--metric f1 does not measure numbers"),
        (("--metric", "r2"), "--metric r2 does not measure classes"),
        (("--y", "x", "--loss", "nll"), "--loss nll compares with classes"),
        (("--y", "z"), "no column is called 'z'; there are x, y"),
        (("--x", "=x"), "columns are chosen as"),
        (("--group", "y", "--validation", "digits"), "--group chooses what is held out"),
        (("--group", "who"), "no column is called 'who'"),
        (("--processes",), "needs workers"),
    ],
)
def test_options_that_do_not_fit_the_data_are_refused(
    nets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str], words: str
) -> None:
    np.savez(tmp_path / "t.npz", x=np.zeros((20, 3), "f4"), y=np.arange(20) % 4)
    assert train(f"{nets}:Line", tmp_path / "t.npz", *flags) == 2
    assert words in capsys.readouterr().err


def test_data_without_a_target_is_refused(
    nets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "t.npz", x=np.zeros((20, 3), "f4"))
    assert train(f"{nets}:Line", tmp_path / "t.npz") == 2
    assert "no single target to compare with; name its column: --y" in capsys.readouterr().err


def test_a_group_is_held_out_whole(
    nets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Each person has a class of their own, so a held-out person is never predicted.
    who = np.arange(80) // 20
    x = np.eye(4, dtype="f4")[who][:, :3]
    np.savez(tmp_path / "t.npz", x=x, y=who, who=who)
    flags = ("--group", "who", "--epochs", "40", "--lr", "0.1", "--json")
    assert train(f"{nets}:Line", tmp_path / "t.npz", *flags) == 0
    assert measures(capsys)["accuracy"] == 0
    assert train(f"{nets}:Line", tmp_path / "t.npz", *flags[2:]) == 0
    assert measures(capsys)["accuracy"] == 1


def test_a_schedule_counts_the_updates_of_the_run(
    nets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "t.npz", x=np.zeros((50, 3), "f4"), y=np.arange(50) % 4)
    flags = ("--schedule", "cosine", "--batch-size", "9", "--accumulate", "2", "--json")
    assert train(f"{nets}:Line", tmp_path / "t.npz", *flags) == 0
    record = json.loads(capsys.readouterr().out)
    assert "steps=6" in record["optimizer"]  # 40 samples: 5 batches, 3 updates, 2 epochs
    assert record["updates"] == 6


def write_csv(path: Path, header: list[str], rows: list[list[Any]]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def test_a_text_among_numbers_is_named_by_its_place(
    nets: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = write_csv(nets.with_name("t.csv"), ["a", "b", "c", "y"], [[1, 2, 3, 0], [4, "x", 5, 1]])
    assert train(f"{nets}:Line", table, "--x", "a,b,c") == 2
    assert "'b' holds texts, first 'x' in sample 1" in capsys.readouterr().err


def test_whole_numbers_for_a_network_of_reals_are_named_with_a_way_out(
    nets: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[list[Any]] = [[k, k + 1, 2, k % 2] for k in range(20)]
    table = write_csv(nets.with_name("whole.csv"), ["a", "b", "c", "y"], rows)
    assert train(f"{nets}:Line", table, "--x", "a,b,c") == 2
    error = capsys.readouterr().err
    assert "x of the data holds whole numbers alone (int64[3])" in error
    rows[0][0] = "0.0"
    write_csv(table, ["a", "b", "c", "y"], rows)
    assert train(f"{nets}:Line", table, "--x", "a,b,c") == 0


def test_a_text_shorter_than_a_window_is_refused_as_such(
    nets: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = nets.with_name("t.txt")
    text.write_text("hello world")
    assert train(f"{nets}:CharLM", text) == 2
    assert "shorter than one window" in capsys.readouterr().err


def test_sensor_data_of_a_table_is_joined_to_samples(
    nets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x, y = sensors()
    flat = x.reshape(len(x), -1)
    header = [*(f"ch{k:03}" for k in range(128)), "speed", "person"]
    rows = [
        [*map(float, v), float(t), f"p{k % 5}"]
        for k, (v, t) in enumerate(zip(flat, y, strict=True))
    ]
    path = write_csv(tmp_path / "s.csv", header, rows)
    flags = ("--x", "ch*:2x64", "--y", "speed:1", "--group", "person", "--lr", "0.05", "--json")
    assert train(f"{nets}:Gait", path, *flags, "--metric", "r2", "--epochs", "20") == 0
    out, err = capsys.readouterr()
    assert "speed holds real numbers, so the loss is mse" in err
    assert json.loads(out)["validation"]["r2"] > 0.5


def test_texts_become_the_labels_of_the_model(
    nets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = ["cat", "dog", "owl"]
    rows = [[float(k == 0), float(k == 1), float(k == 2), kinds[k]] for k in range(3)] * 20
    path = write_csv(tmp_path / "s.csv", ["a", "b", "c", "kind"], rows)
    held_out = write_csv(tmp_path / "h.csv", ["a", "b", "c", "kind"], rows[1:3])
    flags = ("--x", "a,b,c", "--y", "kind", "--validation", str(held_out), "--json")
    assert train(f"{nets}:Line", path, *flags, "--epochs", "30", "--lr", "0.1") == 0
    assert measures(capsys)["accuracy"] == 1
    assert json.loads(load(tmp_path / "out.tpm").meta["labels"]) == [*kinds, "3"]


def test_a_text_trains_a_model_of_characters(
    nets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "book.txt").write_text("the cat sat on the mat. " * 200)
    flags = ("--window", "16", "--metric", "perplexity", "--metric", "accuracy", "--json")
    assert train(f"{nets}:CharLM", tmp_path / "book.txt", *flags, "--lr", "0.05") == 0
    captured = capsys.readouterr()
    assert "each sample: token int64[16], next int64[16] of 11 classes" in captured.err
    row = json.loads(captured.out)["validation"]
    assert 1 < row["perplexity"] < 4  # of 11 characters; the one before tells most
    assert row["accuracy"] > 0.5
    labels = json.loads(load(tmp_path / "out.tpm").meta["labels"])
    assert labels[:11] == sorted(set("the cat sat on the mat. "))


def test_the_file_of_training_serves_to_convert_and_to_simulate(
    nets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One table, by the same options: train, calibrate, evaluate, and devices by person."""
    kinds, people = ["cat", "dog", "owl"], ["ann", "bob", "eve"]
    rng = np.random.default_rng(0)
    rows = [
        [*map(float, np.eye(3)[k % 3] + 0.1 * rng.random(3)), kinds[k % 3], people[k // 3 % 3]]
        for k in range(180)
    ]
    columns = ["a", "b", "c", "kind", "person"]
    path = write_csv(tmp_path / "s.csv", columns, rows)
    few = write_csv(tmp_path / "few.csv", columns, [r for r in rows if r[3] != "cat"])
    choice = ["--x", "a,b,c", "--y", "kind"]
    assert train(f"{nets}:Line", path, *choice, "--epochs", "40", "--lr", "0.1") == 0
    model = str(tmp_path / "out.tpm")
    capsys.readouterr()
    int8 = ["--quantize", "int8", "--calibrate", str(path), "--evaluate", str(few), "--json"]
    assert run(["convert", model, *choice, *int8]) == 0
    # Dogs are the first class of this file and the second one of the model.
    report = json.loads(capsys.readouterr().out)
    assert report["accuracy"]["before"] > 0.95
    study = ["--data", str(path), "--group", "person", "--rounds", "1", "--json"]
    flags = [*choice, *study, "--algorithm", "fedavg"]
    assert run(["federate", "simulate", model, *flags]) == 0
    scores = json.loads(capsys.readouterr().out)["trials"][0]["training"]
    assert [score["device"] for score in scores] == people


@pytest.mark.parametrize("size", ["32", "0x4", "axb", "1x4x4x4"])
def test_a_size_of_images_has_one_form(
    nets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], size: str
) -> None:
    assert train(f"{nets}:Line", tmp_path / "photos", "--size", size) == 2
    assert "HEIGHTxWIDTH, such as 32x32" in capsys.readouterr().err


def test_a_cell_of_ready_made_layers_names_no_line_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    text = "from triplane.unified_ir.nn import Dense, Flatten, Sequential\n\n\ndef net():\n"
    (tmp_path / "net.py").write_text(text + "    return Sequential(Flatten(), Dense(64, 10))\n")
    out = str(tmp_path / "out.tpm")
    cell = f"{tmp_path / 'net.py'}:net"
    assert run(["train", cell, "--data", "digits", "--epochs", "1", "--out", out]) == 0
    assert {node.meta.location for node in load(out).entry("predict").nodes} == {None}
    assert run(["train", f"{tmp_path / 'net.py'}:Net", "--data", "digits", "--out", out]) == 2
    assert "defines no 'Net'; cells and functions there: net" in capsys.readouterr().err
