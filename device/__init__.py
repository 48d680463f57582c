"""The device tier: a process or an application that learns from its own data and sends changes.

What leaves is an update of shared tensors, compressed as the run asks, and scores. A signed plan
computes them; what the cloud can still learn of samples is in docs/privacy.md.
Importing this package imports nothing of weight; `FederatedClient` brings onnxruntime and grpc.
"""

from typing import TYPE_CHECKING

from triplane.proto.lazy import lazy_names

if not __name__.startswith("triplane."):
    raise ImportError("import this package as triplane.device, not as a top-level package")

if TYPE_CHECKING:
    from triplane.device.client import FederatedClient as FederatedClient
    from triplane.device.samples import shard_of as shard_of
    from triplane.unified_ir.federated.core.learn import Shard as Shard

__getattr__, __dir__, __all__ = lazy_names(__name__)
