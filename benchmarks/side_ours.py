"""Triplane's side: the Trainer's own step, one graph on the onnx engine, one thread."""

from __future__ import annotations

import time
from typing import Any

import networks
from worker import Step, serve

from triplane.unified_ir import nn, optim, train
from triplane.unified_ir.engines import engine
from triplane.unified_ir.runtime import session


def network(case: networks.Case) -> nn.Cell:
    """The case's layers as cells, holding its starting weights."""
    made: list[nn.Cell] = []
    for i, layer in enumerate(case.layers):
        if isinstance(layer, networks.Conv):
            made += [nn.Conv2d(layer.inputs, layer.outputs, layer.kernel, padding=layer.padding)]
            made += [nn.ReLU(), nn.MaxPool2d(2)]
            continue
        if i and isinstance(case.layers[i - 1], networks.Conv):
            made.append(nn.Flatten())
        made.append(nn.Dense(layer.inputs, layer.outputs))
        if i + 1 < len(case.layers):
            made.append(nn.ReLU())
    cell = nn.Sequential(*made)
    cell.load(dict(zip(cell.parameters(), networks.weights(case).values(), strict=True)))
    return cell


def trainer_of(case: networks.Case) -> train.Trainer:
    """A trainer that has seen one batch, so that its step is recorded."""
    optimizer = optim.SGD(case.lr, momentum=case.momentum)
    loss = nn.SoftmaxCrossEntropy()
    trainer = train.Trainer(network(case), loss=loss, optimizer=optimizer, metrics={})
    trainer.prepare(*next(networks.batches(case)))
    return trainer


def side(case: networks.Case) -> tuple[Step, dict[str, Any]]:
    """A training step from the case's starting weights."""
    trainer = trainer_of(case)
    start = time.process_time()
    function = trainer.train_function()
    recorded = time.process_time()
    names, batch = trainer.state_names(function), trainer.model.batch_names()
    program = engine("onnx").compile(function, donate=names)
    times = {"record_s": recorded - start, "compile_s": time.process_time() - recorded}
    state = trainer.state()
    loop = program.loop({name: state[name] for name in names})

    def step(x: networks.Array, labels: networks.Array) -> float:
        return float(loop.step(**dict(zip(batch, (x, labels), strict=True)))["loss"])

    return step, {"version": f"onnxruntime {session.version()}", **times}


if __name__ == "__main__":
    serve(side)
