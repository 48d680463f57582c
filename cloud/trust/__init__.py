"""Signed metadata (TUF): the roles, what they sign, and how a new version becomes visible.

`initialize` makes keys and the first version of every role, `MetadataRepository` keeps and
publishes metadata in the cloud, `signing` is what people run where their keys are.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from triplane.cloud.trust.initial import Initialized, initialize
    from triplane.cloud.trust.repository import MetadataRepository, Pending, Submitted
    from triplane.cloud.trust.servicer import MetadataServicer

_HOMES: Final = {
    "Initialized": "initial",
    "MetadataServicer": "servicer",
    "Pending": "repository",
    "MetadataRepository": "repository",
    "Submitted": "repository",
    "initialize": "initial",
}

__all__ = [
    "Initialized",
    "MetadataRepository",
    "MetadataServicer",
    "Pending",
    "Submitted",
    "initialize",
]


def __getattr__(name: str) -> Any:
    """Import the module that owns a public name when it is first asked for (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
