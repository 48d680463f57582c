"""What `gpu.py` trains: two networks, their batches, starting weights and the work of a step.

Needs numpy alone. Both sides name a weight alike, and draw it by its name.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
SEED: Final = 7
EXPANSION: Final = 4
"""Channels after a bottleneck by its width, and the width inside a layer by that around it."""
SGD_BYTES: Final = 16
"""For each parameter: weight and momentum, each read and written in float32."""
ADAM_BYTES: Final = 24
"""For each parameter: weight and two moments."""
SAVED_BYTES: Final = 4
"""For each number that the backward pass reads: written and read once in 16 bits."""


@dataclass(frozen=True)
class Vision:
    """ResNet with bottlenecks (He et al. 2016) on images of bytes; SGD with momentum."""

    batch: int = 128
    side: int = 224
    blocks: tuple[int, ...] = (3, 4, 6, 3)
    width: int = 64
    classes: int = 1000
    lr: float = 0.05
    momentum: float = 0.9


@dataclass(frozen=True)
class Language:
    """GPT-2 small (Radford et al. 2019), its vocabulary rounded up to a multiple of 64; Adam."""

    batch: int = 8
    length: int = 1024
    vocabulary: int = 50304
    width: int = 768
    heads: int = 12
    layers: int = 12
    lr: float = 3e-4


Case = Vision | Language


@dataclass(frozen=True)
class Work:
    """What a step does at least: floating-point operations, bytes to and from memory."""

    flops: float
    bytes: float
    parameters: int


CASES: Final[Mapping[str, Case]] = {
    "ResNet-50 B128": Vision(),
    "Transformer 124M B8": Language(),
    "small ResNet": Vision(batch=4, side=32, blocks=(1, 1), width=8, classes=10),
    "small Transformer": Language(
        batch=2, length=16, vocabulary=64, width=32, heads=2, layers=2, lr=1e-3
    ),
}


def weight(name: str, shape: tuple[int, ...]) -> Array:
    """The starting weight of this name: of normalizations one, of biases zero, else drawn."""
    if len(shape) < 2:
        return np.full(shape, float("norm" in name and name.endswith("weight")), np.float32)
    rng = np.random.default_rng([SEED, zlib.crc32(name.encode())])
    reach = float(2 / np.prod(shape[1:])) ** 0.5 if len(shape) == 4 else 0.02
    drawn = reach * rng.standard_normal(shape, np.float32)
    return np.asarray(drawn, np.float32)


def batches(case: Case) -> Iterator[tuple[Array, Array]]:
    """Endless batches by seed: images (N, 3, S, S) uint8, or words (N, T) int64; and labels."""
    rng = np.random.default_rng(SEED)
    while True:
        if isinstance(case, Vision):
            shape = (case.batch, 3, case.side, case.side)
            images = rng.integers(0, 256, shape, np.uint8)
            yield images, rng.integers(0, case.classes, case.batch)
        else:
            words = rng.integers(0, case.vocabulary, (case.batch, case.length + 1))
            yield words[:, :-1].copy(), words[:, 1:].copy()


def work(case: Case) -> Work:
    """The least work of a step. A backward pass has two products for each of the forward one."""
    return _vision_work(case) if isinstance(case, Vision) else _language_work(case)


@dataclass
class _Count:
    """Multiplications, outputs and weights of convolutions, for one image."""

    products: float = 0
    outputs: float = 0
    weights: int = 0
    norms: int = 0
    first: float = field(default=0, init=False)

    def conv(self, inputs: int, outputs: int, kernel: int, side: int) -> None:
        self.weights += inputs * outputs * kernel**2
        self.norms += 2 * outputs
        self.outputs += outputs * side**2
        products = inputs * outputs * kernel**2 * side**2
        self.products += products
        self.first = self.first or products


def _vision_work(case: Vision) -> Work:
    count, side, inputs = _Count(), case.side // 2, case.width
    count.conv(3, case.width, 7, side)
    side //= 2
    for stage, blocks in enumerate(case.blocks):
        width = case.width << stage
        for i in range(blocks):
            before, side = side, side // 2 if stage and not i else side
            count.conv(inputs, width, 1, before)
            count.conv(width, width, 3, side)
            count.conv(width, EXPANSION * width, 1, side)
            if not i:
                count.conv(inputs, EXPANSION * width, 1, side)
            inputs = EXPANSION * width
    head = inputs * case.classes
    parameters = count.weights + count.norms + head + case.classes
    # The gradient with respect to the image is not computed.
    products = 3 * (count.products + head) - count.first
    moved = SAVED_BYTES * count.outputs + 3 * case.side**2
    return Work(2 * case.batch * products, SGD_BYTES * parameters + case.batch * moved, parameters)


def _language_work(case: Language) -> Work:
    width, inner = case.width, EXPANSION * case.width
    layer = 4 * width**2 + 2 * width * inner
    biases = 4 * width + inner + width + 4 * width
    embedded = case.vocabulary * width
    parameters = case.layers * (layer + biases) + embedded + case.length * width + 2 * width
    # A word attends to half of the others: scores and sums are a product each.
    attention = case.layers * 2 * width * case.length / 2
    words = case.batch * case.length
    flops = 2 * 3 * words * (case.layers * layer + attention + embedded)
    # Inputs of the products of a layer: 6 of the width around it, one of that inside; and logits.
    saved = case.layers * (6 * width + inner) + case.vocabulary
    return Work(flops, ADAM_BYTES * parameters + words * SAVED_BYTES * saved, parameters)
