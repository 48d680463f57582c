"""`triplane predict`: answers printed or in a file that is read back."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from onnx import TensorProto, helper
from PIL import Image

from triplane.unified_ir import convert, data, export_onnx, load, nn, optim, train
from triplane.unified_ir.cli import answers, predict, shell
from triplane.unified_ir.files.npz import opened_npz

VERBS = {
    "predict": EntryPoint("predict", "triplane.unified_ir.cli.predict:command", shell.VERB_GROUP)
}
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@pytest.fixture(autouse=True)
def verbs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "_entry_points", lambda: VERBS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network for digits with named classes, in three kinds of files."""
    path = tmp_path_factory.mktemp("models")
    net = nn.Sequential(nn.Flatten(), nn.Dense(64, 10))
    trainer = train.Trainer(
        net, loss=nn.SoftmaxCrossEntropy(), optimizer=optim.Adam(0.01), labels=NAMES
    )
    trainer.fit(data.digits().take(640), 3, progress="none")
    module = trainer.export(("predict",))
    module.save(path / "digits.tpm")
    export_onnx(module, path / "digits.onnx", batch=7)
    convert.convert(module, out=path / "digits.bundle")
    return path


@pytest.fixture(scope="module")
def scores(folder: Path) -> np.ndarray:
    y: np.ndarray = load(folder / "digits.tpm").predict(np.asarray(data.digits().x))
    return y


def softmax(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores.astype(np.float64))
    shares: np.ndarray = powers / powers.sum(1, keepdims=True)
    return shares


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    code = shell.run(["predict", *map(str, argv)])
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.mark.parametrize("name", ["digits.tpm", "digits.onnx", "digits.bundle"])
def test_arrays_hold_every_output_in_the_order_of_the_samples(
    folder: Path, scores: np.ndarray, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    out = tmp_path / "y.npz"
    code, text, error = run(capsys, folder / name, "digits", "--out", out, "--batch-size", 100)
    assert code == 0, error
    assert f"{out}: 1,797 samples, {out.stat().st_size:,} bytes" in text
    with np.load(out) as arrays:
        assert arrays.files == ["logits"]
        np.testing.assert_allclose(arrays["logits"], scores, rtol=1e-4, atol=1e-5)
    with opened_npz(out) as npz:
        assert npz.names == ("logits",)


def test_a_table_has_the_class_and_its_probability(
    folder: Path, scores: np.ndarray, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "y.csv"
    assert run(capsys, folder / "digits.tpm", "digits", "--out", out)[0] == 0
    with out.open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["class", "score"]
    assert [row[0] for row in rows] == [NAMES[k] for k in scores.argmax(1)]
    np.testing.assert_allclose([float(r[1]) for r in rows], softmax(scores).max(1), rtol=1e-5)


def test_json_has_classes_and_outputs(
    folder: Path, scores: np.ndarray, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "y.json"
    code, text, _ = run(capsys, folder / "digits.tpm", "digits", "--out", out, "--json")
    assert code == 0
    assert json.loads(text)["outputs"] == {"logits": "float32[1797, 10]"}
    record = json.loads(out.read_bytes())
    assert record["samples"] == 1797
    assert record["class"] == [NAMES[k] for k in scores.argmax(1)]
    np.testing.assert_array_equal(np.array(record["outputs"]["logits"], np.float32), scores)


def test_without_a_file_the_first_answers_are_printed(
    folder: Path, scores: np.ndarray, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text, _ = run(capsys, folder / "digits.tpm", "digits")
    assert code == 0
    lines = text.splitlines()
    assert len(lines) == 10
    best = softmax(scores[:1])[0]
    first = ", ".join(f"{NAMES[k]} {best[k]:.3f}" for k in np.argsort(-best)[:3])
    assert lines[0] == f"0: {first}"
    code, text, _ = run(capsys, folder / "digits.tpm", "digits", "--json")
    record = json.loads(text)
    assert record["samples"] == 10
    assert record["answers"][0]["top"][0]["class"] == NAMES[int(best.argmax())]


@pytest.mark.parametrize("kind", ["png", "jpg", "rgb.png", "large.png"])
def test_an_image_gets_the_channels_and_size_of_the_model(
    folder: Path, scores: np.ndarray, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    k = int(softmax(scores).max(1).argmax())  # the clearest digit
    pixels = np.rint(np.asarray(data.digits().x)[k, 0] * 255).astype(np.uint8)
    image = Image.fromarray(pixels)
    image = image.convert("RGB") if "rgb" in kind else image
    image = image.resize((64, 64), Image.Resampling.NEAREST) if "large" in kind else image
    image.save(tmp_path / f"digit.{kind}")
    code, text, error = run(capsys, folder / "digits.tpm", tmp_path / f"digit.{kind}")
    assert code == 0, error
    assert text.startswith(f"0: {NAMES[int(scores[k].argmax())]} ")
    assert ("is resized from 64x64 to 8x8" in error) == ("large" in kind)


def test_a_size_may_be_stated_for_an_image(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.fromarray(np.zeros((20, 20, 3), np.uint8)).save(tmp_path / "a.png")
    argv = (folder / "digits.tpm", tmp_path / "a.png", "--size")
    for size in ("8x8", "1x8x8", "3x8x8"):  # the channels are those of the model
        assert run(capsys, *argv, size)[0] == 0
    code, _, error = run(capsys, *argv, "9x8")
    assert code == 2
    assert "the data gives, for each sample: x uint8[1, 9, 8]" in error


def test_an_image_is_refused_by_a_model_of_other_inputs(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = train.Trainer(nn.Dense(3, 2), loss=nn.MSE(), optimizer=optim.SGD(0.1))
    trainer.prepare(np.zeros((1, 3), np.float32), np.zeros((1, 2), np.float32))
    trainer.export(("predict",)).save(tmp_path / "m.tpm")
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "a.png")
    code, _, error = run(capsys, tmp_path / "m.tpm", tmp_path / "a.png")
    assert code == 2
    assert "an image is one input (N, C, H, W), but the model takes x: float32(N, 3)" in error
    (tmp_path / "a.png").write_bytes(b"\x89PNG damaged")
    assert run(capsys, folder / "digits.tpm", tmp_path / "a.png")[0] in {2, 5}


def several(path: Path, labels: Sequence[str] = ()) -> np.ndarray:
    """An ONNX model with outputs of several kinds: one called file, a class, and a matrix."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3])
    outs = [
        helper.make_tensor_value_info("file", TensorProto.FLOAT, ["N", 3]),
        helper.make_tensor_value_info("best", TensorProto.INT64, ["N"]),
        helper.make_tensor_value_info("is/positive", TensorProto.BOOL, ["N", 3]),
    ]
    nodes = [
        helper.make_node("Log", ["x"], ["file"]),
        helper.make_node("ArgMax", ["x"], ["best"], axis=1, keepdims=0),
        helper.make_node("IsNaN", ["file"], ["is/positive"]),
    ]
    graph = helper.make_graph(nodes, "several", [x], outs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    if labels:
        helper.set_model_props(model, {"labels": json.dumps(labels)})
    onnx.save(model, path)
    return np.array([[1, 2, 3], [-1, 0.1, 0]], np.float32)


def test_outputs_without_names_of_classes_are_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x = several(tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=x)
    for suffix in (".npz", ".csv"):
        out = tmp_path / f"y{suffix}"
        code, _, error = run(capsys, tmp_path / "m.onnx", tmp_path / "d.npz", "--out", out)
        assert code == 0, error
    with np.load(tmp_path / "y.npz") as arrays:
        assert sorted(arrays.files) == ["best", "file", "is/positive"]
        with np.errstate(all="ignore"):
            np.testing.assert_allclose(arrays["file"], np.log(x), rtol=1e-6)
    with (tmp_path / "y.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == [
        "file.0", "file.1", "file.2", "best", "is/positive.0", "is/positive.1", "is/positive.2",
    ]  # fmt: skip
    assert rows[0]["best"] == "2"
    assert [rows[1][f"is/positive.{k}"] for k in range(3)] == ["1", "0", "0"]
    assert rows[1]["file.2"] == "-inf"


def test_json_refuses_what_it_cannot_hold_and_keeps_the_older_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "d.npz", x=several(tmp_path / "m.onnx"))
    (tmp_path / "y.json").write_text("older")
    flags = ("--out", tmp_path / "y.json")
    code, _, error = run(capsys, tmp_path / "m.onnx", tmp_path / "d.npz", *flags)
    assert code == 2
    assert "NaN or infinity, which JSON lacks; write .npz" in error
    assert (tmp_path / "y.json").read_text() == "older"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d.npz", "m.onnx", "y.json"]


@pytest.mark.parametrize("suffix", list(answers.WRITERS))
def test_a_file_that_was_damaged_on_its_way_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    write, read_back = answers.WRITERS[suffix]

    def wrong(file: Any, own: answers.Answers) -> None:
        write(file, answers.Answers({"y": own.outputs["y"] + 1}))

    monkeypatch.setitem(answers.WRITERS, suffix, (wrong, read_back))
    from triplane.proto.errors import Corrupt

    with pytest.raises(Corrupt, match="differs from the answers when read back"):
        answers.write_answers(tmp_path / f"y{suffix}", answers.Answers({"y": np.zeros((2, 3))}))
    assert not list(tmp_path.iterdir())


def test_names_of_any_characters_are_read_back_and_print_no_control_character(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names in a file of another's may hold what moves a terminal's cursor or ends a row."""
    names = ["a\rb", "c\x1b[31m\n", '"\u202e,']
    own = answers.Answers(
        {"y": np.eye(3)}, tuple(names), ("g\r", np.array(["x\ry", "", "\r\n"], object))
    )
    answers.write_answers(tmp_path / "y.csv", own)
    with (tmp_path / "y.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["g\r", "class", "score"]
    assert [row[:2] for row in rows] == [["x\ry", names[0]], ["", names[1]], ["\r\n", names[2]]]
    several(tmp_path / "m.onnx", labels=names)
    np.savez(tmp_path / "d.npz", x=np.eye(3, dtype=np.float32))
    code, text, error = run(capsys, tmp_path / "m.onnx", tmp_path / "d.npz")
    assert code == 0, error
    assert "c [31m" in text
    assert all(line.isprintable() for line in text.split("\n"))


NUMBERS = st.sampled_from(["float16", "float32", "float64", "int8", "int64", "uint64", "bool"])


@settings(max_examples=60, deadline=None)
@given(
    y=NUMBERS.flatmap(lambda dtype: npst.arrays(dtype, npst.array_shapes(max_dims=3, max_side=4))),
    suffix=st.sampled_from([".npz", ".csv"]),
)
def test_every_number_is_read_back_as_it_was(y: np.ndarray, suffix: str) -> None:
    """`write_answers` itself raises where one differs; NaN and infinities are among them."""
    with TemporaryDirectory() as folder:
        answers.write_answers(Path(folder) / f"y{suffix}", answers.Answers({"y": y}))


def test_probabilities_stay_and_scores_become_some() -> None:
    shares = np.array([[0.2, 0.8], [0.5, 0.5]], np.float32)
    kept = answers.Answers({"p": shares}, ("a", "b")).classes
    assert kept is not None
    assert kept[0] == ["b", "a"]
    np.testing.assert_allclose(kept[1], [0.8, 0.5])
    logarithms = answers.Answers({"p": np.log(shares)}, ("a", "b")).classes
    assert logarithms is not None
    np.testing.assert_allclose(logarithms[1], [0.8, 0.5], rtol=1e-6)


def test_outputs_beyond_the_limits_are_refused(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = (folder / "digits.tpm", "digits", "--batch-size", 50, "--out")
    monkeypatch.setattr(answers, "MAX_TEXT_ELEMENTS", 3000)
    code, _, error = run(capsys, *argv, tmp_path / "y.csv")
    assert code == 2
    assert "texts of at most 3000 are written: write .npz" in error
    monkeypatch.setattr(predict, "MAX_OUTPUT_BYTES", 5000)
    code, _, error = run(capsys, *argv, tmp_path / "y.npz")
    assert code == 2
    assert "the outputs of 150 samples take 6000 bytes; at most 5000" in error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("digits", "--out", "y.txt"), "--out is a file .npz, .csv, .json, got y.txt"),
        (("absent.npz",), "absent.npz does not exist"),
        (("digits", "--x", "z"), "'z'"),
    ],
)
def test_a_wrong_call_is_refused(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    argv: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, error = run(capsys, folder / "digits.tpm", *argv)
    assert code == 2
    assert message in error


def test_inputs_are_never_written_over(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "d.npz", x=np.zeros((2, 1, 8, 8), np.float32))
    flags = ("--out", tmp_path / "d.npz")
    code, _, error = run(capsys, folder / "digits.tpm", tmp_path / "d.npz", *flags)
    assert code == 2
    assert "which is an input; name another file" in error


def test_integers_of_a_table_are_numbers_for_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = train.Trainer(nn.Dense(2, 1), loss=nn.MSE(), optimizer=optim.SGD(0.1))
    trainer.prepare(np.zeros((1, 2), np.float32), np.zeros((1, 1), np.float32))
    module = trainer.export(("predict",))
    module.save(tmp_path / "m.tpm")
    (tmp_path / "d.csv").write_text("a,b,y\n1,2,0\n3,4,1\n")
    flags = ("--x", "a,b", "--out", tmp_path / "y.csv")
    code, _, error = run(capsys, tmp_path / "m.tpm", tmp_path / "d.csv", *flags)
    assert code == 0, error
    header, *rows = (tmp_path / "y.csv").read_text().split()
    assert header == "y.0"
    wanted = module.predict(np.array([[1, 2], [3, 4]], np.float32))
    np.testing.assert_array_equal(np.array(rows, np.float32), wanted[:, 0])


def test_the_group_of_each_sample_stands_beside_its_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The pattern c* would take the column client too, which holds texts."""
    x = np.arange(24, dtype=np.float32).reshape(12, 2)
    people = ["ann", 'b"o,b', "cy\n"] * 4
    rows = zip(x, people, strict=True)
    with (tmp_path / "d.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["c0", "client", "c1", "number"])
        writer.writerows((a, p, b, k % 5) for k, ((a, b), p) in enumerate(rows))
    trainer = train.Trainer(nn.Dense(2, 1), loss=nn.MSE(), optimizer=optim.SGD(0.1))
    trainer.prepare(x, x[:, :1])
    trainer.export(("predict",)).save(tmp_path / "m.tpm")
    files = (tmp_path / "m.tpm", tmp_path / "d.csv", "--batch-size", 5, "--x")
    argv = (*files, "c*")
    for column, wanted in (("client", people), ("number", [k % 5 for k in range(12)])):
        flags = (*files, "c*" if column == "client" else "c0,c1", "--group", column, "--out")
        for suffix in (".csv", ".json"):
            code, _, error = run(capsys, *flags, tmp_path / f"y{suffix}")
            assert code == 0, error
        code, _, error = run(capsys, *flags, tmp_path / "y.npz")
        if column == "client":
            assert code == 2
            assert "client holds texts, and .npz holds numbers alone" in error
        else:
            with np.load(tmp_path / "y.npz") as npz:
                assert npz[column].tolist() == wanted
                np.testing.assert_allclose(npz["y"], trainer.predict(x), rtol=1e-5)
        with (tmp_path / "y.csv").open(newline="") as file:
            assert [row[column] for row in csv.DictReader(file)] == [*map(str, wanted)]
        assert json.loads((tmp_path / "y.json").read_text())["groups"] == {column: wanted}
    code, out, _ = run(capsys, *argv, "--group", "client")
    assert code == 0
    assert out.splitlines()[2].startswith("2 (cy ): y [")
    code, _, error = run(capsys, *argv, "--group", "y", "--out", tmp_path / "y.csv")
    assert code == 2
    assert "no column is called 'y'" in error
