"""`triplane train`: the file it writes, and what it says to wrong calls."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto
from tests.onnx.networks import Writer

from triplane.proto.errors import InvalidInput, Unavailable
from triplane.unified_ir import load, nn
from triplane.unified_ir.cli import training
from triplane.unified_ir.cli.shell import EXIT_CODES, run
from triplane.unified_ir.runtime import available_providers
from triplane.unified_ir.train import TopK
from triplane.unified_ir.train.metrics import BY_NAME

CELL = Path(__file__).resolve().parents[2] / "cloud/demo/digits.py"


@pytest.fixture(autouse=True)
def own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verb puts the folder of the user's file on the path of this process; it ends here."""
    monkeypatch.setattr(sys, "path", [*sys.path])


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


def test_what_a_cell_prints_is_no_part_of_the_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loud = "from triplane.unified_ir import nn\nprint('file')\ndef net():\n    print('net')\n"
    (tmp_path / "loud.py").write_text(
        f"{loud}    return nn.Sequential(nn.Flatten(), nn.Dense(64, 10))\n"
    )
    assert train(tmp_path, "--json", "--batch-size", "512", cell=f"{tmp_path / 'loud.py'}:net") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["validation"]["accuracy"] >= 0
    assert {"file", "net"} <= set(err.split())


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


@pytest.mark.skipif(
    "CUDAExecutionProvider" in available_providers(), reason="this is the build for GPUs"
)
def test_a_gpu_that_is_not_there_is_refused_with_the_packages_that_it_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path, "--device", "cuda") == EXIT_CODES[Unavailable]
    assert "pip uninstall onnxruntime && pip install onnxruntime-gpu" in capsys.readouterr().err
    assert train(tmp_path, "--device", "cuda", "--engine", "xla") == EXIT_CODES[InvalidInput]
    assert "JAX_PLATFORMS" in capsys.readouterr().err


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


EVERYTHING = (
    "--optimizer", "adamw", "--lr", "0.01", "--weight-decay", "0.02", "--schedule",
    "cosine:low=0.001", "--warmup", "5", "--clip", "each:2.0", "--batch-size", "16",
    "--accumulate", "2", "--precision", "float16", "--ema", "0.9", "--metric", "f1", "--metric",
    "accuracy", "--class-weights", ",".join(["1"] * 9 + ["2"]), "--freeze", "conv.bias",
    "--early-stop", "2:validation.f1", "--seed", "3", "--json",
)  # fmt: skip


@pytest.mark.slow
def test_every_flag_is_in_the_run_it_describes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = tmp_path / "logs"
    assert train(tmp_path, *EVERYTHING, "--tensorboard", str(logs)) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["validation"]["f1"] > 0.5
    assert record["updates"] == 45
    said = record["optimizer"]
    for part in (
        "AdamW(lr=Warmup(steps=5, after=Cosine(high=0.01, steps=45, low=0.001))",
        "weight_decay=0.02", "Group('conv.bias', frozen=True)", "clip_each=2.0", "accumulate=2",
        "precision='float16'", "average=0.9",
    ):  # fmt: skip
        assert part in said, part
    (events,) = logs.iterdir()
    assert b"validation/f1" in events.read_bytes()
    module = load(tmp_path / "digits.tpm")
    weight = module.state["conv.weight"].array
    assert (weight == module.state["optimizer.average.conv.weight"].array).all()
    assert "optimizer.average.conv.bias" not in module.state


@pytest.mark.slow
def test_a_folder_of_another_run_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_folder = ("--checkpoint", str(tmp_path / "run"))
    assert train(tmp_path, *run_folder) == 0
    for flags, said in (
        (("--clip", "1"), "another optimizer"),
        (("--batch-size", "8"), "another batch size: 32 there, 8 here"),
        (("--class-weights", ",".join("1234567890")), "another loss"),
        (("--no-resume",), "already holds checkpoints"),
    ):
        assert train(tmp_path, *run_folder, "--epochs", "2", *flags) == 3
        assert said in capsys.readouterr().err


def classifier(path: Path) -> str:
    """One product over the pixels of a digit, as other software writes it."""
    w = Writer()
    flat = w.constant("sizes", np.array([0, -1]))
    w.add("MatMul", w.add("Reshape", "image", flat), w.weight("fc.weight", 64, 10), name="scores")
    shapes = ["N", 1, 8, 8], ["N", 10]
    inputs, outputs = (
        [(n, TensorProto.FLOAT, s)] for n, s in zip(("image", "scores"), shapes, strict=True)
    )
    path.write_bytes(w.model(inputs, outputs).SerializeToString())
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--schedule", "one-cycle", "--optimizer", "sgd")])
def test_a_run_begun_at_another_default_rate_is_refused_with_the_rate_to_give(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...]
) -> None:
    """Before fine-tuning had a default of its own, a model file was trained at 0.002."""
    cell = classifier(tmp_path / "net.onnx")
    begun = (*more, "--checkpoint", str(tmp_path / "run"))
    assert train(tmp_path, *begun, "--lr", "0.002", cell=cell) == 0
    capsys.readouterr()
    assert train(tmp_path, *begun, cell=cell) == 3
    assert (
        "the default of --lr is 0.0002 for a model file, but the checkpoint's run started with "
        "0.002; add --lr 0.002 to continue it" in capsys.readouterr().err
    )
    assert train(tmp_path, *begun, "--lr", "0.002", cell=cell) == 0
    assert train(tmp_path, *begun, "--lr", "0.003", cell=cell) == 3
    assert "default" not in capsys.readouterr().err
    assert train(tmp_path, *begun, "--clip", "1", cell=cell) == 3
    assert "default" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--schedule", "linear"), "--schedule must be one of cosine, polynomial, one-cycle"),
        (("--schedule", "step"), "step needs every, such as step:every=10"),
        (("--schedule", "cosine:high=1"), "cosine has low, got 'high'; write cosine:low=.."),
        (("--schedule", "step:every=x"), "--schedule step every takes a number, got 'x'"),
        (("--schedule", "step:every=1.5"), "must be a whole number of updates, got 1.5"),
        (("--schedule", "step:every=inf"), "must be a whole number of updates, got inf"),
        (("--schedule", "step:every=nan"), "must be a whole number of updates, got nan"),
        (("--schedule", "multi-step:at=5/3"), "increasing bounds >= 1, got [5, 3]"),
        (("--clip", "most:1"), "norm:LIMIT, each:LIMIT, value:LIMIT; got 'most:1'"),
        (("--clip", "0"), "clipped to a limit > 0, got 0.0"),
        (("--early-stop", "soon"), "--early-stop takes a number of epochs"),
        (("--class-weights", "1,-1"), "--class-weights must be finite and >= 0, got 1,-1"),
        (("--freeze", "tail.*"), "group 'tail.*' matches no trained parameter"),
        (("--loss-scale", "8"), "needs precision='float16'"),
    ],
)
def test_a_senseless_flag_is_named_with_the_way_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], said: str
) -> None:
    assert train(tmp_path, *flags) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--heartbeat 5", "--heartbeat belongs to a run of several processes; add --coordinator"),
        ("--meet-within 5", "--meet-within belongs to a run of several processes; add --coord"),
        ("--no-resume", "add --checkpoint FOLDER, or leave it out"),
        ("--local-lr 0.1 --entry predict", "add --entry adapt, or leave it out"),
        ("--restore-best", "--restore-best belongs to --early-stop"),
        ("--processes", "processes=True needs workers=N"),
        ("--loss-scale 8", "a loss scale needs precision='float16' or 'bfloat16'"),
        ("--key-input key --entry loss", "is an input of predict; export that entry"),
        ("--batch-norm updated", "--batch-norm is for model files"),
        ("--class-weights 1,2 --loss mse", "--class-weights are for losses of classes"),
        ("--group y --validation digits", "--group chooses what is held out"),
        ("--devices 2", "--devices belongs to --parallel auto"),
        ("--topology FILE", "--topology gives the rates of --parallel auto, --buckets or --stages"),
        ("--deterministic", "--deterministic belongs to --engine xla"),
        ("--shard *=data", "--mesh, --shard, --parallel, --buckets and --stages are for"),
        ("--microbatches 2", "--mesh, --shard, --parallel, --buckets and --stages are for"),
        ("--steps-per-launch 2", "steps_per_launch=2 needs the engine 'xla'"),
    ],
)
def test_an_option_without_effect_is_refused_with_the_way_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: str, said: str
) -> None:
    assert train(tmp_path, *flags.replace("FILE", __file__).split()) == EXIT_CODES[InvalidInput]
    assert said in capsys.readouterr().err
    assert not (tmp_path / "digits.tpm").exists()


@pytest.mark.parametrize(
    ("text", "rates"),
    [
        ("cosine:low=0.1", {0: 1.0, 50: 0.55, 100: 0.1}),
        ("polynomial:power=2", {0: 1.0, 50: 0.25, 100: 0.0}),
        ("one-cycle:rise=0.5", {0: 0.04, 49: 1.0, 99: 4e-6}),
        ("step:every=10,factor=0.5", {9: 1.0, 10: 0.5, 20: 0.25}),
        ("multi-step:at=3/50", {2: 1.0, 3: 0.1, 50: 0.01}),
        ("exponential:factor=0.5,every=10", {0: 1.0, 10: 0.5, 20: 0.25}),
        ("exponential:factor=0.5", {0: 1.0, 1: 0.5, 2: 0.25}),
        ("restarts:every=10,growth=2", {0: 1.0, 5: 0.5, 10: 1.0, 20: 0.5, 30: 1.0}),
    ],
)
def test_a_schedule_is_read_as_it_is_written(text: str, rates: dict[int, float]) -> None:
    made = training.schedule(text, 1.0, 100)
    assert {t: made.at(t) for t in rates} == pytest.approx(rates, abs=1e-6)


def test_a_metric_is_offered_by_its_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BY_NAME, "top2", {"classes": TopK(2)})
    assert training.metrics(("top2", "accuracy", "top2"), "nll") == {
        "top2": TopK(2), "accuracy": nn.accuracy,
    }  # fmt: skip
    losses = {targets: name for name, (_, targets) in training.LOSSES.items()}
    for name, row in BY_NAME.items():
        for targets in row:
            assert list(training.metrics((name,), losses[targets]) or ()) == [name]


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
        (f"{CELL}:Letters", "cells and functions there: Digits"),
        (f"{CELL}:ops", "must return an nn.Cell"),
    ],
)
def test_a_wrong_cell_is_named_with_the_way_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cell: str, said: str
) -> None:
    assert train(tmp_path, cell=cell) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "digits.tpm").exists()


def test_a_rate_that_is_no_number_is_refused_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path, "--local-lr", "nan") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--local-lr must be a finite number > 0, got nan" in line


@pytest.mark.slow
def test_a_checkpoint_beyond_the_epochs_asked_for_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ("--checkpoint", str(tmp_path / "run"))
    assert train(tmp_path, "--epochs", "2", *folder) == 0
    capsys.readouterr()
    assert train(tmp_path, "--epochs", "1", *folder) == 0
    assert "is already at epoch 2, beyond --epochs 1" in capsys.readouterr().err


def test_what_is_no_cell_is_named_by_its_type(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "made_of_numbers.py"
    file.write_text("A = 3\n")
    assert train(tmp_path, cell=f"{file}:A") == 2
    assert "made_of_numbers.py:A returns an object of type int; it must return an nn.Cell" in (
        capsys.readouterr().err
    )


UNREADABLE = """
from triplane.cloud.demo.digits import Digits
from triplane.unified_ir.ir import TensorSpec
from triplane.unified_ir.ir.graph import Function, Node, OpId, Value
from triplane.unified_ir.ir.module import Module
from triplane.unified_ir.train import Trainer


def falsely_claimed(self, entries, **more):
    x, y = Value(TensorSpec(("N", 3)), "x"), Value(TensorSpec(("N", 4)))
    node = Node(OpId("", "Relu", 14), (x,), (y,))
    return Module({"f": Function("f", (x,), (y,), ("y",), (node,))}, {"predict": "f"}, {})


Trainer.export = falsely_claimed
"""


@pytest.mark.slow
def test_a_file_that_cannot_be_read_again_is_not_a_success(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(UNREADABLE)
    argv = ["train", "net.py:Digits", "--data", "digits", "--epochs", "1", "--out", "m.tpm"]
    command = [str(Path(sys.executable).with_name("triplane")), *argv]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 5, done.stderr
    assert "m.tpm cannot be read back" in done.stderr
    assert not (tmp_path / "m.tpm").exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model.onnx", "a model file is written, not an ONNX model.*--out .*model.tpm"),
        ("model.bundle", "a model file is written.*`triplane convert`"),
        ("model.npz", "--out .*model.tpm"),
    ],
)
def test_a_suffix_of_another_kind_of_file_is_refused_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, words: str
) -> None:
    out = tmp_path / name
    assert run(["train", f"{CELL}:Digits", "--data", "digits", "--out", str(out)]) == 2
    assert re.search(words, capsys.readouterr().err)
    assert not out.exists()


def test_samples_of_three_axes_keep_them_and_the_error_names_the_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    data = tmp_path / "ncl.npz"
    np.savez(data, x=rng.random((60, 8, 8), "f4"), y=rng.integers(0, 3, 60))
    assert train(tmp_path, "--data", str(data)) == 2
    assert "another shape is chosen as in --x 'x:1x8x8'" in capsys.readouterr().err
    assert train(tmp_path, "--data", str(data), "--x", "x:1x8x8") == 0
