"""`triplane inspect`: the summary, the text, the drawing, and damage refused by name."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from tests.attacks import forge
from tests.ir import graphs
from tests.quantize import nets

from triplane.proto.errors import Corrupt
from triplane.unified_ir import nn, ops, optim, train
from triplane.unified_ir.cli import shell
from triplane.unified_ir.cli.inspect import size_text
from triplane.unified_ir.files import container
from triplane.unified_ir.files.container import Container
from triplane.unified_ir.ir import Module, Role, StateTensor, TensorSpec
from triplane.unified_ir.ir.text import function_text, module_text

GOLDEN = Path(__file__).parents[1] / "golden" / "files" / "v1"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "m.tpm"
    graphs.module().save(path, parent="ab" * 32)
    return path


def run(capsys, *argv):
    """Exit code, standard output and standard error of one command line."""
    code = shell.run(["inspect", *map(str, argv)])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_summary_tells_entries_state_parts_and_digest(model, capsys):
    code, out, _ = run(capsys, model)
    digest = Container(model, kind="model").digest
    assert code == 0
    assert digest in out
    assert "ab" * 32 in out
    assert "every byte matches its digest" in out
    for words in (
        "predict     9 nodes",
        "(x: float32[N,4]) -> (y: float32[N,3])",
        "reads 4, assigns 4",
        "module.pb",
        "parameter  1 tensor  12 elements",
        "personal   1 tensor  3 elements   12 B (not in the file)",
        "12 parameters",
        r"classes  'a\nb\nc'",
    ):
        assert words in out, words


def test_json_holds_the_same_facts(model, capsys):
    code, out, _ = run(capsys, model, "--json")
    record = json.loads(out)
    assert code == 0
    assert record["kind"] == "model"
    assert record["parent"] == "ab" * 32
    assert [p["name"] for p in record["parts"]] == ["module.pb", "weights.safetensors"]
    step = record["entries"]["train_step"]
    assert step["inputs"] == {"x": "float32[N,4]"}
    assert step["results"] == {"loss": "float32[]"}
    assert step["assigns"] == ["w", "w.momentum", "steps", "key"]
    assert record["state"]["steps"] == {
        "role": "buffer", "type": "int64[]", "elements": 1, "bytes": 8,
    }  # fmt: skip
    assert "text" not in record


def test_a_named_entry_is_told_alone(model, capsys):
    record = json.loads(run(capsys, model, "--entry", "predict", "--json")[1])
    assert list(record["entries"]) == ["predict"]
    code, _, err = run(capsys, model, "--entry", "prdict")
    assert code == 2
    assert "no entry 'prdict'" in err


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_tables_are_as_wide_as_the_terminal(tmp_path, capsys, monkeypatch, columns):
    net = nn.Sequential(nn.Flatten(), nn.Dense(4, 2))
    trainer = train.Trainer(net, loss=nn.SoftmaxCrossEntropy(), optimizer=optim.AdamW(0.1))
    trainer.prepare(np.zeros((1, 1, 2, 2), np.float32), np.zeros(1, np.int64))
    path = tmp_path / "m.tpm"
    trainer.export().save(path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", str(columns))
    out = run(capsys, path.name)[1]
    digest = Container(path, kind="model").digest
    lines = [line for line in out.splitlines() if digest not in line]
    assert max(map(len, lines)) <= columns
    assert not any(line.endswith(":") for line in lines)  # a name stands beside its type
    signature = "(x: float32[N,1,2,2], y: int64[N]) -> (loss: float32[], accuracy: float32[])"
    assert signature in re.sub(r"\s+", " ", out)  # wrapped, and whole
    assert "AdamW(lr=0.1" in out
    if columns == 200:
        assert re.search(rf"  loss +\d+ nodes .* {re.escape(signature)}\n", out)


def test_text_is_the_text_form(model, capsys):
    module = graphs.module()
    assert run(capsys, model, "--text")[1] == module_text(module) + "\n"
    out = run(capsys, model, "--text", "--entry", "predict")[1]
    assert out == function_text(module.entry("predict")) + "\n"
    record = json.loads(run(capsys, model, "--text", "--entry", "predict", "--json")[1])
    assert record["text"] + "\n" == out


def test_graph_is_one_sound_svg_with_tooltips(model, capsys, tmp_path):
    out = tmp_path / "g.svg"
    code, said, _ = run(capsys, model, "--graph", out, "--entry", "train_step")
    assert code == 0
    left_out = "constants and sizes computed from them"
    assert re.fullmatch(rf"{re.escape(str(out))}: step, \d+ nodes, without \d+ {left_out}\n", said)
    root = ET.parse(out).getroot()
    titles = [t.text or "" for t in root.iter(f"{SVG}title")]
    assert root.tag == f"{SVG}svg"
    assert titles[0] == ": ".join(said.split(": ", 1)[1].split(", ")[:2])
    assert any("reads w.momentum: float32[4,3]" in t for t in titles)
    assert any("graphs.py:" in t for t in titles)
    assert "http" not in out.read_text().replace("http://www.w3.org/2000/svg", "")


def test_graph_as_a_page_is_one_file_that_needs_no_other(model, capsys, tmp_path):
    out = tmp_path / "g.html"
    code, said, _ = run(capsys, model, "--graph", out, "--entry", "train_step")
    assert code == 0
    assert said.startswith(f"{out}: step, ")
    text = out.read_text()
    assert text.startswith("<!doctype html>")
    assert "default-src 'none'" in text
    assert not re.search(r"(src|href)=\"(?!data:,)", text)
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")


class Sums(nn.Cell):
    def __init__(self, *axes):
        super().__init__()
        self.axes = axes

    def construct(self, x):
        for axis in self.axes:
            x = ops.sum(x, axis, keepdims=True)
        return ops.tanh(x)


@pytest.mark.parametrize(
    ("axes", "ending"),
    [
        ((), "1 node"),
        ((1,), "2 nodes, without 1 constant or size"),
        ((1, 2), "3 nodes, without 2 constants and sizes computed from them"),
    ],
)
def test_a_picture_counts_what_it_shows_and_leaves_out(capsys, tmp_path, axes, ending):
    path, out = tmp_path / "sums.tpm", tmp_path / "g.svg"
    nets.module_of(Sums(*axes), TensorSpec(("N", 4, 3))).save(path)
    said = run(capsys, path, "--graph", out)[1]
    assert said.removeprefix(f"{out}: ").partition(", ")[2] == f"{ending}\n"


def test_a_picture_says_where_passes_have_changed_the_order(capsys, tmp_path):
    path, out = tmp_path / "pooled.tpm", tmp_path / "g.svg"
    net = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dense(4, 2))
    trainer = train.Trainer(net, loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.1))
    trainer.prepare(np.zeros((1, 1, 4, 4), np.float32), np.zeros(1, np.int64))
    trainer.export(("predict", "train_step")).save(path)
    run(capsys, path, "--graph", out, "--entry", "train_step")
    assert "MaxPool(%x)" in run(capsys, path, "--text", "--entry", "train_step")[1]
    assert (ET.parse(out).getroot()[0].text or "").endswith(" nodes, simplified for its gradients")
    run(capsys, path, "--graph", out)
    assert "simplified" not in out.read_text()
    assert "MaxPool(%x)" not in run(capsys, path, "--text", "--entry", "predict")[1]


def test_graph_defaults_to_predict(model, capsys, tmp_path):
    run(capsys, model, "--graph", tmp_path / "g.svg")
    assert "predict: " in (tmp_path / "g.svg").read_text()


class Tower(nn.Cell):
    def __init__(self):
        super().__init__()
        self.layers = nn.CellList([nn.Dense(4, 4) for _ in range(6)])

    def construct(self, x):
        for layer in self.layers:
            h = layer(x)
            x = ops.tanh(h) * ops.sigmoid(h) + x
        return x


def test_repeats_are_told_and_given_whole_as_json(tmp_path, capsys):
    path = tmp_path / "tower.tpm"
    nets.module_of(nets.shaken(Tower()), TensorSpec(("N", 4))).save(path)
    code, out, _ = run(capsys, path, "--repeats")
    assert code == 0
    assert re.search(r"block_0\s+\d\s+6\s+Gemm [ \w]*\s+\S*test_inspect.py:\d+\n", out), out
    record = json.loads(run(capsys, path, "--repeats", "--json")[1])
    (occurrences,) = record["repeats"].values()
    assert len(occurrences) == 6
    assert all(each["edges"] for each in occurrences)


def test_a_model_without_repeats_says_so(model, capsys):
    assert "no block of nodes occurs twice" in run(capsys, model, "--repeats")[1]


def test_bundles_and_plans_are_told_without_running_them(capsys):
    code, out, _ = run(capsys, GOLDEN / "digits.bundle", "--verify")
    assert code == 0
    assert "a bundle" in out
    assert "digits version 1.0 for ort-x64: (x: float32[N,3]) -> (y: float32[N,2])" in out
    assert "every byte matches" in out
    record = json.loads(run(capsys, GOLDEN / "digits.plan", "--json")[1])
    assert record["kind"] == "plan"
    assert record["verified"] is False
    assert run(capsys, GOLDEN / "state.checkpoint")[0] == 0


def test_text_of_a_bundle_is_its_onnx(capsys):
    code, out, _ = run(capsys, GOLDEN / "digits.plan", "--text", "--entry", "predict")
    assert code == 0
    assert out.startswith("# predict.onnx\n")
    assert "MatMul" in out


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["gone.tpm"], 2, "no file at gone.tpm"),
        ([GOLDEN / "digits.plan", "--graph", "g.svg"], 2, "give the .tpm"),
        ([GOLDEN / "digits.plan", "--graph", "g.png"], 2, "NAME.html or NAME.svg, got 'g.png'"),
        ([GOLDEN / "digits.plan", "--text", "--entry", "x"], 2, "no graph x"),
        ([__file__], 5, "not a file of Triplane"),
    ],
)
def test_mistakes_are_told_in_one_line(capsys, argv, code, words):
    found, out, err = run(capsys, *argv)
    assert (found, out) == (code, "")
    assert words in err
    assert err.count("\n") == 1


def test_an_unknown_entry_is_refused(model, capsys):
    assert run(capsys, model, "--text", "--entry", "x")[0] == 2


@pytest.mark.parametrize("name", ["digits.bundle", "digits.plan"])
def test_verify_finds_a_flipped_byte(tmp_path, capsys, name):
    path = tmp_path / name
    path.write_bytes((GOLDEN / name).read_bytes())
    part = Container(path, kind=name.split(".")[1]).manifest.parts[-1].name
    middle = len(path.read_bytes()) * 2 // 3
    for _ in forge.flips(path, [middle]):
        code, _, err = run(capsys, path, "--verify")
        assert code == 5
        assert "part '" in err or part in err


def test_a_flipped_byte_of_a_model_is_refused_with_the_part(model, capsys):
    at = model.read_bytes().index(graphs.STATE["w"][1].tobytes())
    for _ in forge.flips(model, [at]):
        code, out, err = run(capsys, model)
        assert (code, out) == (5, "")
        assert "part 'weights.safetensors' is damaged in tensor 'w'" in err


def test_a_newer_format_is_told(tmp_path, capsys):
    made = forge.manifest({"a": b"x"})
    made.format_version = 9
    forge.write(tmp_path / "m.tpm", made, {"a": b"x"})
    code, _, err = run(capsys, tmp_path / "m.tpm")
    assert code == 2
    assert "format version 9" in err


def test_text_of_a_hostile_name_holds_no_control_character(tmp_path, capsys):
    module = graphs.module()
    held = Module(module.functions, module.entries, module.state, {"k": "\x1b[31mred\x07"})
    held.save(tmp_path / "m.tpm")
    for argv in ([], ["--text"]):
        out = run(capsys, tmp_path / "m.tpm", *argv)[1]
        assert "\x1b" not in out
        assert "\x07" not in out


def test_help_needs_click_alone():
    code = (
        "import sys\n"
        "from triplane.unified_ir.cli import inspect, diff\n"
        "heavy = {'numpy', 'onnx', 'onnxruntime', 'google.protobuf', 'rich'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], env=dict(os.environ), capture_output=True, check=False
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(
    ("n", "text"), [(1234, "1,234 B"), (12_345, "12.1 KiB"), (50 << 20, "50.0 MiB")]
)
def test_sizes_are_readable(n, text):
    assert size_text(n) == text


def test_empty_modules_have_a_summary(tmp_path, capsys):
    Module({}, {}, {"a": StateTensor(Role.BUFFER, np.zeros(2))}).save(tmp_path / "m.tpm")
    code, out, _ = run(capsys, tmp_path / "m.tpm")
    assert code == 0
    assert "buffer  1 tensor  2 elements" in out
    assert run(capsys, tmp_path / "m.tpm", "--graph", tmp_path / "g.svg")[0] == 2


def test_a_model_without_its_parts_is_corrupt(tmp_path, capsys):
    container.write(tmp_path / "m.tpm", "model", [container.part("x", b"1")])
    code, _, err = run(capsys, tmp_path / "m.tpm")
    assert code == shell.EXIT_CODES[Corrupt]
    assert "a model has" in err


def test_profile_says_where_a_steps_time_goes(tmp_path, capsys):
    from triplane.unified_ir import optim, train

    trainer = train.Trainer(nn.Dense(3, 2), loss=nn.MSE(), optimizer=optim.SGD(0.1, momentum=0.9))
    path = tmp_path / "dense.tpm"
    x, y = np.ones((4, 3), np.float32), np.ones((4, 2), np.float32)
    trainer.fit((x, y), epochs=1)
    trainer.export(entries=("predict", "train_step")).save(path)
    code, out, _ = run(capsys, path, "--profile", "--sizes", "N=8")
    assert code == 0
    assert re.search(r"train_step at N=8: [\d.]+ ms a call, median of 20", out)
    assert re.search(r"\d\.\d%\s+[\d.]+ ms  x1\s+Gemm  \S+:\d+", out)
    code, out, _ = run(capsys, path, "--profile", "--entry", "predict", "--json")
    record = json.loads(out)["profile"]
    assert (code, record["entry"], record["sizes"]) == (0, "predict", {"N": 32})
    assert sum(n["share"] for n in record["nodes"]) == pytest.approx(1)


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (("--profile", "--sizes", "N=0"), "sizes must have the form N=32,T=10"),
        (("--profile", "--sizes", "Q=2"), "but not ['Q']"),
        (("--profile", "--entry", "nothing"), "no entry 'nothing'"),
    ],
    ids=["no size", "unknown size", "unknown entry"],
)
def test_a_profile_that_cannot_be_made_is_refused_by_name(model, capsys, argv, text):
    code, _, err = run(capsys, model, *argv)
    assert code != 0
    assert text in err
