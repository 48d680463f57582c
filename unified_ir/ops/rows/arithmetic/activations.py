"""Activations, most of them defined by ONNX, each a body in other rows.

A branch that could overflow gets 0 where it is not chosen, so that no infinity is multiplied by a
zero cotangent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from triplane.unified_ir.ir.types import ShapeError, TensorType, float32
from triplane.unified_ir.ops.batching import elementwise
from triplane.unified_ir.ops.row import Op, OpCall, OpKind
from triplane.unified_ir.ops.rows.arithmetic.elementwise import (
    abs_,
    broadcast_same,
    exp,
    has_float_kernel,
    sigmoid,
    softplus,
    tanh,
)
from triplane.unified_ir.ops.rows.movement.structure import where
from triplane.unified_ir.ops.samples import apart, between, ints, normal, sample
from triplane.unified_ir.ops.tensor import Tensor

_row = partial(Op, kind=OpKind.ELEMENTWISE)


def _exponential(x: Tensor, alpha: float, width: float = 1.0) -> Tensor:
    """x above 0, alpha (exp(x / width) - 1) elsewhere."""
    below = where(x > 0.0, 0.0, x)
    return where(x > 0.0, x, alpha * (exp(below / width) - 1.0))


def _exponential_slope(x: Tensor, scale: float, width: float = 1.0) -> Tensor:
    """1 above 0, scale exp(x / width) elsewhere, with slope 0 at 0, as in PyTorch."""
    # exp of a large positive x would overflow in the branch that is not chosen.
    below = where(x >= 0.0, 0.0, x)
    return where(x > 0.0, 1.0, scale * exp(below / width))


elu = _row(
    name="Elu",
    body=lambda x, *, alpha: _exponential(x, alpha),
    vjp=lambda g, y, x, *, alpha: (g * _exponential_slope(x, alpha),),
    native=has_float_kernel,
    batch=elementwise,
    samples=(sample(normal(2, 3)), sample(normal(2, 3), alpha=0.5)),
)
"""Clevert et al. 2016."""

celu = _row(
    name="Celu",
    body=lambda x, *, alpha: _exponential(x, alpha, alpha),
    vjp=lambda g, y, x, *, alpha: (g * _exponential_slope(x, 1.0, alpha),),
    batch=elementwise,
    samples=(sample(apart(2, 3)), sample(apart(2, 3), alpha=0.5)),
)
"""Barron 2017: elu with a continuous slope."""

selu = _row(
    name="Selu",
    body=lambda x, *, alpha, gamma: gamma * _exponential(x, alpha),
    vjp=lambda g, y, x, *, alpha, gamma: (g * gamma * _exponential_slope(x, alpha),),
    native=has_float_kernel,
    batch=elementwise,
    samples=(sample(apart(2, 3)), sample(apart(2, 3), alpha=0.5, gamma=1.5)),
)
"""Klambauer et al. 2017; alpha and gamma keep mean 0 and variance 1."""


def _prelu(call: OpCall) -> tuple[TensorType, ...]:
    x, slope = call.type(0), call.type(1)
    if broadcast_same(call) != (x,):
        raise ShapeError(f"PRelu needs a slope that broadcasts to {x}, got {slope}")
    return (x,)


prelu = _row(
    name="PRelu",
    weights=(1,),
    infer=_prelu,
    body=lambda x, slope: where(x > 0, x, slope * x),
    native=has_float_kernel,
    samples=(sample(apart(2, 3, 4), between(0.1, 0.5, 3, 1)),),
)
"""He et al. 2015; at 0 the slope is the learned one, as in PyTorch."""

thresholded_relu = _row(
    name="ThresholdedRelu",
    body=lambda x, *, alpha: where(x > alpha, x, 0.0),
    native=has_float_kernel,
    samples=(sample(apart(3, 4)), sample(apart(2, 3), alpha=0.2)),
)
softsign = _row(
    name="Softsign",
    body=lambda x: x / (1.0 + abs_(x)),
    native=has_float_kernel,
    samples=(sample(apart(2, 3)),),
)
mish = _row(
    name="Mish",
    body=lambda x: x * tanh(softplus(x)),
    samples=(sample(normal(2, 3)),),
)
"""Misra 2020."""


def _swish_vjp_with_residuals(
    inputs: Sequence[Any], attrs: Mapping[str, Any], regions: Any, outputs: int, *, vjp_of: Any
) -> Any:
    """y = x s with s = sigmoid(alpha x); dy/dx = s (1 + alpha (x - y)), in four passes."""
    (x,), alpha = inputs, attrs.get("alpha", 1.0)
    # y' = s + alpha x s (1 - s) = s (1 + alpha (x - y)), since x s = y.
    s = sigmoid(x if alpha == 1.0 else alpha * x)
    y = x * s

    def pull(gs: Sequence[Tensor | None]) -> list[Tensor | None]:
        if gs[0] is None:
            return [None]
        scaled = gs[0] * s
        slope = x - y if alpha == 1.0 else alpha * (x - y)
        return [scaled + scaled * slope]

    return [y], pull


swish = _row(
    name="Swish",
    reference=lambda x, *, alpha: x * np.exp(-np.logaddexp(0, -alpha * x)),
    body=lambda x, *, alpha: x * sigmoid(x if alpha == 1.0 else alpha * x),
    vjp_with_residuals=_swish_vjp_with_residuals,
    native=lambda node, opset: False,  # onnxruntime 1.31 has no kernel of it
    samples=(sample(normal(2, 3)), sample(normal(2, 3), alpha=0.5)),
)
"""Ramachandran et al. 2017; alpha 1 is SiLU."""


def _shrink(x: Tensor, *, lambd: float, bias: float) -> Tensor:
    """Move values beyond `lambd` towards 0 by `bias`, others to 0; integers become float32."""
    # ONNX allows integers, whose bias may be a fraction; the cast back truncates as its reference
    # does.
    y = x if x.dtype.is_float else x.cast(float32)
    return where(y < -lambd, y + bias, where(y > lambd, y - bias, 0.0)).cast(x.dtype)


shrink = _row(
    name="Shrink",
    body=_shrink,
    samples=(
        sample(apart(3, 4), lambd=0.4, bias=0.25),
        sample(between(-1, 1, 3, 4)),
        sample(ints(-5, 5, 8, dtype="int32"), lambd=1.5, bias=1.0),
    ),
)
