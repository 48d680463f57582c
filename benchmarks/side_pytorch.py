"""PyTorch's side: eager modules and torch.optim, one thread. Runs in the peers' interpreter."""

from __future__ import annotations

import networks
import torch
from torch import nn
from worker import Step, serve


def network(case: networks.Case) -> nn.Module:
    """The case's layers as modules."""
    made: list[nn.Module] = []
    for i, layer in enumerate(case.layers):
        if isinstance(layer, networks.Conv):
            made += [nn.Conv2d(layer.inputs, layer.outputs, layer.kernel, padding=layer.padding)]
            made += [nn.ReLU(), nn.MaxPool2d(2)]
            continue
        if i and isinstance(case.layers[i - 1], networks.Conv):
            made.append(nn.Flatten())
        made.append(nn.Linear(layer.inputs, layer.outputs))
        if i + 1 < len(case.layers):
            made.append(nn.ReLU())
    return nn.Sequential(*made)


def side(case: networks.Case) -> tuple[Step, dict[str, str]]:
    """A training step from the case's starting weights."""
    torch.set_num_threads(1)
    net = network(case)
    with torch.no_grad():
        for own, given in zip(net.parameters(), networks.weights(case).values(), strict=True):
            own.copy_(torch.from_numpy(given))
    optimizer = torch.optim.SGD(net.parameters(), lr=case.lr, momentum=case.momentum)
    entropy = nn.CrossEntropyLoss()

    def step(x: networks.Array, labels: networks.Array) -> float:
        optimizer.zero_grad()
        loss = entropy(net(torch.from_numpy(x)), torch.from_numpy(labels))
        loss.backward()
        optimizer.step()
        return float(loss)

    return step, {"version": f"PyTorch {torch.__version__}"}


if __name__ == "__main__":
    serve(side)
