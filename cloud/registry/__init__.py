"""Models by name and version, and the bundles made of them on demand.

A version is a model file with the recipe of its bundles; it never changes. Aliases move. Files are
blobs named by SHA-256, which the transfer service fills; everything about them is in the database.
"""

from typing import TYPE_CHECKING

from triplane.proto.lazy import lazy_names

if TYPE_CHECKING:
    from triplane.cloud.registry.conversions import ConversionLimits as ConversionLimits
    from triplane.cloud.registry.conversions import Conversions as Conversions
    from triplane.cloud.registry.names import Reference as Reference
    from triplane.cloud.registry.registry import Registry as Registry
    from triplane.cloud.registry.servicer import RegistryServicer as RegistryServicer
    from triplane.cloud.registry.values import BundleRecord as BundleRecord
    from triplane.cloud.registry.values import ConversionRecipe as ConversionRecipe
    from triplane.cloud.registry.values import Lineage as Lineage
    from triplane.cloud.registry.values import Model as Model
    from triplane.cloud.registry.values import Needs as Needs
    from triplane.cloud.registry.values import Push as Push
    from triplane.cloud.registry.values import State as State
    from triplane.cloud.registry.values import Version as Version

__getattr__, __dir__, __all__ = lazy_names(__name__)
