"""Loading for serving and devices: graphs on onnxruntime, bundles and plans; no training code.

Importing this package imports neither onnxruntime nor onnx, grpc, click, rich or jax; the first use
of `Session`, `Bundle` or `Plan` imports onnxruntime, and never the others.
"""

from typing import TYPE_CHECKING

from triplane.proto.lazy import lazy_names

if TYPE_CHECKING:
    from triplane.unified_ir.runtime.adaptation import adapted_weights as adapted_weights
    from triplane.unified_ir.runtime.adaptation import batch_names as batch_names
    from triplane.unified_ir.runtime.adaptation import write_adapted as write_adapted
    from triplane.unified_ir.runtime.bundle import Bundle as Bundle
    from triplane.unified_ir.runtime.bundle import BundleSpec as BundleSpec
    from triplane.unified_ir.runtime.bundle import content_digest as content_digest
    from triplane.unified_ir.runtime.bundle import weight_offsets as weight_offsets
    from triplane.unified_ir.runtime.bundle import write_bundle as write_bundle
    from triplane.unified_ir.runtime.description import Constraints as Constraints
    from triplane.unified_ir.runtime.description import Description as Description
    from triplane.unified_ir.runtime.description import Preprocessing as Preprocessing
    from triplane.unified_ir.runtime.description import Tolerance as Tolerance
    from triplane.unified_ir.runtime.plan import Limits as Limits
    from triplane.unified_ir.runtime.plan import Plan as Plan
    from triplane.unified_ir.runtime.plan import PlanSpec as PlanSpec
    from triplane.unified_ir.runtime.plan import write_plan as write_plan
    from triplane.unified_ir.runtime.session import DEFAULT_OPTIONS as DEFAULT_OPTIONS
    from triplane.unified_ir.runtime.session import Loop as Loop
    from triplane.unified_ir.runtime.session import Session as Session
    from triplane.unified_ir.runtime.session import SessionOptions as SessionOptions
    from triplane.unified_ir.runtime.session import available_providers as available_providers
    from triplane.unified_ir.runtime.session import version as version
    from triplane.unified_ir.runtime.signature import TensorInfo as TensorInfo
    from triplane.unified_ir.runtime.signature import next_name as next_name

__getattr__, __dir__, __all__ = lazy_names(__name__)
