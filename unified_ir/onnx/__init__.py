"""Whole functions as ONNX models, and ONNX models as modules."""

from triplane.unified_ir.onnx.blocks import fold_repeats as fold_repeats
from triplane.unified_ir.onnx.blocks import node_count as node_count
from triplane.unified_ir.onnx.emit import EmittedInitializer as EmittedInitializer
from triplane.unified_ir.onnx.emit import External as External
from triplane.unified_ir.onnx.emit import emit as emit
from triplane.unified_ir.onnx.emit import emit_typed as emit_typed
from triplane.unified_ir.onnx.emit import serialize as serialize
from triplane.unified_ir.onnx.importer import import_onnx as import_onnx
from triplane.unified_ir.onnx.target import OnnxTarget as OnnxTarget
from triplane.unified_ir.ops.emission import DYNAMIC_LSTM as DYNAMIC_LSTM
