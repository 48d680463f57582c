"""The training core: IR, autodiff, engines, converter, and the runtime that needs none of them.

Names are imported when first used, so `triplane.unified_ir.runtime` stays light.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from triplane.proto.lazy import lazy_names

if not __name__.startswith("triplane."):
    raise ImportError("import this package as triplane.unified_ir, not as a top-level package")

if TYPE_CHECKING:
    from triplane.unified_ir import convert as convert
    from triplane.unified_ir import data as data
    from triplane.unified_ir import nn as nn
    from triplane.unified_ir import ops as ops
    from triplane.unified_ir import optim as optim
    from triplane.unified_ir import runtime as runtime
    from triplane.unified_ir import train as train
    from triplane.unified_ir import zoo as zoo
    from triplane.unified_ir.engines.modules import import_onnx as import_onnx
    from triplane.unified_ir.engines.modules import load as load
    from triplane.unified_ir.engines.onnx_file import export_onnx as export_onnx
    from triplane.unified_ir.frontend import checkpoint as checkpoint
    from triplane.unified_ir.frontend import grad as grad
    from triplane.unified_ir.frontend import graph as graph
    from triplane.unified_ir.frontend import hessian_vector_product as hessian_vector_product
    from triplane.unified_ir.frontend import jvp as jvp
    from triplane.unified_ir.frontend import mode as mode
    from triplane.unified_ir.frontend import set_mode as set_mode
    from triplane.unified_ir.frontend import value_and_grad as value_and_grad
    from triplane.unified_ir.frontend import vjp as vjp
    from triplane.unified_ir.frontend import vmap as vmap
    from triplane.unified_ir.frontend.compare import compare as compare
    from triplane.unified_ir.frontend.trace import trace as trace
    from triplane.unified_ir.ir import Module as Module
    from triplane.unified_ir.ir import TensorSpec as TensorSpec
    from triplane.unified_ir.ops.check import save as save

__getattr__, __dir__, __all__ = lazy_names(__name__)
