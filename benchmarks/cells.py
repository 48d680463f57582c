"""The networks as Triplane's cells, holding their starting weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import networks

from triplane.unified_ir import nn, ops


def network(case: networks.Case) -> nn.Cell:
    """The case's network with its starting weights."""
    cell = _MADE[type(case.network)](case.network)
    given = networks.weights(case)
    named = given if given.keys() <= cell.parameters().keys() else _in_order(cell, given)
    cell.load(named, strict=False)
    return cell


def _in_order(cell: nn.Cell, given: Mapping[str, networks.Array]) -> dict[str, networks.Array]:
    """A sequence of layers counts those without weights too."""
    return dict(zip(cell.parameters(), given.values(), strict=True))


def _stack(network: networks.Stack) -> nn.Cell:
    made: list[nn.Cell] = []
    for i, layer in enumerate(network.layers):
        if isinstance(layer, networks.Conv):
            made += [nn.Conv2d(layer.inputs, layer.outputs, layer.kernel, padding=layer.padding)]
            made += [nn.ReLU(), nn.MaxPool2d(2)]
            continue
        if i and isinstance(network.layers[i - 1], networks.Conv):
            made.append(nn.Flatten())
        made.append(nn.Dense(layer.inputs, layer.outputs))
        if i + 1 < len(network.layers):
            made.append(nn.ReLU())
    return nn.Sequential(*made)


class _Residual(nn.Cell):
    def __init__(self, block: networks.Residual) -> None:
        super().__init__()
        inputs, outputs = block.inputs, block.outputs
        self.changes = block.changes
        self.first = nn.Conv2d(inputs, outputs, 3, stride=block.stride, padding=1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.first_norm, self.second_norm = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        if block.changes:
            self.short = nn.Conv2d(inputs, outputs, 1, stride=block.stride, bias=False)
            self.short_norm = nn.BatchNorm2d(outputs)

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        y = ops.relu(self.first_norm(self.first(x)))
        y = self.second_norm(self.second(y))
        return ops.relu(y + (self.short_norm(self.short(x)) if self.changes else x))


class _ResNet(nn.Cell):
    def __init__(self, network: networks.ResNet) -> None:
        super().__init__()
        width = network.blocks[0].inputs
        self.stem = nn.Conv2d(network.channels, width, 3, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(width)
        self.blocks = nn.CellList([_Residual(block) for block in network.blocks])
        self.head = nn.Dense(network.blocks[-1].outputs, network.classes)

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        x = ops.relu(self.stem_norm(self.stem(x)))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class _CharLstm(nn.Cell):
    def __init__(self, network: networks.CharLstm) -> None:
        super().__init__()
        self.embedding = nn.Embedding(network.vocabulary, network.embedding)
        self.lstm = nn.CellList(
            [
                nn.LSTM(network.hidden if i else network.embedding, network.hidden)
                for i in range(network.layers)
            ]
        )
        self.head = nn.Dense(network.hidden, network.vocabulary)

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        x = self.embedding(x)
        for layer in self.lstm:
            x, _ = layer(x)
        return self.head(x[:, -1])


class _Layer(nn.Cell):
    def __init__(self, network: networks.Transformer) -> None:
        super().__init__()
        self.width, self.heads = network.width, network.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(self.width), nn.LayerNorm(self.width)
        self.qkv, self.out = nn.Dense(self.width, 3 * self.width), nn.Dense(self.width, self.width)
        self.up = nn.Dense(self.width, network.inner)
        self.down = nn.Dense(network.inner, self.width)

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.down(ops.gelu(self.up(self.norm_2(x))))

    def attention(self, x: ops.Tensor) -> ops.Tensor:
        """x: (N, T, C)."""
        n, time, depth = x.shape[0], x.shape[1], self.width // self.heads
        made = self.qkv(x).reshape(n, time, 3, self.heads, depth).transpose(2, 0, 3, 1, 4)
        q, k, v = made[0], made[1], made[2]
        scores = ops.softmax(q @ k.transpose(0, 1, 3, 2) * depth**-0.5, axis=-1)
        return self.out((scores @ v).transpose(0, 2, 1, 3).reshape(n, time, self.width))


class _Transformer(nn.Cell):
    def __init__(self, network: networks.Transformer) -> None:
        super().__init__()
        self.embedding = nn.Embedding(network.vocabulary, network.width)
        self.layers = nn.CellList([_Layer(network) for _ in range(network.layers)])
        self.head = nn.Dense(network.width, network.vocabulary)

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean((1,)))


_MADE: Final[Mapping[type, Callable[[Any], nn.Cell]]] = {
    networks.Stack: _stack,
    networks.ResNet: _ResNet,
    networks.CharLstm: _CharLstm,
    networks.Transformer: _Transformer,
}
