"""An exponential moving average of parameters."""

from __future__ import annotations

from collections.abc import Mapping

from triplane.unified_ir import ops
from triplane.unified_ir.ops.tensor import Tensor


def moving_average(
    means: Mapping[str, Tensor], params: Mapping[str, Tensor], step: Tensor, decay: float
) -> dict[str, Tensor]:
    """a <- decay a + (1 - decay) p by name; after the first update, where `step` is 0, a = p."""
    share = ops.where(step > 0, 1.0 - decay, 1.0)
    return {k: a + (params[k] - a) * share for k, a in means.items()}
