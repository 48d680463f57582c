"""A value that is not to be used before another exists.

A runtime orders nodes as it likes and joins equal ones. What is computed a second time to save
memory would so be computed early, once, and kept; behind a barrier it can only come late.
"""

from __future__ import annotations

from typing import Any

from triplane.unified_ir.ir.types import TensorType
from triplane.unified_ir.ops.row import DOMAIN, Call, Kind, Op
from triplane.unified_ir.ops.samples import normal, sample


def _like_first(call: Call) -> tuple[TensorType, ...]:
    return (call.type(0),)


def _first(x: Any, _: Any, **__: Any) -> Any:
    return x


barrier = Op(
    name="Barrier",
    kind=Kind.MOVEMENT,
    domain=DOMAIN,
    operands=("T", "U"),
    infer=_like_first,
    reference=_first,
    vjp=lambda g, y, x, after: (g, None),
    samples=(
        sample(normal(2, 3), normal(4)),
        sample(normal(), normal(2, 2)),
        sample(normal(0, 3), normal(0)),
    ),
)
"""y = x, once `after` is known; `after` is a float tensor, whose values do not matter."""
