"""An ONNX network that other software wrote: compared, frozen, given another head, trained."""

import numpy as np
import onnxruntime as ort
import pytest
from tests.onnx.networks import resnet

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import import_onnx, nn, optim, train

FROZEN = "layer1.*"


def data(n=64, classes=3, seed=1):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, n)
    images = rng.standard_normal((n, 3, 16, 16)).astype(np.float32)
    images[np.arange(n), labels] += 2.0
    return images, labels


@pytest.mark.parametrize("opset", [11, 17])
def test_the_imported_network_gives_what_onnxruntime_gives(opset):
    model = resnet(opset=opset)
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


def test_weights_and_statistics_keep_names_and_roles(tmp_path):
    module = import_onnx(resnet())
    roles = {name: str(t.role) for name, t in module.state.items()}
    assert roles["stem.conv.weight"] == roles["fc.bias"] == "parameter"
    assert roles["layer2.down.bn.running_mean"] == "buffer"
    assert [str(p.type) for p in module.inputs("predict")] == ["float32[N,3,16,16]"]
    assert str(module.entry("predict").result("logits").type) == "float32[N,5]"


def test_wrong_use_is_refused_by_name():
    cell = nn.Imported(import_onnx(resnet()))
    with pytest.raises(InvalidInput, match=r"of Imported fits 'layer9\.\*'; there are stem"):
        cell.freeze("layer9.*")
    with pytest.raises(InvalidInput, match="takes image; got 2"):
        cell(*data(2))
    with pytest.raises(InvalidInput, match="output 'nowhere' is given by no node"):
        import_onnx(resnet(), outputs=["nowhere"])
