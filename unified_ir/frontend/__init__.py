"""From Python to functions: cells, tracing, calling with arrays, transforms."""

from triplane.unified_ir.frontend.cell import Cell, CellList, Parameter
from triplane.unified_ir.frontend.custom import custom_vjp
from triplane.unified_ir.frontend.diagnose import first_nonfinite, zero_gradients
from triplane.unified_ir.frontend.mapped import vmap
from triplane.unified_ir.frontend.run import graph, mode, set_mode
from triplane.unified_ir.frontend.trace import trace
from triplane.unified_ir.frontend.transforms import (
    checkpoint,
    grad,
    hessian_vector_product,
    jvp,
    value_and_grad,
    vjp,
)

__all__ = [
    "Cell",
    "CellList",
    "Parameter",
    "checkpoint",
    "custom_vjp",
    "first_nonfinite",
    "grad",
    "graph",
    "hessian_vector_product",
    "jvp",
    "mode",
    "set_mode",
    "trace",
    "value_and_grad",
    "vjp",
    "vmap",
    "zero_gradients",
]
