"""PyTorch's side of imported networks: torchvision's modules in eager mode, and their export.

Runs in the oracles' interpreter, which has torchvision. With a case, a path and PRESERVE (batch
normalization stays) or EVAL (it is folded) as arguments it writes the export and ends.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import imported
import numpy as np
import torch
from oracles.exports import without_detection
from torch import nn
from worker import Step, serve, threads


def network(case: imported.Case) -> nn.Module:
    """The network with its starting weights, the same in every process."""
    without_detection()
    import torchvision

    torch.manual_seed(imported.SEED)
    made = torchvision.models.get_model(
        case.network, weights=None, num_classes=imported.CLASSES, **case.options
    )
    for module in made.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.BatchNorm2d):
            _shake(module.weight, module.bias, module.running_mean, module.running_var)
        elif isinstance(module, nn.Conv2d):
            _shake(module.bias)
    return made.train()


def _shake(*tensors: torch.Tensor | None) -> None:
    """Moves each a little: equal arrays would be exported as one, and then trained as one."""
    for tensor in tensors:
        if tensor is not None:
            tensor.data += 0.1 * torch.rand_like(tensor)


def export(case: imported.Case, path: Path, mode: str) -> None:
    """Writes the ONNX file with a symbolic batch. mode: a `torch.onnx.TrainingMode`."""
    net = network(case).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            net,
            (torch.zeros(2, 3, case.side, case.side),),
            path,
            dynamo=False,
            training=getattr(torch.onnx.TrainingMode, mode),
            do_constant_folding=mode == "EVAL",
            input_names=["x"],
            output_names=["y"],
            dynamic_axes={"x": {0: "N"}, "y": {0: "N"}},
        )


def side(case: imported.Case) -> tuple[Step, dict[str, Any]]:
    """A training step from the case's starting weights."""
    torch.set_num_threads(threads())
    net = network(case)
    optimizer = torch.optim.SGD(net.parameters(), lr=case.lr, momentum=case.momentum)
    entropy = nn.CrossEntropyLoss()

    def step(x: np.ndarray, labels: np.ndarray) -> float:
        optimizer.zero_grad()
        loss = entropy(net(torch.from_numpy(x)), torch.from_numpy(labels))
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step, {"version": f"PyTorch {torch.__version__}"}


if __name__ == "__main__":
    if len(sys.argv) == 4:
        export(imported.CASES[sys.argv[1]], Path(sys.argv[2]), sys.argv[3])
    else:
        serve(side, imported)
