"""What a step of training takes beside its state."""

import gc
from pathlib import Path

import numpy as np

from triplane.unified_ir import ops
from triplane.unified_ir.engines import engine
from triplane.unified_ir.ir import TensorSpec
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.table import TABLE

LAYERS, SIDE, ROWS = 12, 1024, 1024
ACTIVATIONS = LAYERS * SIDE * ROWS * 4


def resident_bytes() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in status if line.startswith("VmRSS"))) * 1024


def test_a_second_step_takes_the_memory_of_the_first():
    """onnxruntime would lay the second run out as one block, beside what the first one took."""
    with (build := Build(TABLE, "step")):
        x, w = build.param("x", TensorSpec(("N", SIDE))), build.param("w", TensorSpec((SIDE,)))
        kept = [x * w]
        for _ in range(LAYERS - 1):
            kept.append(ops.tanh(kept[-1]))
        total = sum((y * y.sum([0]) for y in reversed(kept)), start=x).sum([0])
        function = build.finish({"loss": total.sum(), "w": w - total * 1e-6})
    program = engine("onnx").compile(function, donate=("w",))
    loop = program.loop({"w": np.full(SIDE, 0.1, np.float32)})
    batch = np.ones((ROWS, SIDE), np.float32)
    gc.collect()
    before = resident_bytes()
    loop.step(x=batch)
    first = resident_bytes()
    assert first - before > ACTIVATIONS / 2, "the first step takes what it needs"
    for _ in range(3):
        loop.step(x=batch)
    assert resident_bytes() - first < ACTIVATIONS / 4
