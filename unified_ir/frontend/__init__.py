"""From Python to functions: cells, tracing, calling with arrays, transforms."""

from triplane.unified_ir.frontend.cell import Cell as Cell
from triplane.unified_ir.frontend.cell import CellDict as CellDict
from triplane.unified_ir.frontend.cell import CellList as CellList
from triplane.unified_ir.frontend.cell import Parameter as Parameter
from triplane.unified_ir.frontend.custom import custom_vjp as custom_vjp
from triplane.unified_ir.frontend.diagnose import first_nonfinite as first_nonfinite
from triplane.unified_ir.frontend.diagnose import zero_gradients as zero_gradients
from triplane.unified_ir.frontend.mapped import vmap as vmap
from triplane.unified_ir.frontend.run import graph as graph
from triplane.unified_ir.frontend.run import mode as mode
from triplane.unified_ir.frontend.run import set_mode as set_mode
from triplane.unified_ir.frontend.trace import trace as trace
from triplane.unified_ir.frontend.transforms import checkpoint as checkpoint
from triplane.unified_ir.frontend.transforms import grad as grad
from triplane.unified_ir.frontend.transforms import hessian_vector_product as hessian_vector_product
from triplane.unified_ir.frontend.transforms import jvp as jvp
from triplane.unified_ir.frontend.transforms import value_and_grad as value_and_grad
from triplane.unified_ir.frontend.transforms import vjp as vjp
