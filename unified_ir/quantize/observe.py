"""Calibration: the smallest and largest value that named tensors take on sample data.

The float graph itself reduces each tensor to two numbers, so memory is that of one inference on
`BATCH` samples however long the calibration set and however many tensors are watched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.graph import Array, Function, Value
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.inline import Replay
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.ops.tensor import reduce
from triplane.unified_ir.quantize.artifact import artifact
from triplane.unified_ir.quantize.frozen import Frozen, pruned
from triplane.unified_ir.quantize.scheme import Range

BATCH: Final = 32
"""Samples per run of the observed graph."""

Samples = Mapping[str, Array]
"""Arrays by input name; every first axis counts the same samples."""


def batches(frozen: Frozen, samples: Samples) -> Iterator[dict[str, Array]]:
    """Consecutive slices of at most `BATCH` samples, or of exactly the function's static batch.

    InvalidInput where a static batch does not divide the samples.
    """
    count = len(next(iter(samples.values())))
    static = {p.type.shape[0] for p in frozen.inputs if isinstance(p.type.shape[0], int)}
    size = int(next(iter(static), BATCH))
    if static and count % size:
        raise InvalidInput(f"the function takes {size} samples at once; {count} do not divide")
    for start in range(0, count, size):
        yield {name: x[start : start + size] for name, x in samples.items()}


def observe(frozen: Frozen, values: Sequence[Value], samples: Samples) -> dict[Value, Range]:
    """The range of each value over all samples, computed on onnxruntime.

    InvalidInput where a value is not finite on these samples, naming the line that makes it.
    """
    lows = np.full(len(values), np.inf)
    highs = np.full(len(values), -np.inf)
    watched = artifact(pruned(Frozen(_watching(frozen.function, values), frozen.weights)))
    session = watched.session()
    for batch in batches(frozen, samples):
        found = session.run(batch)
        lows = np.minimum(lows, [found[f"low/{i}"] for i in range(len(values))])
        highs = np.maximum(highs, [found[f"high/{i}"] for i in range(len(values))])
    for value, low, high in zip(values, lows, highs, strict=True):
        if not (np.isfinite(low) and np.isfinite(high)):
            raise InvalidInput(
                f"calibration gives {low} to {high} in {described(frozen.function, value)}; "
                "a tensor needs finite values to be quantized"
            )
    return {v: Range(float(a), float(b)) for v, a, b in zip(values, lows, highs, strict=True)}


def described(function: Function, value: Value) -> str:
    """What makes a value, for people."""
    for node in function.nodes:
        if value in node.outputs:
            return f"the output of {node.op} (at {node.meta.location})"
    return f"the input {value.name!r}"


def _watching(function: Function, values: Sequence[Value]) -> Function:
    """A function of the same parameters whose results are each value's extremes."""
    with Build(TABLE, function.name) as build:
        replay = Replay(function, [build.param(p.name, p.type) for p in function.params])
        for node in function.nodes:
            replay.run(node)
        watched = {}
        for i, value in enumerate(values):
            tensor = replay.values[value]
            watched[f"low/{i}"] = reduce("ReduceMin", tensor, None, keepdims=False)
            watched[f"high/{i}"] = reduce("ReduceMax", tensor, None, keepdims=False)
        return build.finish(watched)
