"""PyTorch's side of `gpu.py`: torch.compile, autocast to bfloat16, a fused optimizer.

Runs in any interpreter that has torch and numpy.
"""

from __future__ import annotations

from typing import Any

import gpu_cases
import torch
from gpu_cases import EXPANSION, Language, Vision
from torch import nn
from torch.nn import functional as F
from worker import Step, peak_bytes, serve


class _Shortcut(nn.Module):
    """x itself, or a 1x1 convolution with normalization where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.changes = stride != 1 or inputs != outputs
        if self.changes:
            self.conv = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x)) if self.changes else x


class _Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions around a sum."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = EXPANSION * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.norm3 = nn.BatchNorm2d(outputs)
        self.shortcut = _Shortcut(inputs, outputs, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


class _ResNet(nn.Module):
    """A stem, stages of bottlenecks, the mean over the image, a dense layer."""

    def __init__(self, case: Vision) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, case.width, 7, 2, padding=3, bias=False)
        self.norm = nn.BatchNorm2d(case.width)
        blocks, inputs = [], case.width
        for stage, count in enumerate(case.blocks):
            for i in range(count):
                blocks.append(_Bottleneck(inputs, case.width << stage, 2 if stage and not i else 1))
                inputs = EXPANSION * (case.width << stage)
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, case.classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.conv(x))), 3, 2, padding=1)
        return self.head(self.blocks(x).mean((2, 3)))


class _Photos(nn.Module):
    """A residual network on bytes."""

    def __init__(self, case: Vision) -> None:
        super().__init__()
        self.net = _ResNet(case)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(memory_format=torch.channels_last)
        return self.net(x.float() / 255.0)


class _Attention(nn.Module):
    """Causal self-attention by torch's fused kernel."""

    def __init__(self, case: Language) -> None:
        super().__init__()
        self.heads = case.heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * case.width, case.width))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * case.width))
        self.out_proj = nn.Linear(case.width, case.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, time, width = x.shape
        qkv = F.linear(x, self.in_proj_weight, self.in_proj_bias)
        q, k, v = (
            part.view(n, time, self.heads, width // self.heads).transpose(1, 2)
            for part in qkv.split(width, 2)
        )
        joined = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(joined.transpose(1, 2).reshape(n, time, width))


class _Layer(nn.Module):
    """Attention, then a network per position, with normalization first."""

    def __init__(self, case: Language) -> None:
        super().__init__()
        width = case.width
        self.self_attn = _Attention(case)
        self.linear1 = nn.Linear(width, EXPANSION * width)
        self.linear2 = nn.Linear(EXPANSION * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.norm1(x))
        return x + self.linear2(F.gelu(self.linear1(self.norm2(x))))


class _Decoder(nn.Module):
    """The next word at every position; the embedding's weight is the last product's as well."""

    def __init__(self, case: Language) -> None:
        super().__init__()
        self.embedding = nn.Embedding(case.vocabulary, case.width)
        self.places = nn.Parameter(torch.empty(case.length, case.width))
        self.layers = nn.Sequential(*(_Layer(case) for _ in range(case.layers)))
        self.norm = nn.LayerNorm(case.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers(self.embedding(x) + self.places)
        return F.linear(self.norm(y), self.embedding.weight)


def side(case: gpu_cases.Case) -> tuple[Step, dict[str, Any]]:
    """A training step from the case's starting weights."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    net = _Photos(case) if isinstance(case, Vision) else _Decoder(case)
    for name, parameter in net.named_parameters():
        parameter.data = torch.from_numpy(gpu_cases.weight(name, tuple(parameter.shape)))
    net = net.to(device)
    if isinstance(case, Vision):
        net = net.to(memory_format=torch.channels_last)
        optimizer: Any = torch.optim.SGD(
            net.parameters(), lr=case.lr, momentum=case.momentum, fused=True
        )
    else:
        optimizer = torch.optim.Adam(net.parameters(), lr=case.lr, fused=True)
    compiled = torch.compile(net)

    def step(x: gpu_cases.Array, labels: gpu_cases.Array) -> float:
        given, target = (torch.from_numpy(a).to(device, non_blocking=True) for a in (x, labels))
        with torch.autocast(device.type, torch.bfloat16):
            logits = compiled(given)
        loss = F.cross_entropy(logits.float().flatten(0, -2), target.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    named = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    return step, {"version": f"PyTorch {torch.__version__}", "device": named}


def peak() -> int:
    """Largest memory in use: of the device, or of the process on a CPU."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else peak_bytes()


if __name__ == "__main__":
    serve(side, gpu_cases, peak)
