"""The networks every side trains: layers, starting weights and batches, in numpy alone.

Each side builds the same layers in its own way from this description, so a comparison starts from
equal weights and sees equal batches. Images are the shipped 8x8 digits enlarged on a constant
background: tied maxima in pooling are then the rule, as on real scans. Text is drawn by seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Shape = tuple[int, ...]
DIGITS: Final = Path(__file__).parents[1] / "unified_ir" / "data" / "digits.npz"
SEED: Final = 7


@dataclass(frozen=True)
class Conv:
    """`kernel` x `kernel` convolution, then ReLU and 2x2 maximum."""

    inputs: int
    outputs: int
    kernel: int
    padding: int


@dataclass(frozen=True)
class Dense:
    """Product with a weight (outputs, inputs), plus bias; ReLU except after the last layer."""

    inputs: int
    outputs: int


Layer = Conv | Dense


@dataclass(frozen=True)
class Residual:
    """Two 3x3 convolutions with batch normalization around a sum (He et al. 2016).

    The sum's other side is a 1x1 convolution with normalization where the shape changes.
    """

    inputs: int
    outputs: int
    stride: int

    @property
    def changes(self) -> bool:
        """Whether the other side needs a convolution."""
        return self.stride != 1 or self.inputs != self.outputs


@dataclass(frozen=True)
class Stack:
    """Convolutions, each with ReLU and pooling, then dense layers; `sides` of a square image."""

    layers: tuple[Layer, ...]
    channels: int = 1
    side: int = 28

    @property
    def classes(self) -> int:
        """Number of labels."""
        return self.layers[-1].outputs


@dataclass(frozen=True)
class ResNet:
    """A 3x3 convolution with normalization and ReLU, residual blocks, the mean, a dense layer."""

    blocks: tuple[Residual, ...]
    classes: int = 10
    channels: int = 3
    side: int = 32


@dataclass(frozen=True)
class CharLstm:
    """Characters embedded, layers of LSTM over time, a dense layer on the last state.

    One bias per gate and layer: PyTorch's second one stays zero.
    """

    vocabulary: int = 80
    embedding: int = 8
    hidden: int = 256
    layers: int = 2
    time: int = 80

    @property
    def classes(self) -> int:
        """Number of labels."""
        return self.vocabulary


@dataclass(frozen=True)
class Transformer:
    """Words embedded, encoder layers with normalization first, a dense layer on the mean word."""

    vocabulary: int = 64
    width: int = 64
    heads: int = 4
    inner: int = 256
    layers: int = 2
    time: int = 32

    @property
    def classes(self) -> int:
        """Number of labels."""
        return self.vocabulary


Network = Stack | ResNet | CharLstm | Transformer


@dataclass(frozen=True)
class Case:
    """A network, its batch and its optimizer: SGD with this rate and momentum, or Adam."""

    name: str
    network: Network
    batch: int
    lr: float
    momentum: float = 0.0
    adam: bool = False


_MLP = Stack((Dense(784, 512), Dense(512, 256), Dense(256, 10)))
_LENET = Stack(
    (Conv(1, 6, 5, 2), Conv(6, 16, 5, 0), Dense(400, 120), Dense(120, 84), Dense(84, 10))
)
_LEAF = Stack((Conv(1, 32, 5, 2), Conv(32, 64, 5, 2), Dense(3136, 2048), Dense(2048, 62)))
_CNN = Stack((Conv(3, 16, 3, 1), Conv(16, 32, 3, 1), Dense(2048, 10)), channels=3, side=32)
_RESNET8 = ResNet((Residual(16, 16, 1), Residual(16, 32, 2), Residual(32, 64, 2)))

CASES: Final = {
    case.name: case
    for case in (
        Case("MLP B64 momentum", _MLP, 64, 0.05, 0.9),
        Case("LeNet B32 SGD", _LENET, 32, 0.05),
        Case("LeNet B128 SGD", _LENET, 128, 0.05),
        Case("LEAF CNN B10 SGD", _LEAF, 10, 0.02),
        Case("LEAF CNN B32 SGD", _LEAF, 32, 0.02),
        Case("CNN B32 Adam", _CNN, 32, 1e-3, adam=True),
        Case("ResNet-8 B32 momentum", _RESNET8, 32, 0.05, 0.9),
        Case("Char LSTM B10 SGD", CharLstm(), 10, 0.5),
        Case("Transformer B16 Adam", Transformer(), 16, 1e-3, adam=True),
    )
}


def shapes(network: Network) -> dict[str, Shape]:
    """Shape of every starting weight by its name, in order."""
    return dict(_SHAPES[type(network)](network))


def weights(case: Case) -> dict[str, Array]:
    """Starting weights: uniform in +-1/sqrt(fan in); of normalizations one, and zero for biases."""
    rng = np.random.default_rng(SEED)
    found: dict[str, Array] = {}
    reach = 1.0
    for name, shape in shapes(case.network).items():
        if "norm" in name:
            found[name] = np.full(shape, float(name.endswith("weight")), np.float32)
            continue
        if len(shape) > 1:
            reach = float(np.prod(shape[1:])) ** -0.5
        found[name] = rng.uniform(-reach, reach, shape).astype(np.float32)
    return found


def _stack_shapes(network: Stack) -> Iterator[tuple[str, Shape]]:
    for i, layer in enumerate(network.layers):
        kernel = (layer.kernel, layer.kernel) if isinstance(layer, Conv) else ()
        yield f"{i}.weight", (layer.outputs, layer.inputs, *kernel)
        yield f"{i}.bias", (layer.outputs,)


def _normed(name: str, inputs: int, outputs: int, kernel: int) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (outputs, inputs, kernel, kernel)
    yield f"{name}_norm.weight", (outputs,)
    yield f"{name}_norm.bias", (outputs,)


def _resnet_shapes(network: ResNet) -> Iterator[tuple[str, Shape]]:
    yield from _normed("stem", network.channels, network.blocks[0].inputs, 3)
    for i, block in enumerate(network.blocks):
        yield from _normed(f"blocks.{i}.first", block.inputs, block.outputs, 3)
        yield from _normed(f"blocks.{i}.second", block.outputs, block.outputs, 3)
        if block.changes:
            yield from _normed(f"blocks.{i}.short", block.inputs, block.outputs, 1)
    yield "head.weight", (network.classes, network.blocks[-1].outputs)
    yield "head.bias", (network.classes,)


def _lstm_shapes(network: CharLstm) -> Iterator[tuple[str, Shape]]:
    yield "embedding.weight", (network.vocabulary, network.embedding)
    for i in range(network.layers):
        inputs = network.hidden if i else network.embedding
        yield f"lstm.{i}.weight_ih", (4 * network.hidden, inputs)
        yield f"lstm.{i}.weight_hh", (4 * network.hidden, network.hidden)
        yield f"lstm.{i}.bias", (4 * network.hidden,)
    yield "head.weight", (network.vocabulary, network.hidden)
    yield "head.bias", (network.vocabulary,)


def _transformer_shapes(network: Transformer) -> Iterator[tuple[str, Shape]]:
    width, inner = network.width, network.inner
    yield "embedding.weight", (network.vocabulary, width)
    for i in range(network.layers):
        for name, outputs, inputs in (
            ("norm_1", width, 0), ("qkv", 3 * width, width), ("out", width, width),
            ("norm_2", width, 0), ("up", inner, width), ("down", width, inner),
        ):  # fmt: skip
            yield f"layers.{i}.{name}.weight", (outputs, inputs) if inputs else (outputs,)
            yield f"layers.{i}.{name}.bias", (outputs,)
    yield "head.weight", (network.vocabulary, width)
    yield "head.bias", (network.vocabulary,)


_SHAPES: Final[Mapping[type, Any]] = {
    Stack: _stack_shapes,
    ResNet: _resnet_shapes,
    CharLstm: _lstm_shapes,
    Transformer: _transformer_shapes,
}


def batches(case: Case) -> Iterator[tuple[Array, Array]]:
    """Endless batches (x, int64 labels), in an order fixed by the seed.

    x: images in [0, 1], (N, C, S, S), flat where the first layer is dense; or words (N, T) int64.
    """
    network = case.network
    if isinstance(network, (Stack, ResNet)):
        return _image_batches(case, network)
    return _word_batches(case, network)


def _image_batches(case: Case, network: Stack | ResNet) -> Iterator[tuple[Array, Array]]:
    with np.load(DIGITS) as held:
        images, labels = held["x"].astype(np.float32) / 16, held["y"].astype(np.int64)
    rng = np.random.default_rng(SEED)
    margin = (network.side - 24) // 2
    while True:
        chosen = rng.integers(0, len(images), case.batch)
        large = np.kron(images[chosen], np.ones((1, 3, 3), np.float32))
        framed = np.pad(large, ((0, 0), (margin, margin), (margin, margin)))
        batch = np.repeat(framed[:, None], network.channels, axis=1)
        flat = isinstance(network, Stack) and isinstance(network.layers[0], Dense)
        yield batch.reshape(case.batch, -1) if flat else batch, labels[chosen]


def _word_batches(case: Case, network: CharLstm | Transformer) -> Iterator[tuple[Array, Array]]:
    """Words whose label is the sum of the first and the last."""
    rng = np.random.default_rng(SEED)
    while True:
        words = rng.integers(0, network.vocabulary, (case.batch, network.time))
        yield words, (words[:, 0] + words[:, -1]) % network.vocabulary
