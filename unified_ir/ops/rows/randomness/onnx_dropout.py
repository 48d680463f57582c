"""ONNX's Dropout, for imported models. Cells use the counter-based `random.dropout`.

Its random bits come from the runtime: `seed` fixes them for one session of one runtime only.
Engines draw different bits, and a resumed run does not continue them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.types import ShapeError, TensorType, bool_
from triplane.unified_ir.ops.lowering import XlaContext
from triplane.unified_ir.ops.row import Op, OpCall, OpKind
from triplane.unified_ir.ops.rows.arithmetic.elementwise import as_like
from triplane.unified_ir.ops.rows.movement.structure import where
from triplane.unified_ir.ops.samples import literal, normal, sample
from triplane.unified_ir.ops.tensor import Tensor

RATIO = 0.5
"""The default share of elements that are dropped."""


def _dropout_types(call: OpCall) -> tuple[TensorType, ...]:
    x = call.type(0)
    for i in (1, 2):
        if call.has(i) and call.type(i).shape != ():
            raise ShapeError(f"Dropout takes a scalar as operand {i}, got {call.type(i)}")
    return (x, x.with_dtype(bool_))[: call.outputs]


def _dropout_kernel(x: Any, ratio: Any = None, training: Any = None, *, seed: int | None) -> Any:
    share = RATIO if ratio is None else float(ratio)
    if training is None or not training or share == 0:
        return x, np.ones(x.shape, np.bool_)
    kept = np.random.default_rng(seed).random(x.shape) >= share
    return np.where(kept, x / x.dtype.type(1 - share), 0), kept


def _dropout_vjp_with_residuals(
    inputs: Sequence[Any], attrs: Mapping[str, Any], regions: Any, outputs: int, *, vjp_of: Any
) -> Any:
    """Drop the gradient where the value was dropped, by the mask of the same draw."""
    # The mask is an output of the same node; drawing again would give another one.
    ys = dropout_row.all_outputs(*inputs, outputs=2, **attrs)
    x, ratio, training = (*inputs, None, None)[:3]

    def pull(gs: Sequence[Tensor | None]) -> list[Tensor | None]:
        g = gs[0]
        if g is None or training is None:
            return [g, None, None][: len(inputs)]
        share = as_like(RATIO, x) if ratio is None else ratio.cast(x.dtype)
        scaled = where(ys[1], g / (1.0 - share), 0.0)
        return [where(training, scaled, g), None, None][: len(inputs)]

    return ys[:outputs], pull


def _dropout_xla(
    k: XlaContext, x: Any, ratio: Any = None, training: Any = None, *, seed: int | None
) -> Any:
    """Return `x`: XLA has no random numbers without a key."""
    trains = training is not None and k.known(training, "whether it trains").all()
    if trains and (ratio is None or k.known(ratio, "its ratio") != 0):
        raise InvalidInput(
            f"the engine xla cannot run {k.node.op} in training: its draws have no key; use "
            "`random.dropout`, which takes one, or the engine 'onnx'"
        )
    return x, np.ones(x.shape, np.bool_)


dropout_row = Op(
    name="Dropout",
    kind=OpKind.ELEMENTWISE,
    settings=(1,),
    infer=_dropout_types,
    reference=_dropout_kernel,
    vjp_with_residuals=_dropout_vjp_with_residuals,
    nondeterministic=True,
    xla=_dropout_xla,
    samples=(
        sample(normal(2, 3)),
        sample(normal(2, 3), literal(0.25, "float32"), outputs=2),
        sample(normal(2, 3), literal(0.0, "float32"), literal(True), outputs=2),
    ),
)
