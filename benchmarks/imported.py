"""Networks of torchvision that both sides train: ours as an import of the other side's export."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
CLASSES: Final = 10
SEED: Final = 7


@dataclass(frozen=True)
class Case:
    """A network by torchvision's name, its batch of square images and its rate of SGD.

    options: arguments of the constructor; they switch off what draws random numbers.
    """

    name: str
    network: str
    side: int
    batch: int
    lr: float = 0.01
    momentum: float = 0.9
    options: Mapping[str, Any] = field(default_factory=dict)


# fmt: off
CASES: Final = {
    case.name: case
    for case in (
        Case("ResNet-18 B16 64px", "resnet18", 64, 16),
        Case("MobileNetV2 B16 64px", "mobilenet_v2", 64, 16, options={"dropout": 0.0}),
        Case("MobileNetV3-small B16 96px", "mobilenet_v3_small", 96, 16, options={"dropout": 0.0}),
        Case("EfficientNet-B0 B8 96px", "efficientnet_b0", 96, 8,
             options={"dropout": 0.0, "stochastic_depth_prob": 0.0}),
        Case("ShuffleNetV2 B16 96px", "shufflenet_v2_x1_0", 96, 16),
        Case("DenseNet-121 B8 64px", "densenet121", 64, 8),
    )
}
# fmt: on


def batches(case: Case) -> Iterator[tuple[Array, Array]]:
    """Endless batches of noise around one image per class, float32 (N, 3, S, S), int64 labels."""
    rng = np.random.default_rng(SEED)
    centres = rng.normal(size=(CLASSES, 3, case.side, case.side)).astype(np.float32)
    while True:
        labels = rng.integers(0, CLASSES, case.batch)
        noise = rng.normal(size=(case.batch, 3, case.side, case.side)).astype(np.float32)
        yield centres[labels] + noise, labels
