"""The training core: IR, autodiff, engines, converter, and the runtime that needs none of them.

Names are imported when first used, so `triplane.unified_ir.runtime` stays light.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if not __name__.startswith("triplane."):
    raise ImportError("import this package as triplane.unified_ir, not as a top-level package")

if TYPE_CHECKING:
    from triplane.unified_ir import convert, data, nn, ops, optim, runtime, train, zoo
    from triplane.unified_ir.frontend import (
        checkpoint,
        grad,
        graph,
        hessian_vector_product,
        jvp,
        mode,
        set_mode,
        value_and_grad,
        vjp,
        vmap,
    )
    from triplane.unified_ir.frontend.compare import compare
    from triplane.unified_ir.frontend.trace import trace
    from triplane.unified_ir.ir import Module, TensorSpec
    from triplane.unified_ir.onnx import import_onnx
    from triplane.unified_ir.ops.check import load, save

_SUBPACKAGES = frozenset({"convert", "data", "nn", "ops", "optim", "runtime", "train", "zoo"})
_NAMES = {
    "Module": "ir",
    "TensorSpec": "ir",
    "checkpoint": "frontend",
    "compare": "frontend.compare",
    "grad": "frontend",
    "graph": "frontend",
    "import_onnx": "onnx.importer",
    "hessian_vector_product": "frontend",
    "jvp": "frontend",
    "load": "ops.check",
    "mode": "frontend",
    "save": "ops.check",
    "set_mode": "frontend",
    "trace": "frontend",
    "value_and_grad": "frontend",
    "vjp": "frontend",
    "vmap": "frontend",
}

__all__ = [
    "Module",
    "TensorSpec",
    "checkpoint",
    "compare",
    "convert",
    "data",
    "grad",
    "graph",
    "hessian_vector_product",
    "import_onnx",
    "jvp",
    "load",
    "mode",
    "nn",
    "ops",
    "optim",
    "runtime",
    "save",
    "set_mode",
    "trace",
    "train",
    "value_and_grad",
    "vjp",
    "vmap",
    "zoo",
]


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return import_module(f"{__name__}.{name}")
    if name in _NAMES:
        return getattr(import_module(f"{__name__}.{_NAMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
