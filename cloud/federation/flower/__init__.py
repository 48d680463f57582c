"""Flower strategies in runs. Each strategy has a process of its own.

`runs`, `study`, `process`, `orders` and `spec` belong to the process of the cloud or of a study,
the other modules to a strategy's.
`adapter` is the only module of the cloud that imports flwr. It is loaded on the first use of
`Triplane` or `Sampling`; there is no `__all__`, since both need the extra `[flower]`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from triplane.cloud.federation.flower.adapter import Sampling as Sampling
    from triplane.cloud.federation.flower.adapter import Triplane as Triplane


def __getattr__(name: str) -> Any:
    if name not in {"Sampling", "Triplane"}:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.adapter"), name)
