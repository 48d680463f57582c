"""The error raised for a non-finite loss; `engines/finite.py` finds its cause."""

from __future__ import annotations

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.engines.finite import finite, first_nonfinite

__all__ = ["NonFinite", "finite", "first_nonfinite"]


class NonFinite(InvalidInput):
    """The loss became NaN or infinite.

    step: from 1. cause: the first value that is not finite.
    """

    def __init__(self, message: str, *, step: int, cause: str) -> None:
        super().__init__(message)
        self.step = step
        self.cause = cause
