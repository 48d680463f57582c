"""The share of a call's time that is spent on integers.

Integer kernels for every product do not imply speed: operators between the products may run in
float, and each change to float and back converts the whole tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from triplane.unified_ir.convert.residency import CASTS, INTEGER
from triplane.unified_ir.engines.profile import kernel_shares
from triplane.unified_ir.ir.graph import Array
from triplane.unified_ir.quantize import Artifact

CALLS: Final = 10
"""Number of profiled calls; the median of a kernel counts."""
SHOWN: Final = 3
"""Number of float kernels that a report names."""


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of the time of a call, which add up to 1; in_float: by kernel, largest first."""

    integer: float
    conversions: float
    in_float: Mapping[str, float]

    def __str__(self) -> str:
        floats = sum(self.in_float.values())
        most = [f"{k} {100 * s:.0f} %" for k, s in list(self.in_float.items())[:SHOWN] if s > 0.01]
        named = f" ({', '.join(most)})" if most else ""
        return (
            f"{100 * self.integer:.0f} % of the time on integers, {100 * self.conversions:.0f} % "
            f"converting to and from them, {100 * floats:.0f} % in float or moving data{named}"
        )

    def record(self) -> dict[str, Any]:
        """Return the shares as JSON."""
        return {
            "integer": round(self.integer, 4),
            "conversions": round(self.conversions, 4),
            "other": {k: round(s, 4) for k, s in self.in_float.items()},
        }


def time_shares(artifact: Artifact, feeds: Mapping[str, Array]) -> Shares:
    """Measure the shares on this machine by onnxruntime's profile of a few calls."""
    shares = kernel_shares(artifact.session, feeds, CALLS)
    return Shares(
        integer=sum(s for k, s in shares.items() if k in INTEGER),
        conversions=sum(s for k, s in shares.items() if k in CASTS),
        in_float={k: s for k, s in shares.items() if k not in INTEGER | CASTS},
    )
