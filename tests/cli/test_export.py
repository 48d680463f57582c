"""`triplane export`: a function of a model file as an ONNX file."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from triplane.unified_ir import data, load, nn, optim, train
from triplane.unified_ir.cli import shell

VERBS = {"export": EntryPoint("export", "triplane.unified_ir.cli.export:command", shell.VERB_GROUP)}


@pytest.fixture(scope="module")
def digits_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    net = nn.Sequential(nn.Flatten(), nn.Dense(64, 10))
    trainer = train.Trainer(net, loss=nn.SoftmaxCrossEntropy(), optimizer=optim.Adam(0.01))
    trainer.fit(data.digits().take(320), 1, progress="none")
    path = tmp_path_factory.mktemp("model") / "digits.tpm"
    trainer.export(("predict", "train_step")).save(path)
    return path


@pytest.fixture(autouse=True)
def verbs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "_entry_points", lambda: VERBS)


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    code = shell.run(["export", *map(str, argv)])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_the_file_answers_like_the_model_file(
    digits_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "digits.onnx"
    code, text, error = run(capsys, digits_model, out)
    assert code == 0, error
    assert f"{out.stat().st_size:,} bytes, predict in opset 21" in text
    assert "in   x: float32(N, 1, 8, 8)" in text
    x = np.asarray(data.digits().x[:7])
    (y,) = ort.InferenceSession(out).run(None, {"x": x})
    np.testing.assert_allclose(y, load(digits_model).predict(x), rtol=1e-5, atol=1e-5)


def test_json_names_state_and_sizes(
    digits_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = (digits_model, tmp_path / "s.onnx", "--entry", "train_step", "--batch", 4, "--json")
    code, text, error = run(capsys, *argv)
    assert code == 0, error
    record = json.loads(text)
    assert record["entry"] == "train_step"
    assert record["inputs"][0] == "x: float32(4, 1, 8, 8)"
    assert "1.weight" in record["state"]
    assert record["data"] is None
    assert record["bytes"] == (tmp_path / "s.onnx").stat().st_size


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("m.onnx", "--entry", "serve"), "no entry 'serve'; the module has predict, train_step"),
        (("m.tpm",), "an ONNX file is called NAME.onnx, got m.tpm"),
        (("m.onnx", "--opset", "11"), "11 is not in the range 17<=x<=26"),
        (("none/m.onnx",), "does not exist; create it"),
    ],
)
def test_a_wrong_call_is_refused_and_nothing_written(
    digits_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    argv: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, error = run(capsys, digits_model, *argv)
    assert code == 2
    assert message in error
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_no_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.tpm").write_bytes(b"no model")
    code, _, error = run(capsys, tmp_path / "x.tpm", tmp_path / "x.onnx")
    assert code == 2
    assert "is not a model file" in error
