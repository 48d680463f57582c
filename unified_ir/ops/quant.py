"""Rows that carry real numbers as small integers: x ~ (q - zero_point) * scale."""

from __future__ import annotations

from typing import Any

import numpy as np

from triplane.unified_ir.ir.types import ShapeError, TensorType, uint8
from triplane.unified_ir.ops.row import Call, Op
from triplane.unified_ir.ops.samples import given, ints, normal, sample
from triplane.unified_ir.ops.structure import axes_of

Types = tuple[TensorType, ...]


def _along(v: Any, x: Any, axis: int) -> Any:
    """A per-axis vector shaped to broadcast along `axis` of `x`; a scalar as it is."""
    return v.reshape([-1 if i == axis % x.ndim else 1 for i in range(x.ndim)]) if v.ndim else v


def _quantize(x: Any, scale: Any, zero: Any = None, *, axis: int, **_: Any) -> Any:
    """q = saturate(round_half_even(x / scale) + zero_point)."""
    zero = np.zeros(scale.shape, np.uint8) if zero is None else zero
    limits = np.iinfo(zero.dtype)
    q = np.rint(x / _along(scale, x, axis)) + _along(zero.astype(np.float64), x, axis)
    return np.clip(q, limits.min, limits.max).astype(zero.dtype)


def _dequantize(q: Any, scale: Any, zero: Any = None, *, axis: int, **_: Any) -> Any:
    shift = 0 if zero is None else _along(zero.astype(scale.dtype), q, axis)
    return (q.astype(scale.dtype) - shift) * _along(scale, q, axis)


def _check_scale(call: Call) -> None:
    """One scale in all, or one per slice of `axis`; the zero point likewise."""
    x, scale = call.type(0), call.type(1)
    axis = axes_of(x.rank, [call.attrs["axis"]])[0] if scale.rank else 0
    zero_fits = not call.has(2) or call.type(2).shape == scale.shape
    if scale.rank > 1 or (scale.rank and scale.shape[0] != x.shape[axis]) or not zero_fits:
        found = [str(call.type(i)) for i in range(len(call.types))]
        raise ShapeError(f"{call.row} takes one scale or one per slice of axis {axis}, got {found}")


def _quantized(call: Call) -> Types:
    _check_scale(call)
    return (call.type(0).with_dtype(call.type(2).dtype if call.has(2) else uint8),)


def _dequantized(call: Call) -> Types:
    _check_scale(call)
    return (call.type(0).with_dtype(call.type(1).dtype),)


quantize_linear = Op(
    name="QuantizeLinear",
    infer=_quantized,
    reference=_quantize,
    samples=(
        sample(normal(2, 3), given(0.05, "float32"), given(128, "uint8")),
        sample(normal(2, 3), given([0.05, 0.1], "float32"), given([0, 0], "int8"), axis=0),
    ),
)
dequantize_linear = Op(
    name="DequantizeLinear",
    infer=_dequantized,
    reference=_dequantize,
    samples=(
        sample(ints(0, 255, 2, 3, dtype="uint8"), given(0.05, "float32"), given(128, "uint8")),
        sample(ints(-127, 127, 2, 3, dtype="int8"), given([0.05, 0.1], "float32"), axis=0),
    ),
)
