"""Cells without state, for use in `Sequential`."""

from __future__ import annotations

from triplane.unified_ir import ops
from triplane.unified_ir.frontend.cell import Cell


class ReLU(Cell):
    """max(x, 0)."""

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        """x: any shape."""
        return ops.relu(x)


class Tanh(Cell):
    """Hyperbolic tangent."""

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        """x: any shape."""
        return ops.tanh(x)


class Sigmoid(Cell):
    """1 / (1 + exp(-x))."""

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        """x: any shape."""
        return ops.sigmoid(x)


class GELU(Cell):
    """x Phi(x) with the exact normal distribution (Hendrycks and Gimpel 2016)."""

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        """x: any shape."""
        return ops.gelu(x)


class Flatten(Cell):
    """x: (N, ...) -> (N, product of the rest)."""

    def construct(self, x: ops.Tensor) -> ops.Tensor:
        """x: (N, ...)."""
        return ops.flatten(x)
