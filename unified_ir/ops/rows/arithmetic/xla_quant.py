"""Quantization in XLA. Sums of integers are exact: they are computed in float64, as on the host."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from triplane.unified_ir.ir.types import DType, as_dtype, uint8
from triplane.unified_ir.ops.lowering import XlaContext
from triplane.unified_ir.ops.row import dtype_attr
from triplane.unified_ir.ops.rows.arithmetic.coding import (
    along,
    saturated,
    shaped,
    shifted,
    type_of_codes,
)
from triplane.unified_ir.ops.rows.windows import xla_convolutions


def quantize(
    k: XlaContext, x: Any, scale: Any, zero: Any = None, *, axis: int, block_size: int,
    output_dtype: int, precision: int, saturate: int,
) -> Any:  # fmt: skip
    """Lower QuantizeLinear."""
    to = as_dtype(zero.dtype) if zero is not None else type_of_codes(output_dtype)
    like = dtype_attr(precision).numpy if precision else x.dtype
    step = _rounded(k, along(scale, x, axis, block_size, k.np), like)
    ratio = _rounded(k, _rounded(k, x, like) / step, like)
    if to.is_float:
        return saturated(ratio, to) if saturate else ratio.astype(to.numpy)
    # Codes have at most 16 bits, so that float32 holds every sum that does not saturate.
    ratio = k.np.rint(ratio)
    shift = 0 if zero is None else along(zero, x, axis, block_size, k.np).astype(ratio.dtype)
    return saturated(ratio + shift, to)


def _rounded(k: XlaContext, x: Any, like: Any) -> Any:
    """Round to an element type; half precision is held in float32.

    Left to itself XLA divides float16 by way of a reciprocal, and skips a conversion to float16
    that another one to float32 follows.
    """
    if like.itemsize >= 4:
        return x.astype(like)
    limits = ml_dtypes.finfo(like)  # type: ignore[no-untyped-call]
    return k.lax.reduce_precision(x.astype(np.float32), limits.nexp, limits.nmant)


def dequantize(
    k: XlaContext, q: Any, scale: Any, zero: Any = None, *,
    axis: int, block_size: int, output_dtype: int,
) -> Any:  # fmt: skip
    """Lower DequantizeLinear."""
    to = dtype_attr(output_dtype).numpy if output_dtype else scale.dtype
    step = along(scale, q, axis, block_size, k.np)
    if zero is not None:
        wide = _difference_type(as_dtype(q.dtype))
        q = q.astype(wide) - along(zero, q, axis, block_size, k.np).astype(wide)
    return (q.astype(step.dtype) * step).astype(to)


def _difference_type(codes: DType) -> Any:
    """Return the type that holds the difference of two codes; CPUs convert 64 bits slowly."""
    if codes.kind not in {"int", "uint"}:
        return np.float32
    return np.int32 if codes.numpy.itemsize < 4 else np.int64


def dynamic(k: XlaContext, x: Any) -> Any:
    """Lower DynamicQuantizeLinear."""
    low, high = x.min(initial=0), x.max(initial=0)
    step = (high - low) / np.float32(255)
    step = k.np.where(step == 0, np.float32(1), step)
    zero = saturated(k.np.rint(-low / step), uint8)
    codes = saturated(k.np.rint(x / step) + zero.astype(np.float32), uint8)
    return (codes, step, zero)[: len(k.node.outputs)]


def _product(k: XlaContext, a: Any, a_zero: Any, b: Any, b_zero: Any) -> Any:
    left = shifted(a, a_zero, -2 if a.ndim > 1 else -1)
    return k.np.rint(k.np.matmul(left, shifted(b, b_zero, -1)))


def _convolved(
    k: XlaContext, x: Any, x_zero: Any, w: Any, w_zero: Any, bias: Any = None, **attrs: Any
) -> Any:
    wide = None if bias is None else bias.astype(np.float64)
    # Kernels for GPUs may transform both operands, so that sums of whole numbers are not whole.
    return k.np.rint(
        xla_convolutions.conv(k, shifted(x, x_zero, 0), shifted(w, w_zero, 0), wide, **attrs)
    )


def _wrapped(sums: Any) -> Any:
    return sums.astype(np.int64).astype(np.int32)


def matmul_integer(k: XlaContext, a: Any, b: Any, a_zero: Any = None, b_zero: Any = None) -> Any:
    """Lower MatMulInteger."""
    return _wrapped(_product(k, a, a_zero, b, b_zero))


def conv_integer(
    k: XlaContext, x: Any, w: Any, x_zero: Any = None, w_zero: Any = None, **attrs: Any
) -> Any:
    """Lower ConvInteger."""
    return _wrapped(_convolved(k, x, x_zero, w, w_zero, **attrs))


def _requantized(k: XlaContext, product: Any, scale: Any, zero: Any) -> Any:
    ratio = k.np.rint(product * scale.astype(np.float64)) + zero.astype(np.float64)
    return saturated(ratio, as_dtype(zero.dtype))


def qlinear_matmul(  # noqa: PLR0917 - the operands of the row
    k: XlaContext, a: Any, a_scale: Any, a_zero: Any, b: Any, b_scale: Any, b_zero: Any,
    y_scale: Any, y_zero: Any,
) -> Any:  # fmt: skip
    """Lower QLinearMatMul."""
    product = _product(k, a, a_zero, b, b_zero)
    rank = max(product.ndim, 1)
    scale = shaped(a_scale, rank, -2) * shaped(b_scale, rank, -1) / y_scale.reshape(())
    return _requantized(k, product, scale, y_zero.reshape(()))


def qlinear_conv(  # noqa: PLR0917 - the operands of the row
    k: XlaContext, x: Any, x_scale: Any, x_zero: Any, w: Any, w_scale: Any, w_zero: Any,
    y_scale: Any, y_zero: Any, bias: Any = None, **attrs: Any,
) -> Any:  # fmt: skip
    """Lower QLinearConv."""
    y = _convolved(k, x, x_zero, w, w_zero, bias, **attrs)
    return _requantized(k, y, x_scale * shaped(w_scale, y.ndim, 1 - y.ndim) / y_scale, y_zero)
