"""PyTorch's side: eager modules and torch.optim. Runs in the peers' interpreter."""

from __future__ import annotations

from typing import Any, Final

import networks
import torch
from torch import nn
from torch.nn import functional as F
from worker import Step, serve, threads


def network(case: networks.Case) -> nn.Module:
    """The case's network with its starting weights."""
    net = _MADE[type(case.network)](case.network)
    given = {k: torch.from_numpy(v) for k, v in networks.weights(case).items()}
    if isinstance(case.network, networks.Stack):
        names = [name for name, _ in net.named_parameters()]
        given = dict(zip(names, given.values(), strict=True))
    if isinstance(case.network, networks.CharLstm):
        given = _lstm_names(given, case.network)
    unexpected = net.load_state_dict(given, strict=False).unexpected_keys
    assert not unexpected, unexpected
    return net


def _lstm_names(given: dict[str, Any], network: networks.CharLstm) -> dict[str, Any]:
    """PyTorch has a second bias, which starts at zero and is not trained."""
    made = {k: v for k, v in given.items() if not k.startswith("lstm")}
    for i in range(network.layers):
        made[f"lstm.weight_ih_l{i}"] = given[f"lstm.{i}.weight_ih"]
        made[f"lstm.weight_hh_l{i}"] = given[f"lstm.{i}.weight_hh"]
        made[f"lstm.bias_ih_l{i}"] = given[f"lstm.{i}.bias"]
        made[f"lstm.bias_hh_l{i}"] = torch.zeros_like(given[f"lstm.{i}.bias"])
    return made


def _stack(network: networks.Stack) -> nn.Module:
    made: list[nn.Module] = []
    for i, layer in enumerate(network.layers):
        if isinstance(layer, networks.Conv):
            made += [nn.Conv2d(layer.inputs, layer.outputs, layer.kernel, padding=layer.padding)]
            made += [nn.ReLU(), nn.MaxPool2d(2)]
            continue
        if i and isinstance(network.layers[i - 1], networks.Conv):
            made.append(nn.Flatten())
        made.append(nn.Linear(layer.inputs, layer.outputs))
        if i + 1 < len(network.layers):
            made.append(nn.ReLU())
    return nn.Sequential(*made)


class _Residual(nn.Module):
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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.first_norm(self.first(x)))
        y = self.second_norm(self.second(y))
        return torch.relu(y + (self.short_norm(self.short(x)) if self.changes else x))


class _ResNet(nn.Module):
    def __init__(self, network: networks.ResNet) -> None:
        super().__init__()
        width = network.blocks[0].inputs
        self.stem = nn.Conv2d(network.channels, width, 3, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(*(_Residual(block) for block in network.blocks))
        self.head = nn.Linear(network.blocks[-1].outputs, network.classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(torch.relu(self.stem_norm(self.stem(x))))
        return self.head(x.mean((2, 3)))


class _CharLstm(nn.Module):
    def __init__(self, network: networks.CharLstm) -> None:
        super().__init__()
        self.embedding = nn.Embedding(network.vocabulary, network.embedding)
        self.lstm = nn.LSTM(network.embedding, network.hidden, network.layers, batch_first=True)
        for name, parameter in self.lstm.named_parameters():
            parameter.requires_grad_("bias_hh" not in name)
        self.head = nn.Linear(network.hidden, network.vocabulary)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(x))[0][:, -1])


class _Layer(nn.Module):
    def __init__(self, network: networks.Transformer) -> None:
        super().__init__()
        self.width, self.heads = network.width, network.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(self.width), nn.LayerNorm(self.width)
        self.qkv = nn.Linear(self.width, 3 * self.width)
        self.out = nn.Linear(self.width, self.width)
        self.up = nn.Linear(self.width, network.inner)
        self.down = nn.Linear(network.inner, self.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        """x: (N, T, C)."""
        n, time, depth = x.shape[0], x.shape[1], self.width // self.heads
        made = self.qkv(x).reshape(n, time, 3, self.heads, depth).permute(2, 0, 3, 1, 4)
        joined = F.scaled_dot_product_attention(made[0], made[1], made[2])
        return self.out(joined.transpose(1, 2).reshape(n, time, self.width))


class _Transformer(nn.Module):
    def __init__(self, network: networks.Transformer) -> None:
        super().__init__()
        self.embedding = nn.Embedding(network.vocabulary, network.width)
        self.layers = nn.Sequential(*(_Layer(network) for _ in range(network.layers)))
        self.head = nn.Linear(network.width, network.vocabulary)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embedding(x)).mean(1))


_MADE: Final[dict[type, Any]] = {
    networks.Stack: _stack,
    networks.ResNet: _ResNet,
    networks.CharLstm: _CharLstm,
    networks.Transformer: _Transformer,
}


def side(case: networks.Case) -> tuple[Step, dict[str, str]]:
    """A training step from the case's starting weights."""
    torch.set_num_threads(threads())
    net = network(case)
    trained = [p for p in net.parameters() if p.requires_grad]
    optimizer = (
        torch.optim.Adam(trained, lr=case.lr)
        if case.adam
        else torch.optim.SGD(trained, lr=case.lr, momentum=case.momentum)
    )
    entropy = nn.CrossEntropyLoss()

    def step(x: networks.Array, labels: networks.Array) -> float:
        optimizer.zero_grad()
        loss = entropy(net(torch.from_numpy(x)), torch.from_numpy(labels))
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step, {"version": f"PyTorch {torch.__version__}"}


if __name__ == "__main__":
    serve(side)
