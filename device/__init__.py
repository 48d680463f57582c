"""The device tier: a process or an application that learns from its own data and sends changes.

What leaves is an update of shared tensors, compressed as the run asks, and accuracies. The cloud
chooses the plan that computes them, so it can learn samples: docs/privacy.md.
Importing this package imports nothing of weight; `FederatedClient` brings onnxruntime and grpc.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if not __name__.startswith("triplane."):
    raise ImportError("import this package as triplane.device, not as a top-level package")

if TYPE_CHECKING:
    from triplane.device.client import FederatedClient
    from triplane.device.samples import shard_of
    from triplane.unified_ir.federated.core.learn import Shard

_HOMES: Final = {
    "FederatedClient": "triplane.device.client",
    "Shard": "triplane.unified_ir.federated.core.learn",
    "shard_of": "triplane.device.samples",
}

__all__ = ["FederatedClient", "Shard", "shard_of"]


def __getattr__(name: str) -> Any:
    """Import the module that owns a public name when it is first asked for (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
