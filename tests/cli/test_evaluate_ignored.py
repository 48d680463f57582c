"""`triplane evaluate` where labels weigh or are ignored: no result depends on the batch size."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from triplane.unified_ir import convert, export_onnx, nn, optim, train
from triplane.unified_ir.cli import shell

IGNORED = -100
RNG = np.random.default_rng(0)
X = RNG.standard_normal((40, 4)).astype(np.float32)
Y = RNG.integers(0, 3, 40)
Y[:17] = IGNORED
WEIGHT = np.array([0.25, 3.0, 1.5])
VERBS = {
    "evaluate": EntryPoint("evaluate", "triplane.unified_ir.cli.evaluate:command", shell.VERB_GROUP)
}


@pytest.fixture(autouse=True)
def verbs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "_entry_points", lambda: VERBS)


@pytest.fixture(scope="module")
def trainer() -> train.Trainer:
    nn.seed(3)
    loss = nn.SoftmaxCrossEntropy(weight=WEIGHT, ignore_index=IGNORED)
    trainer = train.Trainer(nn.Dense(4, 3), loss=loss, optimizer=optim.SGD(0.1))
    trainer.prepare(X, Y)
    return trainer


@pytest.fixture(scope="module")
def folder(trainer: train.Trainer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ignored")
    module = trainer.export(("predict", "evaluate"))
    module.save(path / "m.tpm")
    export_onnx(module, path / "m.onnx")
    convert.convert(module, out=path / "m.bundle")
    np.savez(path / "d.npz", x=X, y=Y)
    return path


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    code = shell.run(["evaluate", *map(str, argv)])
    out = capsys.readouterr()
    return code, out.out, out.err


def record(capsys: pytest.CaptureFixture[str], *argv: object) -> dict[str, Any]:
    code, out, error = run(capsys, *argv, "--json")
    assert code == 0, error
    result: dict[str, Any] = json.loads(out)
    return result


@pytest.mark.parametrize("size", [40, 9, 4, 1])
@pytest.mark.parametrize(
    ("name", "flags"),
    [("m.tpm", ()), ("m.onnx", ()), ("m.bundle", ("--ignore-index", IGNORED))],
)
def test_ignored_labels_count_in_no_measure_whatever_the_size_of_batches(
    folder: Path,
    trainer: train.Trainer,
    capsys: pytest.CaptureFixture[str],
    name: str,
    flags: tuple[object, ...],
    size: int,
) -> None:
    scores = trainer.predict(X).astype(np.float64)
    kept = Y != IGNORED
    confusion = np.zeros((3, 3), int)
    np.add.at(confusion, (Y[kept], scores.argmax(1)[kept]), 1)
    result = record(capsys, folder / name, "--data", folder / "d.npz", "--batch-size", size, *flags)
    assert result["confusion"] == confusion.tolist()
    wanted = {"accuracy": (scores.argmax(1) == Y)[kept].mean()}
    if name == "m.tpm":
        log_p = scores - np.log(np.exp(scores).sum(1, keepdims=True))
        w = WEIGHT[Y[kept]]
        wanted["loss"] = -(w * log_p[kept][np.arange(kept.sum()), Y[kept]]).sum() / w.sum()
    assert {k: result["measures"][k] for k in wanted} == pytest.approx(wanted, rel=1e-5)


def test_a_label_out_of_range_names_the_option_and_data_without_labels_that_count_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, error = run(capsys, folder / "m.bundle", "--data", folder / "d.npz")
    assert code == 2
    assert "got -100..2" in error
    assert "--ignore-index leaves one label out" in error
    np.savez(tmp_path / "d.npz", x=X[:4], y=Y[:4])
    for name, message in (("m.tpm", "no label of this data counts"), ("m.onnx", "every label of")):
        code, _, error = run(capsys, folder / name, "--data", tmp_path / "d.npz")
        assert code == 2
        assert message in error


def test_another_ignored_label_than_that_of_training_leaves_out_the_loss_of_training(
    folder: Path, trainer: train.Trainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "d.npz", x=X[17:], y=Y[17:])
    flags = ("--data", tmp_path / "d.npz", "--ignore-index", 2, "--metric", "accuracy")
    code, out, error = run(capsys, folder / "m.tpm", *flags, "--json")
    assert code == 0
    kept = Y[17:] != 2
    hits = trainer.predict(X[17:]).argmax(1) == Y[17:]
    assert json.loads(out)["measures"] == pytest.approx({"accuracy": hits[kept].mean()})
    assert "the loss of training counts the label 2, so it is not measured" in error
