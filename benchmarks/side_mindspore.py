"""MindSpore's side: a stack of layers in graph mode. Runs in an interpreter that has MindSpore."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import networks
from mindspore import nn
from worker import Step, serve, threads


def network(case: networks.Case) -> nn.Cell:
    """The case's network with its starting weights."""
    stack = case.network
    assert isinstance(stack, networks.Stack)
    given = {k: ms.Tensor(v) for k, v in networks.weights(case).items()}
    made: list[nn.Cell] = []
    for i, layer in enumerate(stack.layers):
        held = {"weight_init": given[f"{i}.weight"], "bias_init": given[f"{i}.bias"]}
        if isinstance(layer, networks.Conv):
            made.append(
                nn.Conv2d(
                    layer.inputs, layer.outputs, layer.kernel,
                    pad_mode="pad", padding=layer.padding, has_bias=True, **held,
                )
            )  # fmt: skip
            made += [nn.ReLU(), nn.MaxPool2d(2, 2)]
            continue
        if i and isinstance(stack.layers[i - 1], networks.Conv):
            made.append(nn.Flatten())
        made.append(nn.Dense(layer.inputs, layer.outputs, **held))
        if i + 1 < len(stack.layers):
            made.append(nn.ReLU())
    return nn.SequentialCell(*made)


def side(case: networks.Case) -> tuple[Step, dict[str, Any]]:
    """A training step from the case's starting weights."""
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU", runtime_num_threads=threads())
    net = network(case)
    optimizer = (
        nn.Adam(net.trainable_params(), case.lr)
        if case.adam
        else nn.SGD(net.trainable_params(), case.lr, momentum=case.momentum)
    )
    entropy = nn.CrossEntropyLoss()
    one = nn.TrainOneStepCell(nn.WithLossCell(net, entropy), optimizer).set_train()

    def step(x: networks.Array, labels: networks.Array) -> float:
        return float(one(ms.Tensor(x), ms.Tensor(labels.astype("int32"))).asnumpy())

    return step, {"version": f"MindSpore {ms.__version__}"}


if __name__ == "__main__":
    serve(side)
