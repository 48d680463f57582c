"""Recurrent networks in int8: what a bundle holds and what the report says."""

from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tests.quantize import nets

from triplane.unified_ir import import_onnx, nn, zoo
from triplane.unified_ir.convert import convert, targets
from triplane.unified_ir.ir import TensorSpec
from triplane.unified_ir.onnx import DYNAMIC_LSTM
from triplane.unified_ir.runtime import Bundle, SessionOptions

pytestmark = pytest.mark.slow  # each test converts and times

LENGTH, LETTERS = 24, 40


def text(count=32):
    return np.random.default_rng(0).integers(0, LETTERS, (count, LENGTH))


def char_lstm(hidden=128):
    cell = nets.shaken(zoo.CharLstm(LETTERS, hidden=hidden))
    return nets.module_of(cell, TensorSpec(("N", LENGTH), "int64"))


def operators_of(path):
    model = onnx.load_from_string(bytes(Bundle.load(path).model))
    return {(node.domain, node.op_type) for node in model.graph.node}


@pytest.fixture(scope="module")
def int8(tmp_path_factory):
    out = tmp_path_factory.mktemp("bundles") / "letters.bundle"
    return convert(char_lstm(), "ort-x64", quantize="int8", calibration=text(), out=out), out


def test_a_character_lstm_in_int8_holds_its_recurrent_weights_in_int8(int8):
    report, out = int8
    assert ("com.microsoft", "DynamicQuantizeLSTM") in operators_of(out)
    assert ("", "LSTM") not in operators_of(out)
    assert report.size.int8 < 0.4 * report.size.float32
    weights = Bundle.load(out).weights.values()
    large = [str(w.dtype) for w in weights if np.prod(w.shape) > 4096]
    assert large == ["int8"] * len(large)
    assert len(large) >= 3  # of the states of two layers, and of what the second one reads


def test_the_report_counts_an_lstm_on_integers_as_integer(int8):
    report, _ = int8
    layers = [(layer.op, layer.kernel, layer.int8) for layer in report.layers]
    assert layers[:2] == [("LSTM", "DynamicQuantizeLSTM", True)] * 2
    assert all(layer.snr_db > 30 for layer in report.layers[:2])
    assert report.residency.integer["DynamicQuantizeLSTM"] == 2
    assert report.shares.integer > 0.5
    assert not [note for note in report.notes if "stay in float" in note]
    assert [note for note in report.notes if "com.microsoft.DynamicQuantizeLSTM" in note]


def test_the_answers_of_a_character_lstm_in_int8_are_those_in_float(int8, tmp_path):
    plain = tmp_path / "float.bundle"
    convert(char_lstm(), "ort-x64", out=plain)
    y, q = (Bundle.load(path).predict(x=text())["logits"] for path in (plain, int8[1]))
    assert 10 * np.log10((y**2).sum() / ((y - q) ** 2).sum()) > 25


@pytest.mark.parametrize("threads", [2, 4])
def test_golden_answers_hold_for_any_number_of_threads(int8, threads):
    """Several threads share out the rows of a call, and each rounds its own by their range."""
    bundle = Bundle.load(int8[1])
    bundle.check_goldens()
    assert len(bundle.golden_inputs["x"]) == 1
    alone, shared = (
        bundle.session(SessionOptions(threads=n)).run(bundle.golden_inputs) for n in (1, threads)
    )
    np.testing.assert_array_equal(alone["logits"], shared["logits"])


@pytest.mark.parametrize(
    "target", [row.name for row in targets.TARGETS.values() if DYNAMIC_LSTM in row.operators]
)
def test_every_target_gets_the_operator_that_its_row_lists(target):
    module = nets.module_of(nets.shaken(nn.LSTM(8, 64)), TensorSpec(("N", LENGTH, 8)))
    x = np.random.default_rng(0).standard_normal((8, LENGTH, 8)).astype(np.float32)
    report = convert(module, target, quantize="int8", calibration=x)
    assert [layer.kernel for layer in report.layers] == ["DynamicQuantizeLSTM"]


def test_the_same_conversion_gives_the_same_bundle(int8):
    again = convert(char_lstm(), "ort-x64", quantize="int8", calibration=text(), out=int8[1])
    assert again.content_digest == int8[0].content_digest


def test_a_target_without_the_operator_gets_operators_of_onnx_alone(tmp_path, monkeypatch):
    row = replace(targets.target_row("ort-x64"), name="small", operators=())
    monkeypatch.setattr(targets, "TARGETS", {**targets.TARGETS, "small": row})
    out = tmp_path / "letters.bundle"
    report = convert(char_lstm(64), "small", quantize="int8", calibration=text(), out=out)
    assert {domain for domain, _ in operators_of(out)} == {""}
    assert [layer.reason for layer in report.layers if layer.op == "LSTM"] == [
        "the target's runtime has no LSTM on integers"
    ] * 2


def test_a_gru_stays_in_float_and_the_report_says_so():
    class Reader(nn.Cell):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(LETTERS, 8)
            self.memory = nn.GRU(8, 64)
            self.head = nn.Dense(64, LETTERS)

        def construct(self, x):
            return self.head(self.memory(self.table(x))[0][:, -1])

    module = nets.module_of(nets.shaken(Reader()), TensorSpec(("N", LENGTH), "int64"))
    report = convert(module, "ort-x64", quantize="int8", calibration=text())
    assert "products inside GRU stay in float" in report.notes


def test_an_imported_character_lstm_runs_on_integers(tmp_path):
    """As PyTorch writes it: states of zeros of the batch's size, batch first outside."""
    rng, hidden = np.random.default_rng(1), 64
    arrays = {
        "table": rng.standard_normal((LETTERS, 16)),
        "W": rng.uniform(-0.125, 0.125, (1, 4 * hidden, 16)),
        "R": rng.uniform(-0.125, 0.125, (1, 4 * hidden, hidden)),
        "B": rng.uniform(-0.125, 0.125, (1, 8 * hidden)),
        "V": rng.standard_normal((hidden, LETTERS)),
    }
    held = [numpy_helper.from_array(a.astype(np.float32), n) for n, a in arrays.items()]
    counts = {"one": [1], "size": [hidden], "zero": 0, "axis": [0]}
    held += [numpy_helper.from_array(np.array(a, np.int64), n) for n, a in counts.items()]
    nodes = [
        helper.make_node("Gather", ["table", "x"], ["letters"]),
        helper.make_node("Transpose", ["letters"], ["steps"], perm=[1, 0, 2]),
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Gather", ["shape", "zero"], ["rows"]),
        helper.make_node("Unsqueeze", ["rows", "axis"], ["row"]),
        helper.make_node("Concat", ["one", "row", "size"], ["wanted"], axis=0),
        helper.make_node("ConstantOfShape", ["wanted"], ["start"]),
        helper.make_node(
            "LSTM", ["steps", "W", "R", "B", "", "start", "start"], ["y", "h", "c"],
            hidden_size=hidden,
        ),
        helper.make_node("Squeeze", ["h", "axis"], ["last"]),
        helper.make_node("MatMul", ["last", "V"], ["logits"]),
    ]  # fmt: skip
    graph = helper.make_graph(
        nodes, "net",
        [helper.make_tensor_value_info("x", TensorProto.INT64, ["N", LENGTH])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", LETTERS])],
        held,
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), tmp_path / "net.onnx")
    out = tmp_path / "net.bundle"
    module = import_onnx(tmp_path / "net.onnx")
    report = convert(module, "ort-x64", quantize="int8", calibration=text(), out=out)
    assert [layer.op for layer in report.layers if layer.int8] == ["LSTM", "MatMul"]
    assert ("com.microsoft", "DynamicQuantizeLSTM") in operators_of(out)
