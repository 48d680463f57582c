"""What serving and devices load: graphs on onnxruntime, bundles and plans; nothing that trains.

Importing this package imports neither onnxruntime nor onnx, grpc, click, rich or jax; the first
use of `Session`, `Bundle` or `Plan` imports onnxruntime, and never the others.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from triplane.unified_ir.runtime.adaptation import (
        adapted_weights,
        batch_names,
        write_adapted,
    )
    from triplane.unified_ir.runtime.bundle import (
        Bundle,
        BundleSpec,
        content_digest,
        weight_offsets,
        write_bundle,
    )
    from triplane.unified_ir.runtime.description import (
        Constraints,
        Description,
        Preprocessing,
        Tolerance,
    )
    from triplane.unified_ir.runtime.plan import Limits, Plan, PlanSpec, write_plan
    from triplane.unified_ir.runtime.session import (
        DEFAULT_OPTIONS,
        Loop,
        Session,
        SessionOptions,
        available_providers,
        version,
    )
    from triplane.unified_ir.runtime.signature import TensorInfo, next_name

_HOMES: Final = {
    "Bundle": "bundle",
    "BundleSpec": "bundle",
    "Constraints": "description",
    "DEFAULT_OPTIONS": "session",
    "Description": "description",
    "Limits": "plan",
    "Loop": "session",
    "Plan": "plan",
    "PlanSpec": "plan",
    "Preprocessing": "description",
    "Session": "session",
    "SessionOptions": "session",
    "TensorInfo": "signature",
    "Tolerance": "description",
    "adapted_weights": "adaptation",
    "available_providers": "session",
    "batch_names": "adaptation",
    "content_digest": "bundle",
    "next_name": "signature",
    "version": "session",
    "weight_offsets": "bundle",
    "write_adapted": "adaptation",
    "write_bundle": "bundle",
    "write_plan": "plan",
}

__all__ = [
    "DEFAULT_OPTIONS",
    "Bundle",
    "BundleSpec",
    "Constraints",
    "Description",
    "Limits",
    "Loop",
    "Plan",
    "PlanSpec",
    "Preprocessing",
    "Session",
    "SessionOptions",
    "TensorInfo",
    "Tolerance",
    "adapted_weights",
    "available_providers",
    "batch_names",
    "content_digest",
    "next_name",
    "version",
    "weight_offsets",
    "write_adapted",
    "write_bundle",
    "write_plan",
]


def __getattr__(name: str) -> Any:
    """Import the module that owns a public name when it is first asked for (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
