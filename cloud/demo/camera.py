"""A changed camera: the same digits inverted and shifted by one pixel."""

from __future__ import annotations

import numpy as np

from triplane.unified_ir.ir.graph import Array


def changed(x: Array) -> Array:
    """x: (N, C, H, W) in 0..1 -> 1 - x, moved one pixel down and right; the edge becomes bright."""
    moved = np.ones_like(x)
    moved[..., 1:, 1:] = 1 - x[..., :-1, :-1]
    return moved
