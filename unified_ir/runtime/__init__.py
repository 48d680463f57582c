"""What serving and devices load: graphs on onnxruntime, bundles and plans; nothing that trains.

Importing this package imports neither onnxruntime nor onnx, grpc, click, rich or jax; the first
use of `Session`, `Bundle` or `Plan` imports onnxruntime, and never the others.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from triplane.unified_ir.runtime.session import (
        Loop,
        Session,
        SessionOptions,
        available_providers,
        version,
    )
    from triplane.unified_ir.runtime.signature import TensorInfo, next_name

_HOMES: Final = {
    "Loop": "session",
    "Session": "session",
    "SessionOptions": "session",
    "TensorInfo": "signature",
    "available_providers": "session",
    "next_name": "signature",
    "version": "session",
}

__all__ = [
    "Loop",
    "Session",
    "SessionOptions",
    "TensorInfo",
    "available_providers",
    "next_name",
    "version",
]


def __getattr__(name: str) -> Any:
    """Import the module that owns a public name when it is first asked for (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
