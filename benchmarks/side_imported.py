"""Triplane's side of imported networks: the other side's export, trained by the Trainer's step."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import imported
from worker import Step, serve, threads

from triplane.unified_ir import import_onnx, nn, optim, train
from triplane.unified_ir.engines.onnx import OnnxEngine
from triplane.unified_ir.runtime import session


def trainer_of(case: imported.Case, path: Path) -> train.Trainer:
    """A trainer of the imported network that has seen one batch."""
    net = nn.Imported(import_onnx(path), batch_norm="updated")
    trainer = train.Trainer(
        net,
        loss=nn.SoftmaxCrossEntropy(),
        optimizer=optim.SGD(case.lr, momentum=case.momentum),
        metrics={},
        engine=OnnxEngine(options=session.SessionOptions(threads=threads())),
    )
    trainer.prepare(*next(imported.batches(case)))
    return trainer


def side(case: imported.Case) -> tuple[Step, dict[str, Any]]:
    """A training step from the export's weights, as `Trainer.fit` runs it."""
    start = time.process_time()
    trainer = trainer_of(case, Path(os.environ["TRIPLANE_EXPORT"]))
    program = trainer.training_program()
    names, batch = trainer.state_names(program.function), trainer.model.batch_names()
    made = time.process_time() - start
    state = trainer.state()
    loop = program.loop({name: state[name] for name in names})
    del state

    def step(x: imported.Array, labels: imported.Array) -> float:
        return float(loop.step(**dict(zip(batch, (x, labels), strict=True)))["loss"])

    return step, {"version": f"onnxruntime {session.version()}", "prepare_s": made}


if __name__ == "__main__":
    serve(side, imported)
