"""Checks of sizes and shapes, where the layer's own names are known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import ops
from triplane.unified_ir.ir.types import ShapeError
from triplane.unified_ir.ops.source import user_location

Sizes = int | Sequence[int]
AXES: Final = {1: "L", 2: "H, W", 3: "D, H, W"}
"""Names of spatial axes in messages, by their number."""


def positive(layer: str, **sizes: int) -> tuple[int, ...]:
    """Return the sizes in order, each an integer of at least 1."""
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise InvalidInput(f"{layer} needs {name} to be a whole number >= 1, got {size!r}")
    return tuple(sizes.values())


def check_axis(layer: str, takes: str, x: ops.Tensor, axis: int, size: int) -> None:
    """Check that x has `size` elements along `axis`; `takes` is the shape named in the error."""
    if not -x.rank <= axis < x.rank or x.shape[axis] != size:
        raise ShapeError(f"{layer} takes x: {takes}, got {x.type}{_here()}")


def check_rank(layer: str, takes: str, x: ops.Tensor, *ranks: int) -> None:
    """Check that x has one of these numbers of axes."""
    if x.rank not in ranks:
        raise ShapeError(f"{layer} takes x: {takes}, got {x.type}{_here()}")


def _here() -> str:
    where = user_location()
    return f" (at {where})" if where else ""
