"""Triplane's side of `gpu.py`: the Trainer's step on the engine xla, products in bfloat16."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import gpu_cases
import jax
import numpy as np
from gpu_cases import Language, Vision
from side_ours import stepping
from worker import Step, peak_bytes, serve

from triplane.unified_ir import nn, ops, optim, train
from triplane.unified_ir.zoo.resnet import Bottleneck, ResNet


class Photos(nn.Cell):
    """A residual network on bytes."""

    def __init__(self, case: Vision) -> None:
        super().__init__()
        self.net = ResNet(Bottleneck, case.blocks, width=case.width, classes=case.classes)

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        """x: (N, 3, S, S) uint8 -> (N, classes)."""
        return self.net(x.cast("float32") / 255.0)


class Decoder(nn.Cell):
    """The next word at every position; the embedding's weight is the last product's as well."""

    def __init__(self, case: Language) -> None:
        super().__init__()
        width = case.width
        self.embedding = nn.Embedding(case.vocabulary, width)
        self.places = nn.Parameter(np.zeros((case.length, width), np.float32))
        self.layers = nn.CellList(
            [
                nn.TransformerEncoderLayer(
                    width,
                    case.heads,
                    gpu_cases.EXPANSION * width,
                    p_drop=0.0,
                    activation=ops.gelu,
                    norm_first=True,
                )
                for _ in range(case.layers)
            ]
        )
        self.norm = nn.LayerNorm(width)

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        """x: (N, T) -> (N, T, vocabulary)."""
        y = self.embedding(x) + self.places
        for layer in self.layers:
            y = layer(y, causal=True)
        return self.norm(y) @ self.embedding.weight.transpose(1, 0)


def side(case: gpu_cases.Case) -> tuple[Step, dict[str, Any]]:
    """A training step from the case's starting weights."""
    cell: nn.Cell
    optimizer: optim.Optimizer
    if isinstance(case, Vision):
        cell, optimizer = Photos(case), optim.SGD(case.lr, momentum=case.momentum)
    else:
        cell, optimizer = Decoder(case), optim.Adam(case.lr)
    trained = {k: p.type.shape for k, p in cell.parameters().items() if p.trainable}
    cell.load({k: gpu_cases.weight(k, shape) for k, shape in trained.items()}, strict=False)
    trainer = train.Trainer(
        cell,
        loss=nn.SoftmaxCrossEntropy(),
        optimizer=optimizer,
        metrics={},
        precision="bfloat16",
        engine="xla",
    )
    trainer.prepare(*next(gpu_cases.batches(case)))
    step = stepping(trainer, trainer.training_program())
    device = jax.local_devices()[0]
    named = device.device_kind if device.platform != "cpu" else "CPU"
    return step, {"version": f"JAX {version('jax')}", "device": named}


def peak() -> int:
    """Largest memory in use: of the device, or of the process on a CPU."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return int(stats.get("peak_bytes_in_use", 0)) or peak_bytes()


if __name__ == "__main__":
    serve(side, gpu_cases, peak)
