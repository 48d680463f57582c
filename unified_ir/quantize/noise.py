"""Rounding noise, layer by layer: 10 log10(sum y^2 / sum (y - q)^2) in decibel.

y is a tensor of the float graph, q the same tensor of the integer graph on the same samples, so a
layer's figure includes the noise of the layers before it. Both graphs run as one, which returns two
sums per tensor: memory is that of one batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from triplane.unified_ir.ir.graph import Value
from triplane.unified_ir.onnx import OnnxTarget
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.inline import Replay, inline
from triplane.unified_ir.ops.rows.arithmetic.elementwise import clip
from triplane.unified_ir.ops.table import TABLE
from triplane.unified_ir.ops.tensor import Tensor
from triplane.unified_ir.passes.frozen import Frozen, pruned
from triplane.unified_ir.quantize.artifact import WATCHING, artifact
from triplane.unified_ir.quantize.insert import insert
from triplane.unified_ir.quantize.observe import Samples, batches
from triplane.unified_ir.quantize.scheme import Range, Scheme
from triplane.unified_ir.quantize.sites import Sites


def noise(
    frozen: Frozen,
    sites: Sites,
    ranges: Mapping[Value, Range],
    row: Scheme,
    values: Sequence[Value],
    samples: Samples,
    *,
    target: OnnxTarget | None = None,
) -> list[float | None]:
    """Return the signal-to-noise ratio of each value in decibel; None without noise or signal.

    target: of the operators that run; only there does an LSTM on integer weights round operands.
    """
    integer = insert(frozen, sites, ranges, row, watch=values)
    session = artifact(_both(frozen, integer, sites, values), target).session(WATCHING)
    totals = np.zeros((len(values), 2))
    for batch in batches(frozen, samples):
        answers = session.run(batch)
        totals += [[answers[f"signal/{i}"], answers[f"noise/{i}"]] for i in range(len(values))]
    return [
        10 * math.log10(signal / wrong) if signal > 0 and wrong > 0 else None
        for signal, wrong in totals
    ]


def _both(frozen: Frozen, integer: Frozen, sites: Sites, values: Sequence[Value]) -> Frozen:
    """Return one function of the same inputs that computes signal and noise of each value."""
    with Build(TABLE, frozen.function.name) as build:
        weights = {**frozen.weights, **integer.weights}
        params = {p.name: p for f in (frozen, integer) for p in f.function.params}
        tensors = {name: build.param(name, p.type) for name, p in params.items()}
        replay = Replay(frozen.function, [tensors[n] for n in frozen.function.param_names])
        for node in frozen.function.nodes:
            replay.run(node)
        rounded = inline(integer.function, [tensors[n] for n in integer.function.param_names])
        watched = rounded[len(frozen.function.results) :]
        sums = {}
        for i, (value, q) in enumerate(zip(values, watched, strict=True)):
            y = _clamped(replay.values[value], sites, value)
            sums[f"signal/{i}"] = (y * y).sum()
            sums[f"noise/{i}"] = ((y - q) * (y - q)).sum()
        return pruned(Frozen(build.finish(sums), weights))


def _clamped(y: Tensor, sites: Sites, value: Value) -> Tensor:
    """Apply the ReLU or Clip that the rounding of a site replaced."""
    top = sites.clamps.get(sites.root.get(value, value))
    return y if top is None else clip(y, 0.0, None if top == math.inf else top)
