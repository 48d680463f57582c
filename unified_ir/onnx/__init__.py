"""Whole functions as ONNX models, and ONNX models as modules."""

from triplane.unified_ir.onnx.blocks import fold_repeats, node_count
from triplane.unified_ir.onnx.emit import EmittedInitializer, External, emit, emit_typed, serialize
from triplane.unified_ir.onnx.importer import import_onnx
from triplane.unified_ir.onnx.target import OnnxTarget
from triplane.unified_ir.ops.emission import DYNAMIC_LSTM

__all__ = [
    "DYNAMIC_LSTM",
    "EmittedInitializer",
    "External",
    "OnnxTarget",
    "emit",
    "emit_typed",
    "fold_repeats",
    "import_onnx",
    "node_count",
    "serialize",
]
