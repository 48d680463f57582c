"""Differentiation of functions: a function in, a function out."""

from triplane.unified_ir.autodiff.transforms import (
    GRAD,
    TANGENT,
    grad,
    jvp,
    value_and_grad,
    vjp,
)
from triplane.unified_ir.autodiff.zero import ZeroGradient, zero_gradient

__all__ = [
    "GRAD",
    "TANGENT",
    "ZeroGradient",
    "grad",
    "jvp",
    "value_and_grad",
    "vjp",
    "zero_gradient",
]
