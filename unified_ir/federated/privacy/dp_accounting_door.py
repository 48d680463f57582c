"""The one place that imports dp-accounting, which the extra `privacy` installs."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

from triplane.proto.errors import MissingExtra


def installed() -> bool:
    """Whether dp-accounting can be imported; it is not imported for this (it takes a second)."""
    return importlib.util.find_spec("dp_accounting") is not None


def gaussian_epsilon(m: float, delta: float) -> float:
    """Return the epsilon of a Gaussian mechanism with noise multiplier 1/m at `delta`."""
    if m == 0:
        return 0.0
    return float(_library("Gaussian noise").get_epsilon_gaussian(1 / m, delta))


def concentrated_epsilon(rho: float, delta: float, orders: Sequence[float]) -> float:
    """Return the epsilon at `delta` of a mechanism with Renyi divergences order * rho."""
    library = _library("concentrated privacy")
    event = library.ZCDpEvent(rho)
    return float(library.rdp.RdpAccountant(orders).compose(event).get_epsilon(delta))


def _library(what: str) -> Any:
    try:
        import dp_accounting
    except ImportError as error:
        raise MissingExtra(
            f"accounting for {what} by dp-accounting, which is not installed ({error}); it comes "
            "with: pip install 'triplane[privacy]'"
        ) from error
    return dp_accounting
