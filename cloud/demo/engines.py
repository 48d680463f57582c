"""One training step on two engines, from the same weights on the same batches."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from triplane.unified_ir import nn, optim
from triplane.unified_ir.cli.train import load_cell
from triplane.unified_ir.data.dataset import Dataset
from triplane.unified_ir.engines import engine
from triplane.unified_ir.train import Trainer

BATCH = 32


def losses_side_by_side(cell_file: Path, data: Dataset, steps: int) -> list[tuple[float, float]]:
    """Return (loss on onnx, loss on ascend) for each of the first steps of a run."""
    nn.seed(0)
    trainer = Trainer(
        load_cell(f"{cell_file}:Digits"),
        loss=nn.SoftmaxCrossEntropy(),
        optimizer=optim.Adam(0.002),
    )
    batches = list(islice(data.batches(BATCH, seed=0), steps))
    trainer.prepare(*batches[0])
    function = trainer.train_function()
    state = {k: v for k, v in trainer.state().items() if k in function.param_names}
    losses = []
    for name in ("onnx", "ascend"):
        loop = engine(name).compile(function, donate=tuple(state)).loop(state)
        losses.append([float(loop.step(x=x, y=y)["loss"]) for x, y in batches])
    return list(zip(*losses, strict=True))
