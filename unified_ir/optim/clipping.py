"""Clipping of gradients by their common norm."""

from __future__ import annotations

from collections.abc import Mapping

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import ops
from triplane.unified_ir.ops.tensor import Tensor


def global_norm(grads: Mapping[str, Tensor]) -> Tensor:
    """sqrt of the sum of squares of all elements of all tensors."""
    squares = [(g * g).sum() for g in grads.values()]
    return ops.sqrt(sum(squares[1:], squares[0]))


def clip_by_global_norm(grads: Mapping[str, Tensor], limit: float) -> dict[str, Tensor]:
    """Each gradient times min(1, limit / (norm + 1e-6)) (Pascanu et al. 2013, as in PyTorch)."""
    if not limit > 0:
        raise InvalidInput(f"a gradient's norm is clipped to a limit > 0, got {limit}")
    factor = ops.minimum(limit / (global_norm(grads) + 1e-6), 1.0)
    return {k: g * factor for k, g in grads.items()}
