"""Signed metadata (TUF): the roles, what they sign, and how a new version becomes visible.

`initialize` makes keys and the first version of every role, `MetadataRepository` keeps and
publishes metadata in the cloud, `signing` is what people run where their keys are.
"""

from typing import TYPE_CHECKING

from triplane.proto.lazy import lazy_names

if TYPE_CHECKING:
    from triplane.cloud.trust.initial import Initialized as Initialized
    from triplane.cloud.trust.initial import initialize as initialize
    from triplane.cloud.trust.repository import MetadataRepository as MetadataRepository
    from triplane.cloud.trust.repository import Pending as Pending
    from triplane.cloud.trust.repository import Submitted as Submitted
    from triplane.cloud.trust.servicer import MetadataServicer as MetadataServicer

__getattr__, __dir__, __all__ = lazy_names(__name__)
