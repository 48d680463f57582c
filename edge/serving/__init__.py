"""The inference server: Open Inference Protocol v2 over gRPC, one model version per bundle.

It imports `triplane.unified_ir.runtime`, `triplane.proto`, grpc, numpy, protobuf and
prometheus_client, but nothing that signs, trains or converts. Names are loaded on first use.
"""

from typing import TYPE_CHECKING

from triplane.proto.lazy import lazy_names

if TYPE_CHECKING:
    from triplane.edge.serving.bundles import open_bundle as open_bundle
    from triplane.edge.serving.limits import ServingLimits as ServingLimits
    from triplane.edge.serving.options import Options as Options
    from triplane.edge.serving.repository import Repository as Repository
    from triplane.edge.serving.servable import Servable as Servable
    from triplane.edge.serving.server import Server as Server

__getattr__, __dir__, __all__ = lazy_names(__name__)
