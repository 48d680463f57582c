"""Golden convolutions, pools and normalizations by PyTorch: tests/golden/layers/NAME.npz.

`python -m benchmarks.oracles.layers FOLDER`, in the peers' interpreter, writes per case in float64:
the operand `x`, weights `w.PATH`, the result `y`, a random cotangent `v`, gradients of sum(v y),
`g` of the operand and `h.PATH` of weights, and buffers after the call, `b.PATH`. A case's seed is
made of its name.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn

Array = np.ndarray[Any, np.dtype[Any]]
Case = tuple[Callable[[], nn.Module], tuple[int, ...]]

# fmt: off
CASES: Final[Mapping[str, Case]] = {
    "conv_3d": (lambda: nn.Conv3d(2, 3, (2, 3, 2), padding=(1, 0, 1)), (2, 2, 3, 4, 3)),
    "conv_transpose_1d": (
        lambda: nn.ConvTranspose1d(2, 3, 3, stride=2, padding=1, output_padding=1), (2, 2, 5)),
    "conv_transpose_2d": (
        lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2, dilation=2), (2, 4, 3, 4)),
    "conv_transpose_3d": (
        lambda: nn.ConvTranspose3d(2, 2, 2, stride=(1, 2, 1), bias=False), (1, 2, 2, 3, 2)),
    "max_pool_1d": (lambda: nn.MaxPool1d(3, 2, ceil_mode=True), (2, 3, 8)),
    "max_pool_3d": (lambda: nn.MaxPool3d(2, 2), (1, 2, 4, 5, 4)),
    "avg_pool_1d": (lambda: nn.AvgPool1d(3, 2, 1), (2, 3, 8)),
    "avg_pool_3d": (lambda: nn.AvgPool3d(2), (1, 2, 4, 5, 4)),
    "adaptive_avg_pool_1d": (lambda: nn.AdaptiveAvgPool1d(3), (2, 3, 8)),
    "adaptive_avg_pool_2d": (lambda: nn.AdaptiveAvgPool2d((None, 2)), (2, 3, 4, 5)),
    "adaptive_avg_pool_3d": (lambda: nn.AdaptiveAvgPool3d(2), (1, 2, 4, 5, 3)),
    "upsample": (
        lambda: nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True), (2, 2, 3, 4)),
    "batch_norm_3d": (lambda: nn.BatchNorm3d(3), (2, 3, 2, 3, 2)),
    "batch_norm_untracked": (
        lambda: nn.BatchNorm2d(3, track_running_stats=False), (4, 3, 2, 3)),
    "batch_norm_untracked_eval": (
        lambda: nn.BatchNorm1d(3, track_running_stats=False).eval(), (5, 3, 2)),
    "group_norm": (lambda: nn.GroupNorm(2, 4), (2, 4, 3, 2)),
    "instance_norm_1d": (lambda: nn.InstanceNorm1d(3, affine=True), (2, 3, 5)),
    "instance_norm_2d": (lambda: nn.InstanceNorm2d(3, affine=True), (2, 3, 4, 3)),
    "instance_norm_3d": (lambda: nn.InstanceNorm3d(3, affine=True), (2, 3, 2, 3, 2)),
    "rms_norm": (lambda: nn.RMSNorm((3, 4), eps=1e-5), (2, 3, 4)),
}
# fmt: on


def evaluate(name: str, case: Case) -> dict[str, Array]:
    """Everything one golden file holds."""
    seed = zlib.crc32(name.encode())
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    make, shape = case
    layer = make().double()
    weights = dict(layer.named_parameters())
    with torch.no_grad():
        for w in weights.values():
            w += 0.3 * torch.from_numpy(rng.standard_normal(w.shape))
    found = {f"w.{k}": w.detach().numpy().copy() for k, w in weights.items()}
    x = torch.from_numpy(rng.standard_normal(shape)).requires_grad_()
    y = layer(x)
    v = torch.from_numpy(rng.standard_normal(y.shape))
    gradients = torch.autograd.grad((y * v).sum(), [x, *weights.values()])
    found |= {"x.": x.detach().numpy(), "y.": y.detach().numpy(), "v.": v.numpy()}
    found["g."] = gradients[0].numpy()
    found |= {f"h.{k}": g.numpy() for k, g in zip(weights, gradients[1:], strict=True)}
    found |= {
        f"b.{k}": b.numpy() for k, b in layer.named_buffers() if not k.startswith("num_batches")
    }
    return found


def write(folder: Path) -> None:
    """All cases."""
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    for name, case in CASES.items():
        np.savez_compressed(folder / f"{name}.npz", **evaluate(name, case))  # type: ignore[arg-type]


if __name__ == "__main__":
    write(Path(sys.argv[1]))
