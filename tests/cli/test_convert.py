"""`triplane convert` through the command's own front."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from tests.quantize import nets

from triplane.unified_ir import data, nn, optim, train
from triplane.unified_ir.cli.shell import run
from triplane.unified_ir.convert.targets import TARGETS
from triplane.unified_ir.runtime import Bundle, Plan


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model file and samples."""
    made = tmp_path_factory.mktemp("convert")
    module, train, held_out = nets.digits()
    module.save(made / "digits.tpm")
    np.savez(made / "samples.npz", x=train.x[:100])
    np.savez(made / "held_out.npz", x=held_out.x, y=held_out.y)
    return made


def test_no_pattern_takes_the_column_of_groups(tmp_path, capsys):
    nn.seed(1)
    trainer = train.Trainer(nn.Dense(2, 3), loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.1))
    trainer.prepare(np.zeros((4, 2), np.float32), np.zeros(4, np.int64))
    trainer.export(("predict",)).save(tmp_path / "m.tpm")
    rows = "".join(f"{k / 9},{'ann' if k % 2 else 'bob'},{k / 7},{k % 3}\n" for k in range(40))
    (tmp_path / "d.csv").write_text("c0,client,c1,y\n" + rows)
    samples = str(tmp_path / "d.csv")
    argv = ["convert", str(tmp_path / "m.tpm"), "--calibrate", samples, "--evaluate", samples]
    argv += ["--x", "c*", "--out", str(tmp_path / "m.bundle")]
    assert run(argv) == 2
    assert "'client' holds texts" in capsys.readouterr().err
    assert run([*argv, "--group", "client"]) == 0


@pytest.mark.slow
def test_int8_with_all_its_files(folder, tmp_path, capsys):
    code = run([
        "convert", str(folder / "digits.tpm"), "--quantize", "int8",
        "--calibrate", str(folder / "samples.npz"), "--evaluate", str(folder / "held_out.npz"),
        "--out", str(tmp_path / "a.bundle"), "--report", str(tmp_path / "a.svg"),
        "--report-json", str(tmp_path / "a.json"),
    ])  # fmt: skip
    text = capsys.readouterr().out
    record = json.loads((tmp_path / "a.json").read_text())
    bundle = Bundle.load(tmp_path / "a.bundle")
    assert code == 0
    assert text.splitlines()[0] == record["verdict"]
    assert record["bundle"]["digest"] == bundle.digest
    assert bundle.name == "digits"
    assert ET.fromstring((tmp_path / "a.svg").read_text()).tag.endswith("svg")


@pytest.mark.slow
def test_json_is_one_document(folder, tmp_path, capsys):
    out = tmp_path / "a.bundle"
    assert run(["convert", str(folder / "digits.tpm"), "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bundle"]["path"] == str(out)


@pytest.mark.slow
@pytest.mark.parametrize("quantize", [[], ["--quantize", "int8"]], ids=["float", "int8"])
def test_raw_inputs_put_the_steps_of_the_data_in_front(folder, tmp_path, capsys, quantize):
    model = str(folder / "digits.tpm")
    both = ["--calibrate", "digits", "--evaluate", "digits", *quantize]
    for name, more in (("plain", []), ("raw", ["--raw-inputs"])):
        out = str(tmp_path / f"{name}.bundle")
        assert run(["convert", model, *both, *more, "--out", out]) == 0, capsys.readouterr().err
    digits = data.digits()
    column = np.asarray(replace(digits, steps=()).column("x"))
    assert column.dtype == np.uint8
    raw = Bundle.load(tmp_path / "raw.bundle").predict(x=column)["logits"]
    plain = Bundle.load(tmp_path / "plain.bundle").predict(x=digits.x)["logits"]
    assert np.array_equal(raw, plain)


def test_raw_inputs_need_data(folder, capsys):
    assert run(["convert", str(folder / "digits.tpm"), "--raw-inputs"]) == 2
    assert "needs --calibrate or --evaluate" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--target", "cuda"], 2, "this version converts for ort-x64, ort-arm64"),
        (["--quantize", "int8"], 2, "give calibration"),
        (["--calibrate", "absent.npz"], 2, "absent.npz"),
        (["--entry", "train"], 2, "no entry 'train'"),
        (["--plan", "a.plan"], 2, "a device learns with one of"),
        (
            ["--quantize", "int8", "--calibrate", "digits", "--max-accuracy-drop", "0"],
            2,
            "--max-accuracy-drop needs labelled data; give --evaluate too",
        ),
    ],
)
def test_a_refusal_is_one_line_and_leaves_no_file(
    folder, tmp_path, capsys, monkeypatch, options, code, message
):
    monkeypatch.chdir(tmp_path)
    assert run(["convert", str(folder / "digits.tpm"), "--out", "a.bundle", *options]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_budget_that_is_passed_leaves_no_file(folder, tmp_path, capsys):
    code = run([
        "convert", str(folder / "digits.tpm"), "--quantize", "int8",
        "--calibrate", str(folder / "samples.npz"), "--max-size-ratio", "0.01",
        "--out", str(tmp_path / "a.bundle"), "--report", str(tmp_path / "a.svg"),
    ])  # fmt: skip
    assert code == 2
    assert "max_size_ratio is 0.01" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_model_is_corrupt(folder, tmp_path, capsys):
    data = bytearray((folder / "digits.tpm").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "bad.tpm").write_bytes(data)
    assert run(["convert", str(tmp_path / "bad.tpm"), "--out", str(tmp_path / "a.bundle")]) == 5
    assert "part" in capsys.readouterr().err


def test_a_plan_alone_is_written_without_a_report(tmp_path, capsys):
    from tests.convert.modules import module

    module().save(tmp_path / "a.tpm")
    assert run(["convert", str(tmp_path / "a.tpm"), "--plan", str(tmp_path / "a.plan")]) == 0
    plan = Plan.load(tmp_path / "a.plan")
    assert capsys.readouterr().out == f"plan: {tmp_path / 'a.plan'}, digest {plan.digest}\n"


def test_help_teaches_with_examples(capsys):
    assert run(["convert", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--quantize int8 --calibrate samples.npz" in text
    assert "first line of the report says so" in text


def test_the_help_lists_every_target(capsys):
    assert run(["convert", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert all(f"{row.name} ({row.summary})" in text for row in TARGETS.values())


def test_the_module_imports_only_click():
    heavy = ["numpy", "onnx", "onnxruntime", "rich", "ml_dtypes", "google.protobuf"]
    code = (
        "import sys, triplane.unified_ir.cli.convert; "
        f"print([m for m in {heavy} if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(filter(None, sys.path))},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--out", "m.onnx"), "a bundle is written, not an ONNX model.*m.bundle"),
        (("--out", "m.tpm"), "a bundle is written.*m.bundle"),
        (("--plan", "m.onnx"), "a plan is written.*m.plan"),
        (("--plan", "m.bundle"), "a plan is written.*m.plan"),
    ],
)
def test_a_suffix_of_another_kind_of_file_is_refused(tmp_path, capsys, options, words):
    option, name = options
    assert run(["convert", "digits.tpm", option, str(tmp_path / name)]) == 2
    assert re.search(words, capsys.readouterr().err)


@pytest.mark.parametrize("name", ["../x", "a/b", "..", ".", "a\\b", "x\0y", "", "a" * 300, ".x"])
def test_a_name_that_is_a_path_is_refused_by_name(folder, capsys, name):
    assert run(["convert", str(folder / "digits.tpm"), "--name", name]) == 2
    assert "a bundle's name" in capsys.readouterr().err


def test_a_file_that_is_no_model_is_called_so(tmp_path, capsys):
    np.savez(tmp_path / "img.npz", x=np.zeros(3))
    assert run(["convert", str(tmp_path / "img.npz")]) == 2
    error = capsys.readouterr().err
    assert "img.npz is not a model file" in error
    assert "4294967295" not in error
