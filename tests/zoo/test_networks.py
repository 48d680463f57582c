"""Each network of the zoo has its paper's size, runs, learns and is written as ONNX."""

import numpy as np
import onnx
import pytest

from triplane.proto.errors import NotFound
from triplane.unified_ir import nn, optim, train, zoo
from triplane.unified_ir.frontend import trace
from triplane.unified_ir.ir import TensorSpec
from triplane.unified_ir.onnx import emit

SIZES = {
    "lenet": 61_706,
    "leaf-cnn": 6_603_710,
    "resnet8": 78_042,
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "mobilenet-v2": 3_504_872,
    "char-lstm": 817_872,
    "text-encoder": 104_322,
    "text-decoder": 108_352,
}
"""Counted in the papers' own tables or in PyTorch's models of the same name."""

WORDS = {"char-lstm", "text-encoder", "text-decoder"}
IMAGES = {"lenet": (1, 28), "leaf-cnn": (1, 28), "resnet8": (3, 32)}


def inputs(name, rows):
    rng = np.random.default_rng(0)
    if name in WORDS:
        return rng.integers(0, 64, (rows, 5))
    channels, side = IMAGES.get(name, (3, 64))
    return rng.normal(size=(rows, channels, side, side)).astype(np.float32)


def count(cell):
    return sum(p.array.size for p in cell.parameters().values() if p.trainable)


@pytest.mark.parametrize("name", zoo.NETWORKS)
def test_its_size_is_known(name):
    assert count(zoo.network(name)) == SIZES[name]


@pytest.mark.parametrize("name", zoo.NETWORKS)
def test_it_is_written_as_onnx_for_any_batch(name):
    cell = zoo.network(name).eval()
    x = inputs(name, 2)
    spec = TensorSpec(("N", *x.shape[1:]), str(x.dtype))
    model = emit(trace(cell, spec))
    onnx.checker.check_model(model)
    (out,) = model.graph.output
    assert out.type.tensor_type.shape.dim[0].dim_param == "N"


SMALL: dict[str, dict[str, float]] = {
    "lenet": {},
    "resnet8": {},
    "char-lstm": {"hidden": 32},
    "text-encoder": {"classes": 4, "width": 16},
}


@pytest.mark.parametrize("name", SMALL)
def test_it_learns_a_batch_by_heart(name):
    nn.seed(0)
    cell = zoo.network(name, **SMALL[name])
    x, y = inputs(name, 8), np.arange(8) % 4
    optimizer = optim.Adam(1e-2)
    trainer = train.Trainer(cell, loss=nn.SoftmaxCrossEntropy(), optimizer=optimizer)
    history = trainer.fit((x, y), epochs=25, batch_size=8, progress="none")
    losses = history["loss"]
    assert losses[-1] < 0.5 * losses[0], losses


def test_a_name_the_zoo_lacks_is_answered_with_those_it_has():
    with pytest.raises(NotFound, match=r"no 'vgg'; it has lenet, leaf-cnn"):
        zoo.network("vgg")


def test_a_decoder_learns_the_next_word_and_sees_none_that_comes():
    nn.seed(0)
    cell = zoo.TextDecoder(8, width=16, layers=1)
    words = (np.arange(6) + np.arange(8)[:, None]) % 8
    trainer = train.Trainer(cell, loss=nn.SoftmaxCrossEntropy(), optimizer=optim.Adam(1e-2))
    losses = trainer.fit((words[:, :-1], words[:, 1:]), epochs=30, batch_size=8, progress="none")
    assert losses["loss"][-1] < 0.5 * losses["loss"][0]
    cell.eval()
    other = words[:, :-1].copy()
    other[:, 3:] = 0
    np.testing.assert_array_equal(cell(words[:, :-1])[:, :3], cell(other)[:, :3])
    assert (cell(words[:, :-1])[:, 3:] != cell(other)[:, 3:]).any()
