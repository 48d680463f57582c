"""The truth of a condition: a Python value has one now, a tensor when the graph runs."""

from __future__ import annotations

from typing import Any

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.types import bool_
from triplane.unified_ir.ops.rows.arithmetic.elementwise import logical_not
from triplane.unified_ir.ops.tensor import Tensor


def is_symbolic(x: Any) -> bool:
    """Return whether `x` is a tensor without a value: one of a graph that is being recorded."""
    return isinstance(x, Tensor) and x.build.arrays is None


def truth(x: Any) -> bool:
    """Return the truth of anything that has a value now."""
    if isinstance(x, Tensor):
        _one_value(x)
    return bool(x)


def as_condition(x: Tensor) -> Tensor:
    """Return a bool scalar: whether the one element of `x` is not zero."""
    _one_value(x)
    flag = x if x.dtype == bool_ else logical_not(x == 0)
    return flag.reshape(()) if flag.rank else flag


def _one_value(x: Tensor) -> None:
    if x.type.size != 1:
        raise InvalidInput(
            f"a condition is one truth value, got {x.type}; reduce it, e.g. with "
            'ops.where, or `mask.cast("int64").sum() > 0` for "any"'
        )
