"""The inference server: Open Inference Protocol v2 over gRPC, one model version per artefact.

Imports `triplane.unified_ir.runtime`, `triplane.proto`, grpc, numpy, protobuf, prometheus_client
and nothing that signs, trains or converts. Names load on first use, so importing it is free.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from triplane.edge.serving.bundles import open_bundle as open_bundle
    from triplane.edge.serving.limits import Limits as Limits
    from triplane.edge.serving.options import Options as Options
    from triplane.edge.serving.repository import Repository as Repository
    from triplane.edge.serving.servable import Servable as Servable
    from triplane.edge.serving.server import Server as Server

_HOMES = {
    "Limits": "limits",
    "Options": "options",
    "Repository": "repository",
    "Servable": "servable",
    "Server": "server",
    "open_bundle": "bundles",
}

__all__ = ["Limits", "Options", "Repository", "Servable", "Server", "open_bundle"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
