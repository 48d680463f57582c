"""`triplane evaluate`: measures over all samples, for model files, ONNX models and bundles."""

from __future__ import annotations

import csv
import json
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from triplane.unified_ir import convert, data, export_onnx, load, nn, optim, train
from triplane.unified_ir.cli import evaluation, shell

VERBS = {
    "evaluate": EntryPoint("evaluate", "triplane.unified_ir.cli.evaluate:command", shell.VERB_GROUP)
}
NAMES = ("ant", "bee", "cat", "dog")


@pytest.fixture(autouse=True)
def verbs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "_entry_points", lambda: VERBS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network for digits as model file, ONNX model with a fixed batch, and bundle."""
    path = tmp_path_factory.mktemp("models")
    net = nn.Sequential(nn.Flatten(), nn.Dense(64, 10))
    trainer = train.Trainer(net, loss=nn.SoftmaxCrossEntropy(), optimizer=optim.Adam(0.01))
    trainer.fit(data.digits().take(320), 2, progress="none")
    module = trainer.export(("predict", "evaluate"))
    module.save(path / "digits.tpm")
    export_onnx(module, path / "digits.onnx")
    export_onnx(module, path / "seven.onnx", batch=7)
    convert.convert(module, out=path / "digits.bundle")
    return path


@pytest.fixture(scope="module")
def species(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network with named classes, and without an entry evaluate."""
    path = tmp_path_factory.mktemp("named") / "species.tpm"
    nn.seed(4)
    trainer = train.Trainer(
        nn.Dense(2, 4), loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.1), labels=NAMES
    )
    trainer.prepare(np.zeros((1, 2), np.float32), np.zeros(1, np.int64))
    trainer.export(("predict",)).save(path)
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


def confusion(y: np.ndarray, scores: np.ndarray) -> np.ndarray:
    counts = np.zeros((scores.shape[1],) * 2, int)
    np.add.at(counts, (y, scores.argmax(1)), 1)
    return counts


def oracle(y: np.ndarray, scores: np.ndarray) -> dict[str, float]:
    """Return the measures of classes with numpy alone."""
    counts = confusion(y, scores)
    hits, predicted, true = np.diag(counts), counts.sum(0), counts.sum(1)
    occurs = predicted + true > 0
    best = np.argsort(-scores, axis=1, kind="stable")[:, :5]
    return {
        "accuracy": float(hits.sum() / counts.sum()),
        "precision": float((hits / np.maximum(predicted, 1))[occurs].mean()),
        "recall": float((hits / np.maximum(true, 1))[occurs].mean()),
        "f1": float((2 * hits / np.maximum(predicted + true, 1))[occurs].mean()),
        "top5": float((best == y[:, None]).any(1).mean()),
    }


@pytest.mark.parametrize("name", ["digits.tpm", "digits.onnx", "digits.bundle", "seven.onnx"])
def test_measures_are_those_that_numpy_computes(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    x, y = np.asarray(data.digits().x), np.asarray(data.digits().y)
    scores = load(folder / "digits.tpm").predict(x)
    assert isinstance(scores, np.ndarray)
    result = record(capsys, folder / name, "--data", "digits", "--batch-size", "100")
    assert result["samples"] == 1797
    assert result["confusion"] == confusion(y, scores).tolist()
    wanted = oracle(y, scores)
    if name == "digits.tpm":
        shifted = scores - scores.max(1, keepdims=True)
        losses = np.log(np.exp(shifted).sum(1)) - shifted[np.arange(len(y)), y]
        wanted["loss"] = float(losses.mean())
    assert result["measures"] == pytest.approx(wanted, rel=1e-4)
    rows = result["per_class"]
    assert [row["samples"] for row in rows] == np.bincount(y).tolist()
    assert np.mean([row["f1"] for row in rows]) == pytest.approx(wanted["f1"])


def test_the_text_has_a_line_for_each_measure_and_class(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--metric", "accuracy", "--per-class")
    code, out, error = run(capsys, folder / "digits.tpm", "--data", "digits", *flags)
    assert code == 0, error
    lines = out.splitlines()
    assert lines[0].endswith("on digits: 1,797 samples")
    assert [line.split()[0] for line in lines[1:3]] == ["loss", "accuracy"]
    assert lines[3] == ""
    assert lines[4].split() == ["class", "precision", "recall", "f1", "samples"]
    assert [line.split()[0] for line in lines[5:]] == [str(k) for k in range(10)]


def test_classes_are_compared_by_name(
    species: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file has two of the four classes, which it would number 0 and 1 itself."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((50, 2)).astype(np.float32)
    names = rng.choice(["bee", "dog"], 50)
    path = tmp_path / "s.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["a", "b", "species"])
        writer.writerows((*map(str, row), name) for row, name in zip(x, names, strict=True))
    flags = ("--data", path, "--x", "a,b", "--y", "species")
    result = record(capsys, species, *flags)
    scores = load(species).predict(x)
    assert isinstance(scores, np.ndarray)
    y = np.array([NAMES.index(name) for name in names])
    assert result["classes"] == list(NAMES)
    assert result["confusion"] == confusion(y, scores).tolist()
    assert "loss" not in result["measures"]
    assert "top5" not in result["measures"]


def test_a_class_that_the_model_lacks_is_refused_by_name(
    species: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "s.csv").write_text("a,b,y\n1.5,2.5,bee\n1.5,2.5,elk\n")
    code, _, error = run(capsys, species, "--data", tmp_path / "s.csv", "--x", "a,b")
    assert code == 2
    assert "has the class 'elk', but the model's classes are ant, bee, cat, dog" in error


def test_names_that_the_model_does_not_have_are_numbered_and_noted(
    species: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = load(species)
    bare = type(module)(module.functions, module.entries, module.state)
    export_onnx(bare, tmp_path / "bare.onnx")
    (tmp_path / "s.csv").write_text("a,b,y\n1.5,2.5,bee\n1.5,2.5,elk\n")
    flags = ("--data", tmp_path / "s.csv", "--x", "a,b")
    code, _, error = run(capsys, tmp_path / "bare.onnx", *flags)
    assert code == 0
    assert "the model has no names of classes" in error


def regression(tmp_path: Path, loss: nn.Loss) -> tuple[Path, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((90, 3)).astype(np.float32)
    y = (rng.random((90, 1)) < 0.5).astype(np.float32)
    trainer = train.Trainer(nn.Dense(3, 1), loss=loss, optimizer=optim.SGD(0.1))
    trainer.prepare(x, y)
    trainer.export(("predict", "evaluate")).save(tmp_path / "m.tpm")
    np.savez(tmp_path / "d.npz", x=x, y=y)
    predicted = trainer.predict(x)
    return tmp_path / "m.tpm", y, predicted


def test_numbers_are_measured_as_numpy_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, t, y = regression(tmp_path, nn.MSE())
    flags = ("--data", tmp_path / "d.npz", "--batch-size", 13)
    measures = record(capsys, model, *flags)["measures"]
    squares = ((y - t) ** 2).mean()
    assert measures == pytest.approx(
        {
            "loss": squares,
            "mae": np.abs(y - t).mean(),
            "rmse": squares**0.5,
            "r2": 1 - squares / t.var(),
        },
        rel=1e-4,
    )


def test_shares_are_compared_on_the_side_of_a_half(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, t, y = regression(tmp_path, nn.BinaryCrossEntropy())
    export_onnx(load(model), tmp_path / "m.onnx")
    for path in (model, tmp_path / "m.onnx"):
        result = record(capsys, path, "--data", tmp_path / "d.npz", "--metric", "accuracy")
        assert result["measures"]["accuracy"] == pytest.approx(((y > 0) == (t > 0.5)).mean())
        assert np.sum(result["confusion"]) == 90


def test_a_target_without_an_axis_is_refused_with_the_option_that_adds_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, t, _ = regression(tmp_path, nn.MSE())
    np.savez(tmp_path / "d.npz", x=np.zeros((90, 3), np.float32), y=t[:, 0])
    code, _, error = run(capsys, model, "--data", tmp_path / "d.npz", "--metric", "mae")
    assert code == 2
    assert "--y 'y:1'" in error


def test_a_label_beyond_the_classes_is_refused_with_its_sample(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    y = np.zeros(20, np.int64)
    y[17] = 12
    np.savez(tmp_path / "d.npz", x=np.zeros((20, 1, 8, 8), np.float32), y=y)
    flags = ("--data", tmp_path / "d.npz", "--batch-size", "6")
    for name in ("digits.tpm", "digits.onnx"):
        code, _, error = run(capsys, folder / name, *flags)
        assert code == 2
        assert "labels are 0..9, got 0..12" in error
        assert "12, sample 17 of the data" in error


def test_the_held_out_part_is_read(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x, y = np.zeros((9, 1, 8, 8), np.float32), np.zeros(9, np.int64)
    np.savez(tmp_path / "d.npz", x_train=x, y_train=y, x_test=x[:4], y_test=y[:4])
    assert record(capsys, folder / "digits.tpm", "--data", tmp_path / "d.npz")["samples"] == 4


@pytest.mark.parametrize(
    ("arrays", "flags", "message"),
    [
        ({"x": np.zeros((4, 1, 8, 8), np.float32)}, (), "has no target to compare with"),
        (
            {"x": np.zeros((4, 64), np.float32), "y": np.zeros(4, np.int64)},
            (),
            "takes x: float32(N, 1, 8, 8), but the data gives, for each sample: x float32[64]",
        ),
        (
            {"x": np.zeros((4, 2, 32), np.float32), "y": np.zeros(4, np.int64)},
            (),
            "x float32[2, 32], y int64; another shape is chosen as in --x 'x:1x8x8'",
        ),
        (
            {"x": np.zeros((4, 8, 8, 1), np.float32), "y": np.zeros(4, np.int64)},
            (),
            "y int64; its channels are the last axis and must be the first one of each sample",
        ),
        (
            {"x": np.zeros((4, 1, 9, 9), np.float32), "y": np.zeros(4, np.int64)},
            (),
            "x float32[1, 9, 9], y int64; images of a folder are resized by --size 8x8",
        ),
        (
            {"x": np.zeros((4, 1, 8, 8), np.float32), "y": np.zeros(4, np.int64)},
            ("--metric", "mae"),
            "--metric mae does not measure classes, as y does of this model",
        ),
        (
            {"x": np.zeros((4, 3), np.float32), "z": np.zeros(4), "y": np.zeros(4, np.int64)},
            ("--x", "x", "--x", "z"),
            "the model takes x, but the data has the inputs x, z",
        ),
    ],
)
def test_data_that_does_not_fit_is_refused(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arrays: dict[str, np.ndarray],
    flags: tuple[str, ...],
    message: str,
) -> None:
    np.savez(tmp_path / "d.npz", **arrays)  # type: ignore[arg-type]  # typeshed's allow_pickle
    code, _, error = run(capsys, folder / "digits.onnx", "--data", tmp_path / "d.npz", *flags)
    assert code == 2
    assert message in error


def test_many_classes_have_no_matrix(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(evaluation, "MAX_CLASSES", 9)
    result = record(capsys, folder / "digits.onnx", "--data", "digits")
    assert set(result["measures"]) == {"accuracy", "top5"}
    assert "confusion" not in result
    flags = ("--data", "digits", "--metric", "f1")
    code, _, error = run(capsys, folder / "digits.onnx", *flags)
    assert code == 2
    assert "at most 9 classes, the model has 10" in error


def test_a_file_that_is_no_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, code in (("m.tpm", 2), ("m.onnx", 5), ("m.bundle", 5)):
        (tmp_path / name).write_bytes(b"no model")
        assert run(capsys, tmp_path / name, "--data", "digits")[0] == code
        assert run(capsys, tmp_path / "absent" / name, "--data", "digits")[0] == 2


def test_every_character_of_a_text_is_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Next(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(32, 8), nn.Dense(8, 32)

        def construct(self, token: Any) -> Any:
            return self.head(self.embed(token))

    (tmp_path / "t.txt").write_text("the quick brown fox jumps over the lazy dog. " * 20)
    text = data.load(tmp_path / "t.txt", window=10)
    trainer = train.Trainer(Next(), loss=nn.SoftmaxCrossEntropy(), optimizer=optim.Adam(0.1))
    trainer.fit(text, 2, progress="none")
    trainer.export(("predict", "evaluate")).save(tmp_path / "m.tpm")
    flags = ("--data", tmp_path / "t.txt", "--window", 10, "--metric", "perplexity")
    measures = record(capsys, tmp_path / "m.tpm", *flags, "--batch-size", 7)["measures"]
    assert measures == pytest.approx(
        {"loss": trainer.evaluate(text)["loss"], "perplexity": np.exp(measures["loss"])}, rel=1e-4
    )
    # A text of fewer characters numbers them otherwise; the model's numbers count.
    (tmp_path / "u.txt").write_text("lazy fox lazy fox lazy")
    codes = np.array([text.labels.index(c) for c in "lazy fox lazy fox lazy"])
    rows = np.stack([codes[k : k + 11] for k in (0, 10)])
    wanted = trainer.evaluate((rows[:, :-1], rows[:, 1:]))["loss"]
    other = ("--data", tmp_path / "u.txt", "--window", 10)
    measures = record(capsys, tmp_path / "m.tpm", *other)["measures"]
    assert measures["loss"] == pytest.approx(wanted, rel=1e-4)


def test_several_targets_are_compared_by_the_entry_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def both(y: Any, targets: Any) -> Any:
        first, second = targets
        return ((y - first) ** 2).mean() + ((y - second) ** 2).mean()

    rng = np.random.default_rng(2)
    x, a, b = (rng.standard_normal((30, n)).astype(np.float32) for n in (3, 1, 1))
    trainer = train.Trainer(nn.Dense(3, 1), loss=both, optimizer=optim.SGD(0.1))
    samples = data.arrays({"x": x, "a": a, "b": b}).roles("x", ("a", "b"))
    trainer.fit(samples, 1, progress="none")
    trainer.export(("predict", "evaluate")).save(tmp_path / "m.tpm")
    np.savez(tmp_path / "d.npz", x=x, a=a, b=b)
    flags = ("--data", tmp_path / "d.npz", "--y", "a", "--y", "b", "--batch-size", 7)
    y = trainer.predict(x)
    wanted = ((y - a) ** 2).mean() + ((y - b) ** 2).mean()
    result = record(capsys, tmp_path / "m.tpm", *flags)
    assert result["measures"] == {"loss": pytest.approx(wanted, rel=1e-4)}
    code, _, error = run(capsys, tmp_path / "m.tpm", *flags[:4])
    assert code == 2
    assert "the data has the targets a; choose columns: one --y for each" in error


def odd_model(path: Path, outputs: list[Any], sizes: list[Any]) -> Path:
    """An ONNX model that returns the best class, then its input as scores; or less of that."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, sizes)
    nodes = [
        helper.make_node("ArgMax", ["x"], ["best"], axis=1, keepdims=0),
        helper.make_node("Softmax", ["x"], ["shares"], axis=1),
    ]
    graph = helper.make_graph(nodes, "odd", [x], outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    onnx.save(model, path)
    return path


def test_scores_are_found_behind_another_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best = helper.make_tensor_value_info("best", TensorProto.INT64, ["N"])
    shares = helper.make_tensor_value_info("shares", TensorProto.FLOAT, ["N", 3])
    model = odd_model(tmp_path / "m.onnx", [best, shares], ["N", 3])
    x = np.eye(3, dtype=np.float32)[[0, 1, 2, 2]]
    np.savez(tmp_path / "d.npz", x=x, y=np.array([0, 1, 2, 0]))
    result = record(capsys, model, "--data", tmp_path / "d.npz")
    assert result["measures"]["accuracy"] == 0.75
    assert result["confusion"] == [[1, 0, 1], [0, 1, 0], [0, 0, 1]]


def test_models_that_cannot_answer_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best = helper.make_tensor_value_info("best", TensorProto.INT64, ["N"])
    np.savez(tmp_path / "d.npz", x=np.eye(3, dtype=np.float32), y=np.array([0, 1, 2]))
    cases: list[tuple[list[Any], list[Any], str]] = [
        ([], ["N", 3], "the model has no outputs"),
        ([best], [0, 3], "the model takes batches without samples"),
        ([best], ["N", 3], "the output 'best' is int64[3] for a target of int64[3]"),
    ]
    for outputs, sizes, message in cases:
        model = odd_model(tmp_path / "m.onnx", outputs, sizes)
        code, _, error = run(capsys, model, "--data", tmp_path / "d.npz")
        assert code == 2
        assert message in error
