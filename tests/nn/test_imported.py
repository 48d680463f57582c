"""An ONNX network that other software wrote: compared, frozen, given another head, trained."""

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from tests.onnx.networks import Writer, resnet

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import import_onnx, nn, optim, train
from triplane.unified_ir.ir.graph import Role
from triplane.unified_ir.onnx import EmittedInitializer, emit, importer, serialize

FROZEN = "layer1.*"


def data(n=64, classes=3, seed=1):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, n)
    images = rng.standard_normal((n, 3, 16, 16)).astype(np.float32)
    images[np.arange(n), labels] += 2.0
    return images, labels


def test_a_network_of_an_older_opset_gives_what_onnxruntime_gives():
    model = resnet(opset=11)
    images, _ = data(6)
    session = ort.InferenceSession(model.SerializeToString())
    (wanted,) = session.run(None, {"image": images})
    found = nn.Imported(import_onnx(model))(images)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_another_head_is_trained_and_what_is_frozen_stays():
    backbone = nn.Imported(import_onnx(resnet(), outputs=["features"])).freeze(FROZEN)
    model = nn.Sequential(backbone, nn.Dense(16, 3, rng=np.random.default_rng(0)))
    before = {k: p.array.copy() for k, p in model.parameters().items()}
    trainer = train.Trainer(
        model, loss=nn.SoftmaxCrossEntropy(), optimizer=optim.Adam(1e-2), seed=0
    )
    images, labels = data()
    first = trainer.evaluate((images, labels))
    trainer.fit((images, labels), epochs=4, batch_size=16, progress="none")
    last = trainer.evaluate((images, labels))
    assert last["loss"] < 0.5 * first["loss"]
    changed = {k for k, p in model.parameters().items() if (p.array != before[k]).any()}
    kept = {k for k in before if ".layer1." in k or "running_" in k}
    assert "1.weight" in changed
    assert "0.stem.conv.weight" in changed
    assert not kept & changed
    assert "0.fc.weight" not in before, "the old head is gone"


def test_inputs_and_outputs_have_the_declared_types():
    module = import_onnx(resnet())
    assert [str(p.type) for p in module.inputs("predict")] == ["float32[N,3,16,16]"]
    assert str(module.entry("predict").result("logits").type) == "float32[N,5]"


def test_wrong_use_is_refused_by_name():
    cell = nn.Imported(import_onnx(resnet()))
    with pytest.raises(InvalidInput, match=r"of Imported matches 'layer9\.\*'; there are stem"):
        cell.freeze("layer9.*")
    with pytest.raises(InvalidInput, match="takes image; got 2"):
        cell(*data(2))
    with pytest.raises(
        InvalidInput,
        match=r"'nowhere' is not prod.* at the end of the",
    ):
        import_onnx(resnet(), outputs=["nowhere"])
    model = resnet()
    model.graph.node[-1].name = "last"
    with pytest.raises(InvalidInput, match=r"output 'last' .*; there are 'logits'"):
        import_onnx(model, outputs=["last"])
    with pytest.raises(InvalidInput, match=r"output 'logit' .*; there are 'logits'"):
        import_onnx(resnet(), outputs=["logit"])


def test_a_length_read_as_a_number_is_known_when_the_arrays_are():
    """Exporters count positions to a length that they take out of a vector of sizes."""
    w = Writer()
    length = w.add("Gather", w.add("Shape", "x"), w.constant("one", np.array(1)), axis=0)
    bounds = [w.constant(n, np.array(v)) for n, v in (("start", 0), ("step", 1))]
    positions = w.add("Range", bounds[0], length, bounds[1])
    w.weight("table", 9, 4)
    w.add("Add", "x", w.add("Gather", "table", positions, axis=0), name="y")
    shape = ["N", "T", 4]
    model = w.model([("x", TensorProto.FLOAT, shape)], [("y", TensorProto.FLOAT, shape)])
    cell = nn.Imported(import_onnx(model))
    for size in (3, 5):
        x = np.random.default_rng(size).standard_normal((2, size, 4)).astype(np.float32)
        (wanted,) = ort.InferenceSession(model.SerializeToString()).run(None, {"x": x})
        np.testing.assert_allclose(cell(x), wanted, rtol=1e-6)


def normalized(channels=4):
    return nn.Sequential(
        nn.Conv2d(3, channels, 3),
        nn.BatchNorm2d(channels, momentum=0.2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dense(channels * 14 * 14, 3),
    )


def exported(cell):
    """What the cell predicts with, as an ONNX model with its batch normalization."""
    made = train.Trainer(cell, loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.1))
    images, labels = data(8)
    made.evaluate((images, labels))
    module = made.export(["predict"])
    held = {n: EmittedInitializer(t.array) for n, t in module.state.items()}
    model = emit(module.entry("predict"), initializers=held)
    for node in model.graph.node:
        if node.op_type == "BatchNormalization":
            node.attribute.append(helper.make_attribute("momentum", 0.8))
    return serialize(model)


def trained(cell, epochs=3):
    trainer = train.Trainer(cell, loss=nn.SoftmaxCrossEntropy(), optimizer=optim.SGD(0.05), seed=0)
    trainer.fit(data(), epochs=epochs, batch_size=16, progress="none")
    return {n: p.array.copy() for n, p in cell.parameters().items()}


def test_updated_batch_normalization_trains_as_the_layers_do():
    nn.seed(0)
    cell = normalized()
    module = import_onnx(exported(cell))
    imported = nn.Imported(module, batch_norm="updated")
    wanted, found = trained(cell), trained(imported)
    assert found.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-4, atol=1e-6)
    before = module.state["1.running_mean"].array
    assert (found["1.running_mean"] != before).all()


def untrained(merging, scale=1.0):
    """Two batch normalizations whose statistics are merged as an exporter merges equal tensors.

    "identity": the second layer reads all that is equal through Identity, as PyTorch writes it.
    "shared": both read the same statistics. "bias": the bias, too. "all": all four tensors.
    """
    w = Writer()
    ones, zeros = np.ones(4, np.float32), np.zeros(4, np.float32)
    held = {
        "weight": np.float32(scale) * ones,
        "bias": zeros,
        "running_mean": zeros,
        "running_var": ones,
    }
    own = [w.constant(f"a.bn.{n}", v) for n, v in held.items()]
    if merging == "bias":
        own[1] = own[2]
    if merging == "identity":
        other = [w.add("Identity", x, name=x.replace("a.", "b.")) for x in own]
    elif merging == "all":
        other = own
    else:
        other = [w.weight("b.bn.weight", 4, mean=1.0), w.weight("b.bn.bias", 4), *own[2:]]
    x = w.add("Conv", "image", w.weight("a.conv.weight", 4, 3, 3, 3), pads=[1] * 4)
    x = w.add("Relu", w.add("BatchNormalization", x, *own, momentum=0.8))
    x = w.add("Conv", x, w.weight("b.conv.weight", 4, 4, 3, 3, mean=0.2), pads=[1] * 4)
    x = w.add("Relu", w.add("BatchNormalization", x, *other, momentum=0.8))
    x = w.add("Flatten", w.add("GlobalAveragePool", x))
    w.add("Gemm", x, w.weight("fc.weight", 3, 4), name="logits", transB=1)
    shape = ["N", 3, 16, 16]
    inputs, outputs = (
        [("image", TensorProto.FLOAT, shape)],
        [("logits", TensorProto.FLOAT, ["N", 3])],
    )
    return w.model(inputs, outputs)


@pytest.mark.parametrize("merging", ["identity", "shared", "bias"])
def test_merged_statistics_of_untrained_layers_move_each_by_its_own_batches(merging):
    model = untrained(merging)
    images, _ = data(6)
    (wanted,) = ort.InferenceSession(model.SerializeToString()).run(None, {"image": images})
    module = import_onnx(model)
    np.testing.assert_allclose(nn.Imported(module)(images), wanted, rtol=1e-4, atol=1e-5)
    found = trained(nn.Imported(module, batch_norm="updated"), epochs=1)
    moved = {n: found[n] for n, t in module.state.items() if t.role is Role.BUFFER}
    means, variances = ([v for n, v in moved.items() if f"_{x}" in n] for x in ("mean", "var"))
    for one, other in (means, variances):
        assert (one != other).all()


def test_layers_merged_through_identity_train_as_separate_layers_do():
    separate = untrained("identity")
    copies = {n.output[0]: n.input[0] for n in separate.graph.node if n.op_type == "Identity"}
    held = {t.name: numpy_helper.to_array(t) for t in separate.graph.initializer}
    nodes = [n for n in separate.graph.node if n.op_type != "Identity"]
    del separate.graph.node[:]
    separate.graph.node.extend(nodes)
    separate.graph.initializer.extend(
        numpy_helper.from_array(held[source], name) for name, source in copies.items()
    )
    cells = [
        nn.Imported(import_onnx(m), batch_norm="updated") for m in (separate, untrained("identity"))
    ]
    wanted, found = (trained(cell, epochs=1) for cell in cells)
    assert found.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_array_equal(found[name], wanted[name])


def test_statistics_that_may_be_of_one_layer_or_of_two_are_refused_with_the_way_out():
    module = import_onnx(untrained("all"))
    nn.Imported(module)
    words = "'a.bn.running_mean' .* 2 batch normalizations .* one layer applied 2 times"
    with pytest.raises(InvalidInput, match=words):
        nn.Imported(module, batch_norm="updated")


@pytest.mark.parametrize(
    ("merging", "words"),
    [
        ("identity", "import the ONNX file again"),
        ("shared", "import the ONNX file again"),
        ("bias", "which another node reads as a weight"),
    ],
)
def test_modules_imported_before_statistics_were_separated_are_refused(merging, words, monkeypatch):
    monkeypatch.setattr(importer, "separated", lambda g, _: ([*g.node], [*g.initializer]))
    module = import_onnx(untrained(merging))
    with pytest.raises(InvalidInput, match=words):
        nn.Imported(module, batch_norm="updated")


def test_a_trained_layer_applied_twice_moves_its_statistics_twice():
    module = import_onnx(untrained("all", scale=np.array([1, 2, 3, 4])))
    found = trained(nn.Imported(module, batch_norm="updated"), epochs=1)
    assert (found["a.bn.running_mean"] != 0).all()


def test_a_network_without_batch_normalization_has_no_statistics_to_update():
    nn.seed(0)
    module = import_onnx(exported(nn.Sequential(nn.Flatten(), nn.Dense(3 * 16 * 16, 3))))
    with pytest.raises(InvalidInput, match="export it unfolded"):
        nn.Imported(module, batch_norm="updated")
    with pytest.raises(InvalidInput, match="batch_norm must be"):
        nn.Imported(module, batch_norm="sometimes")  # type: ignore[arg-type]
