"""The networks both sides train: layers, starting weights and batches, in numpy alone.

Either side builds the same layers in its own way from this description, so a comparison starts from
equal weights and sees equal batches. Images are the shipped 8x8 digits enlarged to 28x28 on a
constant background: tied maxima in pooling are then the rule, as on real scans.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
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
class Case:
    """A network, its batch and its optimizer: SGD with this rate and momentum."""

    name: str
    layers: tuple[Layer, ...]
    batch: int
    lr: float
    momentum: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one batch of inputs."""
        first = self.layers[0]
        return (self.batch, 1, 28, 28) if isinstance(first, Conv) else (self.batch, first.inputs)

    @property
    def classes(self) -> int:
        """Number of labels."""
        return self.layers[-1].outputs


_MLP = (Dense(784, 512), Dense(512, 256), Dense(256, 10))
_LENET = (
    Conv(1, 6, 5, 2), Conv(6, 16, 5, 0), Dense(400, 120), Dense(120, 84), Dense(84, 10),
)  # fmt: skip
_LEAF = (Conv(1, 32, 5, 2), Conv(32, 64, 5, 2), Dense(3136, 2048), Dense(2048, 62))

CASES: Final = {
    case.name: case
    for case in (
        Case("MLP B64 momentum", _MLP, 64, 0.05, 0.9),
        Case("LeNet B32 SGD", _LENET, 32, 0.05),
        Case("LeNet B128 SGD", _LENET, 128, 0.05),
        Case("LEAF CNN B10 SGD", _LEAF, 10, 0.02),
        Case("LEAF CNN B32 SGD", _LEAF, 32, 0.02),
    )
}


def weights(case: Case) -> dict[str, Array]:
    """Starting weights by name: `0.weight`, `0.bias`, ...; uniform in +-1/sqrt(fan in)."""
    rng = np.random.default_rng(SEED)
    found: dict[str, Array] = {}
    for i, layer in enumerate(case.layers):
        shape: tuple[int, ...] = (layer.outputs, layer.inputs)
        if isinstance(layer, Conv):
            shape = (*shape, layer.kernel, layer.kernel)
        reach = float(np.prod(shape[1:])) ** -0.5
        found[f"{i}.weight"] = rng.uniform(-reach, reach, shape).astype(np.float32)
        found[f"{i}.bias"] = rng.uniform(-reach, reach, layer.outputs).astype(np.float32)
    return found


def batches(case: Case) -> Iterator[tuple[Array, Array]]:
    """Endless batches (images in [0, 1], int64 labels), in an order fixed by the seed."""
    with np.load(DIGITS) as held:
        images, labels = held["x"].astype(np.float32) / 16, held["y"].astype(np.int64)
    rng = np.random.default_rng(SEED)
    while True:
        chosen = rng.integers(0, len(images), case.batch)
        large = np.kron(images[chosen], np.ones((1, 3, 3), np.float32))
        framed = np.pad(large, ((0, 0), (2, 2), (2, 2)))
        yield framed.reshape(case.shape), labels[chosen]
