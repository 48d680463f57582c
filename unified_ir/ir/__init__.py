"""Types, the graph, its text and its codec. Knows no operator beyond its name."""

from triplane.unified_ir.ir.dims import Dim, symbol
from triplane.unified_ir.ir.graph import (
    Function,
    Location,
    Meta,
    Node,
    OpId,
    Role,
    StateTensor,
    Value,
)
from triplane.unified_ir.ir.module import Module
from triplane.unified_ir.ir.types import DType, ShapeError, TensorSpec, TensorType, TypeMismatch

__all__ = [
    "DType",
    "Dim",
    "Function",
    "Location",
    "Meta",
    "Module",
    "Node",
    "OpId",
    "Role",
    "ShapeError",
    "StateTensor",
    "TensorSpec",
    "TensorType",
    "TypeMismatch",
    "Value",
    "symbol",
]
