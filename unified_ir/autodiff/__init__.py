"""Differentiation of functions: a function in, a function out."""

from triplane.unified_ir.autodiff.transforms import GRAD as GRAD
from triplane.unified_ir.autodiff.transforms import TANGENT as TANGENT
from triplane.unified_ir.autodiff.transforms import grad as grad
from triplane.unified_ir.autodiff.transforms import jvp as jvp
from triplane.unified_ir.autodiff.transforms import value_and_grad as value_and_grad
from triplane.unified_ir.autodiff.transforms import vjp as vjp
from triplane.unified_ir.autodiff.zero import ZeroGradient as ZeroGradient
from triplane.unified_ir.autodiff.zero import zero_gradient as zero_gradient
