"""Models by name and version, and the bundles made of them on demand.

A version is a model file with the recipe of its bundles; it never changes. Aliases move. Bytes are
blobs named by SHA-256, filled by transfer; what is said about them is in the database.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from triplane.cloud.registry.conversions import Conversions, Limits
    from triplane.cloud.registry.names import Reference
    from triplane.cloud.registry.registry import Registry
    from triplane.cloud.registry.servicer import RegistryServicer
    from triplane.cloud.registry.values import (
        BundleRecord,
        ConversionRecipe,
        Lineage,
        Model,
        Needs,
        Push,
        State,
        Version,
    )

_HOMES: Final = {
    "BundleRecord": "values",
    "Conversions": "conversions",
    "Limits": "conversions",
    "Lineage": "values",
    "Model": "values",
    "Needs": "values",
    "Push": "values",
    "ConversionRecipe": "values",
    "Reference": "names",
    "Registry": "registry",
    "RegistryServicer": "servicer",
    "State": "values",
    "Version": "values",
}

__all__ = [
    "BundleRecord",
    "ConversionRecipe",
    "Conversions",
    "Limits",
    "Lineage",
    "Model",
    "Needs",
    "Push",
    "Reference",
    "Registry",
    "RegistryServicer",
    "State",
    "Version",
]


def __getattr__(name: str) -> Any:
    """Import the module that owns a public name when it is first asked for (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
