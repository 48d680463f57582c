"""`triplane train`: the file it writes, and what it says to wrong calls."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from triplane.unified_ir import load
from triplane.unified_ir.cli.shell import run

CELL = Path(__file__).resolve().parents[2] / "unified_ir/cli/demo/digits.py"


def train(tmp_path: Path, *more: str, cell: str = f"{CELL}:Digits") -> int:
    out = tmp_path / "digits.tpm"
    return run(["train", cell, "--data", "digits", "--epochs", "1", "--out", str(out), *more])


@pytest.mark.slow
def test_a_model_file_holds_every_entry_and_the_trained_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    history = tmp_path / "history.json"
    assert train(tmp_path, "--json", "--history", str(history)) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["validation"]["accuracy"] > 0.5
    module = load(tmp_path / "digits.tpm", expected_digest=record["digest"])
    assert {"predict", "evaluate", "train_step", "local_update", "adapt"} <= module.entries.keys()
    assert len(json.loads(history.read_text())) == 1


def test_a_network_of_the_zoo_is_trained_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cell = "zoo:resnet8,channels=1"
    assert train(tmp_path, "--json", "--batch-size", "512", cell=cell) == 0
    module = load(tmp_path / "digits.tpm")
    assert module.state["conv.weight"].array.shape == (16, 1, 3, 3)
    assert json.loads(capsys.readouterr().out)["validation"]["accuracy"] >= 0


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("zoo:vgg", "the zoo has no 'vgg'; it has lenet"),
        ("zoo:resnet8,channels=x", "options of a zoo network are NAME=NUMBER"),
        ("zoo:resnet8,depth=3", "zoo:resnet8 does not take these options"),
    ],
)
def test_a_network_the_zoo_has_not_is_answered_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cell: str, words: str
) -> None:
    assert train(tmp_path, cell=cell) != 0
    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_the_same_seed_writes_the_same_bytes(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    assert train(first) == train(second) == 0
    assert (first / "digits.tpm").read_bytes() == (second / "digits.tpm").read_bytes()


@pytest.mark.slow
def test_a_checkpointed_run_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    assert train(whole, "--epochs", "2") == 0
    assert train(parts, "--checkpoint", str(parts / "run")) == 0
    assert train(parts, "--epochs", "2", "--checkpoint", str(parts / "run")) == 0
    assert (whole / "digits.tpm").read_bytes() == (parts / "digits.tpm").read_bytes()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def broken(:", "net.py:1: SyntaxError"),
        ("import absent_library", "net.py:1: ModuleNotFoundError: No module named 'absent"),
        ("def Net():\n    return 1 / 0", "net.py:2: ZeroDivisionError: division by zero"),
        (
            (
                "from triplane.unified_ir.nn import Cell\n"
                "class Net(Cell):\n    def construct(self, x):\n        return x.head"
            ),
            "net.py:4: AttributeError: 'Tensor' object has no attribute 'head'",
        ),
    ],
)
def test_a_fault_of_the_users_file_names_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], code: str, said: str
) -> None:
    net = tmp_path / "net.py"
    net.write_text(code)
    assert train(tmp_path, cell=f"{net}:Net") == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("digits.py", "FILE.py:Cell"),
        ("nowhere.py:Net", "no file nowhere.py"),
        (f"{CELL}:Letters", "cells there: Digits"),
        (f"{CELL}:ops", "must give an nn.Cell"),
    ],
)
def test_a_wrong_cell_is_named_with_the_way_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cell: str, said: str
) -> None:
    assert train(tmp_path, cell=cell) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "digits.tpm").exists()
