"""The one place that imports dp-accounting, which the extra `privacy` installs."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence

from triplane.proto.errors import MissingExtra


def installed() -> bool:
    """Whether dp-accounting can be imported; it is not imported for this (it takes a second)."""
    return importlib.util.find_spec("dp_accounting") is not None


def epsilon(gaussians: Iterable[tuple[float, int]], delta: float, orders: Sequence[float]) -> float:
    """Return the epsilon at `delta` of Gaussian mechanisms by dp-accounting's Renyi accountant.

    gaussians: noise multiplier and uses of each. MissingExtra if dp-accounting is not installed.
    """
    try:
        import dp_accounting
    except ImportError as error:
        raise MissingExtra(
            f"dp-accounting is not installed ({error}); it comes with: pip install "
            "'triplane[privacy]'. Without it, the accountant of Triplane gives the same epsilon"
        ) from error
    accountant = dp_accounting.rdp.RdpAccountant(orders)
    for multiplier, uses in gaussians:
        accountant.compose(dp_accounting.GaussianDpEvent(multiplier), uses)
    return float(accountant.get_epsilon(delta))
