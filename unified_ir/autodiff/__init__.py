"""Differentiation of functions: a function in, a function out."""

from triplane.unified_ir.autodiff.transforms import GRAD, grad, value_and_grad, vjp

__all__ = ["GRAD", "grad", "value_and_grad", "vjp"]
