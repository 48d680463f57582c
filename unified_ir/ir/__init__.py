"""Types, the graph, its text and its codec. Knows operators by name only."""

from triplane.unified_ir.ir.dims import Dim as Dim
from triplane.unified_ir.ir.dims import symbol as symbol
from triplane.unified_ir.ir.graph import Function as Function
from triplane.unified_ir.ir.graph import Location as Location
from triplane.unified_ir.ir.graph import Meta as Meta
from triplane.unified_ir.ir.graph import Node as Node
from triplane.unified_ir.ir.graph import OpId as OpId
from triplane.unified_ir.ir.graph import Role as Role
from triplane.unified_ir.ir.graph import StateTensor as StateTensor
from triplane.unified_ir.ir.graph import Value as Value
from triplane.unified_ir.ir.module import Module as Module
from triplane.unified_ir.ir.types import DType as DType
from triplane.unified_ir.ir.types import ShapeError as ShapeError
from triplane.unified_ir.ir.types import TensorSpec as TensorSpec
from triplane.unified_ir.ir.types import TensorType as TensorType
from triplane.unified_ir.ir.types import TypeMismatch as TypeMismatch
