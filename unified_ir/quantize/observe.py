"""Calibration: the smallest and largest value that named tensors take on sample data.

The float graph itself reduces each tensor to two numbers per sample, so memory is that of one
inference, however many samples there are. A few samples that are far wider than all others are left
out of a range: one such sample would cost all the others their resolution.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.graph import Array, Function, Value
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.inline import Replay
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.ops.tensor import reduce
from triplane.unified_ir.passes.frozen import Frozen, pruned
from triplane.unified_ir.quantize.artifact import WATCHING, artifact
from triplane.unified_ir.quantize.scheme import Range

BATCH: Final = 32
"""Default number of samples per run."""
OUTLIERS: Final = 0.01
"""Largest share of samples that are left out of a range."""
MUCH_WIDER: Final = 3.0
"""A sample may be left out if it is wider than this multiple of all but the widest few."""

Samples = Mapping[str, Array]
"""Arrays by input name; every first axis counts the same samples."""


def batches(frozen: Frozen, samples: Samples, size: int = BATCH) -> Iterator[dict[str, Array]]:
    """Yield consecutive slices of at most `size` samples, or of exactly the static batch.

    Samples that have the function's static sizes come all at once. InvalidInput where a static
    batch does not divide the samples, or where inputs have different numbers of them.
    """
    if all(len(samples[p.name]) == p.type.shape[0] for p in frozen.inputs):
        yield dict(samples)
        return
    counts = {name: len(x) for name, x in samples.items()}
    if len(set(counts.values())) > 1:
        raise InvalidInput(
            "each input takes the same number of samples, its first axis: sample i of one belongs "
            f"to sample i of the others; {', '.join(f'{k} has {n}' for k, n in counts.items())}"
        )
    count = len(next(iter(samples.values())))
    static = {p.type.shape[0] for p in frozen.inputs if isinstance(p.type.shape[0], int)}
    size = int(next(iter(static), size))
    if static and count % size:
        raise InvalidInput(f"the function takes {size} samples at once; {count} do not divide")
    for start in range(0, count, size):
        yield {name: x[start : start + size] for name, x in samples.items()}


def observe(frozen: Frozen, values: Sequence[Value], samples: Samples) -> dict[Value, Range]:
    """Return the range of each value over the samples, computed on onnxruntime.

    Up to a hundredth of the samples is left out of a range if they are more than three times as
    wide as all others, or of the batches if the function takes a fixed number. InvalidInput where
    a value is not finite on these samples; the message names the line that computes it.
    """
    if not values:
        return {}
    watched = artifact(pruned(Frozen(_watching(frozen.function, values), frozen.weights)))
    session = watched.session(WATCHING)
    names = [f"{end}/{i}" for end in ("low", "high") for i in range(len(values))]
    rows = []
    # One sample at a time, so that each has extremes of its own and outliers can be told apart.
    for batch in batches(frozen, samples, 1):
        extremes = session.run(batch)
        rows.append(np.array([extremes[name] for name in names], np.float64))
    size = len(next(iter(samples.values()))) // len(rows)
    lows, highs = np.split(np.array(rows), 2, axis=1)
    ranges = {}
    for value, low, high in zip(values, lows.T, highs.T, strict=True):
        if not (np.isfinite(low).all() and np.isfinite(high).all()):
            raise InvalidInput(
                f"calibration gives {low.min()} to {high.max()} in "
                f"{described(frozen.function, value)}; a tensor needs finite values to be quantized"
            )
        typical = typical_range(low, high)
        left_out = tuple(b * size + i for b in typical.left_out for i in range(size))
        ranges[value] = replace(typical, left_out=left_out)
    return ranges


def typical_range(lows: Array, highs: Array) -> Range:
    """Return the range of samples with these extremes, without the few that are much wider.

    lows, highs: (N,).
    """
    widths = np.maximum(highs, 0.0) - np.minimum(lows, 0.0)
    # The widest of those that remain if the widest hundredth is left out; with fewer than 100
    # samples the widest of all, so none is left out.
    usual = np.sort(widths)[-1 - int(len(widths) * OUTLIERS)]
    wide = (widths > MUCH_WIDER * usual) & (usual > 0.0)
    left_out = tuple(map(int, np.flatnonzero(wide)))
    return Range(float(lows[~wide].min()), float(highs[~wide].max()), left_out)


def described(function: Function, value: Value) -> str:
    """Describe a value by the node that computes it, for people."""
    for node in function.nodes:
        if value in node.outputs:
            return f"the output of {node.op} (at {node.meta.location})"
    return f"the input {value.name!r}"


def _watching(function: Function, values: Sequence[Value]) -> Function:
    """Return a function of the same parameters whose results are each value's extremes."""
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
