"""Triplane's side: the Trainer's own step, one graph on the onnx engine."""

from __future__ import annotations

import time
from typing import Any

import networks
from cells import network
from worker import Step, serve, threads

from triplane.unified_ir import nn, optim, train
from triplane.unified_ir.engines import Engine, Program
from triplane.unified_ir.engines.onnx import OnnxEngine
from triplane.unified_ir.runtime import session


def trainer_of(case: networks.Case, *, engine: str | Engine = "onnx") -> train.Trainer:
    """A trainer that has seen one batch, so that its step is recorded."""
    optimizer = optim.Adam(case.lr) if case.adam else optim.SGD(case.lr, momentum=case.momentum)
    loss = nn.SoftmaxCrossEntropy()
    trainer = train.Trainer(
        network(case), loss=loss, optimizer=optimizer, metrics={}, engine=engine
    )
    trainer.prepare(*next(networks.batches(case)))
    return trainer


def side(case: networks.Case) -> tuple[Step, dict[str, Any]]:
    """A training step from the case's starting weights."""
    trainer = trainer_of(case)
    start = time.process_time()
    function = trainer.train_function()
    recorded = time.process_time()
    made = OnnxEngine(options=session.SessionOptions(threads=threads()))
    program = made.compile(function, donate=trainer.state_names(function))
    times = {"record_s": recorded - start, "compile_s": time.process_time() - recorded}
    return stepping(trainer, program), {"version": f"onnxruntime {session.version()}", **times}


def stepping(trainer: train.Trainer, program: Program) -> Step:
    """The program's loop, which starts with the trainer's state."""
    state, batch = trainer.state(), trainer.model.batch_names()
    loop = program.loop({name: state[name] for name in trainer.state_names(program.function)})

    def step(x: networks.Array, labels: networks.Array) -> float:
        return float(loop.step(**dict(zip(batch, (x, labels), strict=True)))["loss"])

    return step


if __name__ == "__main__":
    serve(side)
