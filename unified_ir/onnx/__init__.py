"""Whole functions as ONNX models."""

from triplane.unified_ir.onnx.blocks import fold_repeats, node_count
from triplane.unified_ir.onnx.emit import External, Initializer, emit, serialize
from triplane.unified_ir.onnx.target import OnnxTarget

__all__ = [
    "External",
    "Initializer",
    "OnnxTarget",
    "emit",
    "fold_repeats",
    "node_count",
    "serialize",
]
