"""The error of a loss that is not finite; `engines/finite.py` finds where that comes from."""

from __future__ import annotations

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.engines.finite import finite, first_nonfinite

__all__ = ["NonFinite", "finite", "first_nonfinite"]


class NonFinite(InvalidInput):
    """The loss became NaN or infinite. step: from 1. cause: the first thing that is not finite."""

    def __init__(self, message: str, *, step: int, cause: str) -> None:
        super().__init__(message)
        self.step = step
        self.cause = cause
