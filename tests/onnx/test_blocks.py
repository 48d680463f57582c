"""Folding repeats: fewer nodes, the same bits."""

from collections import Counter

import numpy as np
import onnx
import pytest
from onnx import helper, inliner

from triplane.proto.errors import Conflict
from triplane.unified_ir import nn, ops, optim, train
from triplane.unified_ir.onnx import emit, fold_repeats, node_count, serialize
from triplane.unified_ir.onnx.blocks import BLOCKS
from triplane.unified_ir.runtime.session import Session

WIDTH, HEADS, WORDS, TIME = 16, 2, 11, 6


class Attention(nn.Cell):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Dense(WIDTH, 3 * WIDTH), nn.Dense(WIDTH, WIDTH)

    def construct(self, x):  # x: (N, T, C)
        n, t = x.shape[0], x.shape[1]
        made = ops.reshape(self.qkv(x), (n, t, 3, HEADS, WIDTH // HEADS))
        q, k, v = (ops.transpose(made[:, :, i], perm=(0, 2, 1, 3)) for i in range(3))
        scores = ops.softmax(ops.matmul(q, ops.transpose(k, perm=(0, 1, 3, 2))) * 0.35, axis=-1)
        joined = ops.transpose(ops.matmul(scores, v), perm=(0, 2, 1, 3))
        return self.out(ops.reshape(joined, (n, t, WIDTH)))


class Layer(nn.Cell):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Dense(WIDTH, 2 * WIDTH), nn.Dense(2 * WIDTH, WIDTH)

    def construct(self, x):
        x = x + self.attention(self.first(x))
        return x + self.down(ops.gelu(self.up(self.second(x))))


class Transformer(nn.Cell):
    def __init__(self, layers):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.CellList([Layer() for _ in range(layers)])
        self.head = nn.Dense(WIDTH, WORDS)

    def construct(self, x):
        x = self.words(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x[:, -1])


class Bottleneck(nn.Cell):
    """He et al. 2016, figure 5."""

    def __init__(self, inputs, width, stride):
        super().__init__()
        self.a, self.b, self.c = (
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False),
            nn.Conv2d(width, 4 * width, 1, bias=False),
        )
        self.norms = nn.CellList([nn.BatchNorm2d(c) for c in (width, width, 4 * width)])
        self.short = None
        if stride != 1 or inputs != 4 * width:
            self.short = nn.Conv2d(inputs, 4 * width, 1, stride=stride, bias=False)
            self.short_norm = nn.BatchNorm2d(4 * width)

    def construct(self, x):
        y = ops.relu(self.norms[0](self.a(x)))
        y = ops.relu(self.norms[1](self.b(y)))
        y = self.norms[2](self.c(y))
        return ops.relu(y + (x if self.short is None else self.short_norm(self.short(x))))


class ResNet50(nn.Cell):
    """The 50-layer network's blocks, an eighth as wide."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        blocks, inputs = [], 8
        for stage, count in enumerate((3, 4, 6, 3)):
            for i in range(count):
                width = 8 << stage
                blocks.append(Bottleneck(inputs, width, 2 if stage and not i else 1))
                inputs = 4 * width
        self.blocks = nn.CellList(blocks)
        self.head = nn.Dense(inputs, 10)

    def construct(self, x):
        x = ops.relu(self.norm(self.stem(x)))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def training_step(cell, *batch):
    trainer = train.Trainer(cell, loss=nn.SoftmaxCrossEntropy(), optimizer=optim.Adam(1e-3))
    trainer.prepare(*batch)
    return trainer.train_function(), {**trainer.state(), "x": batch[0], "y": batch[1]}


def transformer(layers):
    rng = np.random.default_rng(0)
    x = rng.integers(0, WORDS, (3, TIME))
    return training_step(Transformer(layers), x, rng.integers(0, WORDS, 3))


def resnet():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, 16, 16)).astype(np.float32)
    return training_step(ResNet50(), x, rng.integers(0, 10, 2))


def results(model, arrays):
    return Session(serialize(model)).run(arrays)


@pytest.mark.parametrize("made", [lambda: transformer(24), resnet], ids=["transformer", "resnet50"])
def test_a_deep_training_step_shrinks_by_sixty_percent(made):
    model = emit(made()[0])
    folded = fold_repeats(model)
    onnx.checker.check_model(folded)
    assert node_count(folded) <= 0.4 * node_count(model), (node_count(folded), node_count(model))


LONG = pytest.mark.long  # onnxruntime loads a step of some thousand nodes in seconds


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(lambda: transformer(3), id="transformer 3"),
        pytest.param(lambda: transformer(24), id="transformer 24", marks=LONG),
        pytest.param(resnet, id="resnet50", marks=LONG),
    ],
)
def test_a_folded_step_computes_the_same_bits(made):
    function, arrays = made()
    model = emit(function)
    whole, short = results(model, arrays), results(fold_repeats(model), arrays)
    assert whole.keys() == short.keys()
    for name, array in whole.items():
        assert array.tobytes() == short[name].tobytes(), name


def test_inlining_gives_back_every_node():
    model = emit(transformer(3)[0])
    folded = fold_repeats(model)
    assert len(folded.functions) > 0
    back = inliner.inline_local_functions(folded)
    assert Counter(n.op_type for n in back.graph.node) == Counter(
        n.op_type for n in model.graph.node
    )


def test_a_folded_model_is_not_folded_again():
    folded = fold_repeats(emit(transformer(3)[0]))
    with pytest.raises(Conflict, match=BLOCKS):
        fold_repeats(folded)


def test_a_model_without_repeats_stays_as_it_is():
    node = helper.make_node("Tanh", ["x"], ["y"])
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [node], "g", [info("x", 1, ["N"])], [info("y", 1, ["N"])]
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])
    assert fold_repeats(model) == model
