"""Clipping of gradients: by element, by the norm of each tensor, by their common norm."""

from __future__ import annotations

import math
from collections.abc import Mapping

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import ops
from triplane.unified_ir.ir.types import float32, float64
from triplane.unified_ir.ops.tensor import Tensor


def global_norm(grads: Mapping[str, Tensor]) -> Tensor:
    """Return the square root of the sum of squares of all elements of all tensors."""
    # One type for all: squares of float16 leave its range, and a sum needs equal types.
    common = float64 if any(g.dtype == float64 for g in grads.values()) else float32
    squares = [(g * g).sum() for g in (g.cast(common) for g in grads.values())]
    return ops.sqrt(sum(squares[1:], squares[0]))


def clip_by_global_norm(
    grads: Mapping[str, Tensor], limit: float, norm: Tensor | None = None
) -> dict[str, Tensor]:
    """Scale gradients by min(1, limit / (norm + 1e-6)) (Pascanu et al. 2013, as in PyTorch).

    norm: that of all gradients, where these are only some of them.
    """
    check_limit("norm", limit)
    factor = _factor(global_norm(grads) if norm is None else norm, limit)
    return {k: _scaled(g, factor) for k, g in grads.items()}


def clip_by_norm(grads: Mapping[str, Tensor], limit: float) -> dict[str, Tensor]:
    """Scale each gradient as `clip_by_global_norm` does, but by its own norm."""
    check_limit("norm", limit)
    return {k: _scaled(g, _factor(global_norm({k: g}), limit)) for k, g in grads.items()}


def clip_by_value(grads: Mapping[str, Tensor], limit: float) -> dict[str, Tensor]:
    """Limit each element to -limit..limit."""
    check_limit("element", limit)
    return {k: ops.clip(g, -float(limit), float(limit)) for k, g in grads.items()}


def check_limit(what: str, limit: float) -> None:
    """Refuse a limit that is not positive and finite."""
    if not 0 < limit < math.inf:
        raise InvalidInput(f"a gradient's {what} is clipped to a limit > 0, got {limit}")


def _factor(norm: Tensor, limit: float) -> Tensor:
    return ops.minimum(limit / (norm + 1e-6), 1.0)


def _scaled(g: Tensor, factor: Tensor) -> Tensor:
    # In the factor's type: where a gradient of float16 is large, the factor would be 0 in float16.
    return (g.cast(factor.dtype) * factor).cast(g.dtype)
