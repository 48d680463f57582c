"""What codes of numbers share on the host and in XLA: scales along an axis, and saturation."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from triplane.unified_ir.ir.types import DType, uint8
from triplane.unified_ir.ops.row import dtype_attr


def along(v: Any, x: Any, axis: int, block: int = 0, xp: Any = np) -> Any:
    """Shape scales or zero points so that they broadcast against `x`; xp: numpy, or JAX's."""
    if not v.ndim or (v.ndim == 1 and v.size == 1 and not block):
        return v.reshape(())
    if block:
        at = axis % x.ndim
        # The last block may be shorter than the others.
        return xp.take(xp.repeat(v, block, at), np.arange(x.shape[at]), at)
    return v.reshape([-1 if i == axis % x.ndim else 1 for i in range(x.ndim)])


def saturated(x: Any, dtype: DType) -> Any:
    """Round to the nearest value of `dtype`; values out of range saturate."""
    if not dtype.is_float:
        limits = ml_dtypes.iinfo(dtype.numpy)  # type: ignore[no-untyped-call]
        held = x.clip(int(limits.min), int(limits.max))
        return held.astype(np.int32).astype(dtype.numpy)
    end = float(ml_dtypes.finfo(dtype.numpy).max)  # type: ignore[no-untyped-call]
    return x.clip(-end, end).astype(dtype.numpy)


def type_of_codes(wanted: int) -> DType:
    """Return the element type that `output_dtype` names; without it uint8."""
    return dtype_attr(wanted) if wanted else uint8


def shaped(scale: Any, rank: int, axis: int) -> Any:
    """One scale, or one per row (axis -2) or column (axis -1) of a product."""
    if scale.ndim != 1 or scale.size == 1:
        return scale.reshape(()) if scale.size == 1 else scale
    return scale.reshape([-1 if i == rank + axis else 1 for i in range(rank)])


def shifted(q: Any, zero: Any, axis: int) -> Any:
    """Subtract zero points: one, one per slice of `axis`, or shaped to broadcast."""
    if zero is None:
        return q.astype(np.float64)
    if zero.ndim <= 1 or zero.size == 1:
        zero = along(zero.reshape(-1), q, axis)
    return q.astype(np.float64) - zero.astype(np.float64)
