"""Well-known networks from papers, ready to train: each with its source and its size.

`network(name)` makes one by the name that the command line takes (`triplane train zoo:resnet18`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from triplane.proto.errors import NotFound
from triplane.unified_ir.frontend.cell import Cell
from triplane.unified_ir.zoo.convnets import LeafCnn, LeNet
from triplane.unified_ir.zoo.mobilenet import MobileNetV2
from triplane.unified_ir.zoo.resnet import (
    BasicBlock,
    Bottleneck,
    ResNet,
    resnet8,
    resnet18,
    resnet50,
)
from triplane.unified_ir.zoo.text import CharLstm, TextDecoder, TextEncoder

NETWORKS: Final[Mapping[str, Callable[..., Cell]]] = MappingProxyType(
    {
        "lenet": LeNet,
        "leaf-cnn": LeafCnn,
        "resnet8": resnet8,
        "resnet18": resnet18,
        "resnet50": resnet50,
        "mobilenet-v2": MobileNetV2,
        "char-lstm": CharLstm,
        "text-encoder": TextEncoder,
        "text-decoder": TextDecoder,
    }
)
"""By the name on the command line: the function that makes the network."""


def network(name: str, **options: Any) -> Cell:
    """Return a new network of the zoo; options are those of its class or function."""
    if name not in NETWORKS:
        raise NotFound(f"the zoo has no {name!r}; it has {', '.join(NETWORKS)}")
    return NETWORKS[name](**options)


__all__ = [
    "NETWORKS",
    "BasicBlock",
    "Bottleneck",
    "CharLstm",
    "LeNet",
    "LeafCnn",
    "MobileNetV2",
    "ResNet",
    "TextDecoder",
    "TextEncoder",
    "network",
    "resnet8",
    "resnet18",
    "resnet50",
]
