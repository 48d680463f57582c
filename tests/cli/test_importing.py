"""`triplane import`, and the verbs that take an ONNX model as it is."""

import json
from importlib.metadata import EntryPoint

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto
from tests.onnx.networks import Writer, language_model, resnet

from triplane.unified_ir import data, import_onnx, load, nn, optim, train
from triplane.unified_ir.cli import shell
from triplane.unified_ir.onnx import EmittedInitializer, emit, serialize

VERBS = {
    name: EntryPoint(name, f"triplane.unified_ir.cli.{module}:command", shell.VERB_GROUP)
    for name, module in (
        ("import", "importing"), ("inspect", "inspect"), ("convert", "convert"), ("train", "train"),
    )
}  # fmt: skip


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setattr(shell, "_entry_points", lambda: VERBS)
    path = tmp_path / "net.onnx"
    onnx.save(resnet(), path)
    return path


def run(capsys, *argv):
    code = shell.run([*map(str, argv)])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_an_imported_model_file_computes_what_the_onnx_model_does(model, tmp_path, capsys):
    out = tmp_path / "net.tpm"
    code, text, error = run(capsys, "import", model, "--out", out, "--json")
    assert code == 0, error
    record = json.loads(text)
    assert record["inputs"] == {"image": "float32[N,3,16,16]"}
    images = np.random.default_rng(0).standard_normal((2, 3, 16, 16)).astype(np.float32)
    (wanted,) = ort.InferenceSession(model).run(None, {"image": images})
    np.testing.assert_allclose(nn.Imported(load(out))(images), wanted, rtol=1e-4, atol=1e-5)


def test_shapes_and_outputs_are_chosen_by_name(model, tmp_path, capsys):
    out = tmp_path / "features.tpm"
    argv = ["import", model, "--out", out, "--shape", "image=8,3,32,32", "--output", "features"]
    code, text, error = run(capsys, *argv)
    assert code == 0, error
    assert "out  features: float32[8,16]" in text
    assert "in   image: float32[8,3,32,32]" in text


def test_a_wrong_shape_or_model_is_refused_and_nothing_written(model, tmp_path, capsys):
    out = tmp_path / "n.tpm"
    code, _, error = run(capsys, "import", model, "--out", out, "--shape", "image")
    assert (code, out.exists()) == (2, False)
    assert "--shape is INPUT=SIZES" in error
    code, _, error = run(capsys, "import", model, "--out", out, "--shape", "picture=1")
    assert (code, out.exists()) == (2, False)
    assert "shapes= names the input 'picture'; the model has image" in error
    model.write_bytes(b"no model at all")
    code, _, error = run(capsys, "import", model, "--out", out)
    assert (code, out.exists()) == (5, False)


def test_statistics_that_a_pattern_fits_are_named_and_stay(model, tmp_path, capsys):
    argv = ["import", model, "--out", tmp_path / "n.tpm", "--trainable", "stem.*"]
    code, text, error = run(capsys, *argv)
    assert code == 0, error
    assert (
        "--trainable matches running statistics, which have no gradients and do not change: "
        "stem.bn.running_mean, stem.bn.running_var" in text
    )
    record = json.loads(run(capsys, *argv, "--json")[1])
    assert record["statistics"] == ["stem.bn.running_mean", "stem.bn.running_var"]


def test_weights_that_are_equal_are_reported_and_tied_on_request(model, tmp_path, capsys):
    onnx.save(language_model(), model)
    argv = ["import", model, "--out", tmp_path / "n.tpm"]
    code, text, error = run(capsys, *argv)
    assert code == 0, error
    assert (
        "  2 tensors are equal bit for bit: wte, head; they train separately (--tie makes them one "
        "weight)" in text
    )
    record = json.loads(run(capsys, *argv, "--json")[1])
    assert record["equal"] == [["wte", "head"]]
    tied = json.loads(run(capsys, *argv, "--json", "--tie", "*")[1])
    assert tied["equal"] == []
    assert tied["parameters"] == record["parameters"] - 60 * 20
    assert "they train separately" not in run(capsys, *argv, "--tie", "*")[1]


def test_importing_a_model_file_says_that_it_needs_no_import(model, tmp_path, capsys):
    made = tmp_path / "net.tpm"
    assert run(capsys, "import", model, "--out", made)[0] == 0
    code, _, error = run(capsys, "import", made, "--out", tmp_path / "again.tpm")
    assert code == 2
    assert "net.tpm is already a Triplane model file and needs no import" in error
    assert "triplane train, convert and inspect accept it as it is" in error
    assert not (tmp_path / "again.tpm").exists()


def test_inspect_reads_an_onnx_model(model, capsys):
    code, text, error = run(capsys, "inspect", model)
    assert code == 0, error
    assert "an ONNX model" in text
    assert "(image: float32[N,3,16,16]) -> (logits: float32[N,5])" in text
    code, text, _ = run(capsys, "inspect", model, "--text")
    assert "= Conv(%image, %stem.conv.weight)" in text


@pytest.mark.slow
def test_convert_takes_an_onnx_model(model, tmp_path, capsys):
    out = tmp_path / "net.bundle"
    code, _, error = run(capsys, "convert", model, "--out", out)
    assert code == 0, error
    assert out.exists()


@pytest.mark.slow
def test_train_goes_on_from_an_onnx_model(model, tmp_path, capsys):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 5, 40)
    images = rng.standard_normal((40, 3, 16, 16)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=images, y=labels)
    argv = ["train", model, "--data", tmp_path / "data.npz", "--epochs", 1]
    code, _, error = run(capsys, *argv, "--out", tmp_path / "trained.tpm")
    assert code == 0, error
    before, after = import_onnx(model), load(tmp_path / "trained.tpm")
    assert (after.state["fc.bias"].array != before.state["fc.bias"].array).any()


@pytest.mark.parametrize(
    "argv",
    [
        ("import", "net.onnx", "--out", "net.onnx"),
        ("inspect", "net.onnx", "--graph", "./net.onnx"),
        ("convert", "net.onnx", "--report", "net.onnx"),
        ("convert", "net.onnx", "--calibrate", "net.onnx", "--out", "net.onnx"),
        ("train", "net.onnx", "--data", "digits", "--out", "net.onnx"),
        ("train", "net.onnx", "--data", "digits", "--out", "a.tpm", "--history", "net.onnx"),
    ],
)
def test_no_verb_writes_over_the_file_that_it_reads(model, capsys, monkeypatch, argv):
    monkeypatch.chdir(model.parent)
    before = model.read_bytes()
    code, _, error = run(capsys, *argv)
    assert code == 2
    assert "net.onnx, which is an input" in error
    assert "name another file" in error
    assert model.read_bytes() == before


def test_two_results_are_not_written_to_one_file(model, tmp_path, capsys):
    out = tmp_path / "a"
    code, _, error = run(capsys, "convert", model, "--out", out, "--plan", out)
    assert (code, out.exists()) == (2, False)
    assert "--out and --plan are both" in error


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        (("image=-1,3,16,16",), "a dimension is an int in 0..2**62 or a symbol, got -1"),
        (("image=2,3,16,16", "image=N,3,16,16"), "--shape names 'image' twice"),
        (("image=\u00b2,3,16,16",), "cannot read dimension"),
    ],
)
def test_sizes_that_are_none_or_said_twice_are_refused(model, tmp_path, capsys, shapes, words):
    options = [part for shape in shapes for part in ("--shape", shape)]
    code, _, error = run(capsys, "import", model, "--out", tmp_path / "n.tpm", *options)
    assert code == 2
    assert words in error


def test_sizes_without_a_profile_are_refused(model, capsys):
    code, _, error = run(capsys, "inspect", model, "--sizes", "N=2")
    assert code == 2
    assert "--sizes is an option of --profile" in error


@pytest.mark.slow
def test_train_takes_the_model_file_that_import_wrote(model, tmp_path, capsys):
    rng = np.random.default_rng(0)
    images = rng.standard_normal((40, 3, 16, 16)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=images, y=rng.integers(0, 5, 40))
    assert run(capsys, "import", model, "--out", tmp_path / "net.tpm")[0] == 0
    argv = ["--data", tmp_path / "data.npz", "--epochs", 1, "--out"]
    code, _, error = run(capsys, "train", tmp_path / "net.tpm", *argv, tmp_path / "file.tpm")
    assert code == 0, error
    assert run(capsys, "train", model, *argv, tmp_path / "direct.tpm")[0] == 0
    assert (tmp_path / "file.tpm").read_bytes() == (tmp_path / "direct.tpm").read_bytes()


def test_a_model_of_a_fixed_batch_is_told_how_to_open_it(model, tmp_path, capsys):
    fixed = tmp_path / "one.tpm"
    shape = ("--shape", "image=1,3,16,16")
    assert run(capsys, "import", model, "--out", fixed, *shape)[0] == 0
    code, _, error = run(capsys, "train", fixed, "--data", "digits", "--out", tmp_path / "a.tpm")
    assert code == 2
    assert "takes only batches of 1: input 'image' is float32[1,3,16,16]" in error
    assert "--shape image=N,3,16,16" in error


def test_a_model_without_inputs_makes_no_bundle(tmp_path, model, capsys):
    y = onnx.numpy_helper.from_array(np.zeros(3, np.float32))
    node = onnx.helper.make_node("Constant", [], ["y"], value=y)
    value = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [3])
    made = onnx.helper.make_model(onnx.helper.make_graph([node], "g", [], [value]))
    onnx.save(made, tmp_path / "none.onnx")
    code, _, error = run(capsys, "convert", tmp_path / "none.onnx")
    assert code == 2
    assert "'predict' takes no input" in error


def digit_reader(seed):
    """A network with batch normalization, trained on half of the digits, as an ONNX model."""
    learnt, _ = data.load_split("digits", seed=0)
    half = len(learnt) // 2

    def block(a, b):
        return nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2)

    nn.seed(seed)
    net = nn.Sequential(*block(1, 16), *block(16, 32), nn.Flatten(), nn.Dense(32 * 4, 10))
    trainer = train.Trainer(net, loss=nn.SoftmaxCrossEntropy(), optimizer=optim.Adam(2e-3))
    trainer.fit((learnt.x[:half], learnt.y[:half]), 8, batch_size=32, progress="none")
    module = trainer.export(["predict"])
    held = {n: EmittedInitializer(t.array) for n, t in module.state.items()}
    return serialize(emit(module.entry("predict"), initializers=held))


@pytest.mark.slow
@pytest.mark.parametrize("batch_norm", ["kept", "updated"])
def test_the_default_rate_does_not_harm_a_trained_network(model, tmp_path, capsys, batch_norm):
    out = tmp_path / "digits.tpm"
    model.write_bytes(digit_reader(seed=0))
    _, held_out = data.load_split("digits", seed=0)
    before = nn.Imported(import_onnx(model))(held_out.x).argmax(1)
    options = ["--data", "digits", "--epochs", "1", "--batch-norm", batch_norm, "--json"]
    code, text, error = run(capsys, "train", model, *options, "--out", out)
    assert code == 0, error
    record = json.loads(text)
    assert "0.0002" in record["optimizer"]
    assert record["validation"]["accuracy"] >= (before == held_out.y).mean()


def test_what_trains_is_shown_and_chosen(model, tmp_path, capsys):
    argv = ["import", model, "--out", tmp_path / "net.tpm"]
    code, text, error = run(capsys, *argv)
    assert code == 0, error
    assert "trained: 20 tensors; not trained: 12 (stem.bn.running_mean, stem.bn.running_var" in text
    code, text, _ = run(capsys, *argv, "--json", "--frozen", "*", "--trainable", "fc.*")
    found = json.loads(text)["roles"]
    assert (code, found["parameter"]) == (0, ["fc.weight", "fc.bias"])
    assert "stem.conv.weight" in found["buffer"]
    code, _, error = run(capsys, *argv, "--frozen", "rope.*")
    assert code == 2
    assert "no tensor of the model matches 'rope.*'; there are stem.conv.weight" in error


def flattening():
    """`x.view(x.size(0), -1)` and `[x.size(0), -1]`, as exporters write them."""
    w = Writer()
    first = w.add("Gather", w.add("Shape", "image"), w.constant("zero", np.array([0])), axis=0)
    sizes = w.add("Concat", first, w.constant("rest", np.array([-1])), outputs=["sizes"], axis=0)
    x = w.add("Reshape", w.add("Relu", w.conv_bn("image", "stem", 1, 4)), sizes)
    w.add("Gemm", x, w.weight("fc.weight", 10, 256), outputs=["scores"], transB=1)
    inputs = [("image", TensorProto.FLOAT, ["N", 1, 8, 8])]
    results = [("scores", TensorProto.FLOAT, ["N", 10]), ("sizes", TensorProto.INT64, [2])]
    return w.model(inputs, results)


def test_a_view_by_minus_one_means_the_same_in_the_file_as_in_memory(model, tmp_path, capsys):
    onnx.save(flattening(), tmp_path / "view.onnx")
    out = tmp_path / "view.tpm"
    code, _, error = run(capsys, "import", tmp_path / "view.onnx", "--out", out)
    assert code == 0, error
    images = np.random.default_rng(0).standard_normal((3, 1, 8, 8)).astype(np.float32)
    session = ort.InferenceSession(tmp_path / "view.onnx")
    scores, sizes = session.run(None, {"image": images})
    found = nn.Imported(load(out))(images)
    np.testing.assert_allclose(found[0], scores, rtol=1e-4, atol=1e-5)
    assert np.asarray(found[1]).tolist() == sizes.tolist() == [3, -1]


@pytest.mark.slow
def test_a_network_that_flattens_by_minus_one_trains_to_a_file_that_loads(model, tmp_path, capsys):
    network = flattening()
    del network.graph.output[1]
    onnx.save(network, tmp_path / "view.onnx")
    out = tmp_path / "trained.tpm"
    argv = ["train", tmp_path / "view.onnx", "--data", "digits", "--epochs", 1, "--out", out]
    code, _, error = run(capsys, *argv)
    assert code == 0, error
    assert {"predict", "train_step"} <= load(out).entries.keys()
