"""`--cell-args`, `--restore-best` and `--schedule plateau` of `triplane train`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import load, nn
from triplane.unified_ir.cli import cell_arguments
from triplane.unified_ir.cli.shell import run
from triplane.unified_ir.cli.train import load_cell

NET = """
from typing import Literal

from triplane.unified_ir import nn, ops


class Net(nn.Cell):
    def __init__(self, width: int, scale: "float | None" = None, *, norm="batch", bias=True):
        super().__init__()
        self.width, self.scale, self.norm = width, scale, norm
        self.body = nn.Dense(64, width, bias=bias)
        self.head = nn.Dense(width, 10)

    def construct(self, x):
        return self.head(ops.relu(self.body(x.reshape((-1, 64)))))


def make(sizes, **more):
    return Net(sizes[0], **more)


def plain(depth: "NoSuchType" = 1, name: str = "x"):
    return Net(depth)


def chosen(norm: Literal["batch", "layer"], depth: Literal[16, 32] | None = None):
    return Net(depth or 16, norm=norm)


ready = Net(4)
"""


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = tmp_path / "net.py"
    path.write_text(NET)
    return path


# fmt: off
GOOD: dict[str, dict[str, object]] = {
    "Net width=16": {"width": 16}, "Net width=16,scale=2": {"scale": 2.0},
    "Net width=16,norm=8,bias=false": {"norm": "8"},
    "Net width=16,scale=none": {"scale": None},
    'Net {"width": 16, "scale": 1}': {"scale": 1.0},
    'make {"sizes": [16], "norm": "layer"}': {"norm": "layer"},
    "plain depth=16": {"norm": "batch"},
    "chosen norm=layer,depth=16": {"norm": "layer"},
    "chosen norm=layer,depth=none": {"norm": "layer"},
}
BAD = {
    "Net -": r"needs the arguments width; add --cell-args width=\.\.\.",
    "make -": r"needs the arguments sizes",
    "Net widht=3": r"no argument 'widht'; it takes width, scale, norm, bias; did you mean 'width'",
    "chosen norm=bach": r"norm must be one of 'batch', 'layer', got 'bach'; did you mean 'batch'",
    "chosen norm=batch,depth=8": r"depth must be one of 16, 32, got 8",
    "Net width=8,width=16": r"--cell-args has 'width' 2 times; state it once",
    'Net {"width": 8, "width": 16}': r"--cell-args has 'width' 2 times",
    "Net width=many": r"width must be a whole number, got 'many'",
    "Net width=2.5": r"width must be a whole number, got 2.5",
    'Net {"width": true}': r"width must be a whole number, got True",
    "Net width=16,bias=3": r"bias must be true or false, got 3",
    "Net width=16,norm": r"--cell-args is NAME=VALUE",
    'Net {"width": 3': r"no JSON object",
    "ready width=3": r"exists already",
    "plain name=3,depht=2": r"did you mean 'depth'",
}
# fmt: on


@pytest.mark.parametrize("call", GOOD)
def test_arguments_reach_the_constructor_in_their_types(net: Path, call: str) -> None:
    name, _, text = call.partition(" ")
    cell: Any = load_cell(f"{net}:{name}", arguments=text)
    assert cell.body.weight.type.shape == (16, 64)
    for key, value in GOOD[call].items():
        assert (type(getattr(cell, key)), getattr(cell, key)) == (type(value), value)


@pytest.mark.parametrize("call", BAD)
def test_arguments_that_do_not_fit_are_refused_by_name(net: Path, call: str) -> None:
    name, _, text = call.partition(" ")
    with pytest.raises(InvalidInput, match=BAD[call]):
        load_cell(f"{net}:{name}", arguments=None if text == "-" else text)


def test_a_cell_that_exists_in_the_file_is_taken_as_it_is(net: Path) -> None:
    assert isinstance(load_cell(f"{net}:ready"), nn.Cell)
    with pytest.raises(InvalidInput, match="zoo:resnet8,channels=1"):
        load_cell("zoo:lenet", arguments="width=3")


def test_deep_json_is_refused(net: Path) -> None:
    with pytest.raises(InvalidInput, match="no JSON object"):
        cell_arguments.parsed('{"a":' * 100_000)


def train(net: Path, *more: str) -> int:
    out = net.with_name("net.tpm")
    return run(["train", f"{net}:Net", "--data", "digits", "--out", str(out), "--json", *more])


def test_the_verb_trains_a_cell_with_arguments(
    net: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(net, "--cell-args", "width=8", "--epochs", "1") == 0
    assert load(net.with_name("net.tpm")).state["body.weight"].array.shape == (8, 64)
    capsys.readouterr()
    assert train(net) == 2
    assert "add --cell-args width=..." in json.loads(capsys.readouterr().out)["error"]["message"]


def test_the_verb_writes_the_weights_of_the_best_epoch(
    net: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    history = net.with_name("history.json")
    options = ("--cell-args", "width=8", "--epochs", "9", "--lr", "0.5", "--history", str(history))
    assert train(net, *options, "--early-stop", "1", "--restore-best") == 0
    record = json.loads(capsys.readouterr().out)
    losses = [row["validation.loss"] for row in json.loads(history.read_text())]
    assert losses[-1] > min(losses)
    assert record["validation"]["loss"] == pytest.approx(min(losses), rel=1e-5)
    assert train(net, "--cell-args", "width=8", "--restore-best") == 2
    assert "belongs to --early-stop" in capsys.readouterr().out


def test_the_verb_lowers_the_rate_on_a_plateau(
    net: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--cell-args", "width=8", "--epochs", "6", "--lr", "2.0", "--batch-size", "256")
    assert train(net, *options, "--schedule", "plateau:patience=0,factor=0.5") == 0
    assert "ReduceOnPlateau" in json.loads(capsys.readouterr().out)["optimizer"]
    state = load(net.with_name("net.tpm")).state
    assert state["optimizer.plateau"].array < 2.0


def test_the_verb_exports_a_fixed_batch_that_evaluates_whatever_the_size_of_the_data(
    net: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(net, "--cell-args", "width=8", "--epochs", "1", "--fixed-batch", "7") == 0
    path = net.with_name("net.tpm")
    assert load(path).inputs("predict")[0].type.shape == (7, 1, 8, 8)
    assert run(["evaluate", str(path), "--data", "digits"]) == 0
    capsys.readouterr()
    assert run(["convert", str(path), "--calibrate", "digits"]) == 2
    assert "in whole batches of 7" in capsys.readouterr().err
