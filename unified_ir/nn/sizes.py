"""Checks of sizes and shapes, where the layer's own names are known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from triplane.proto.errors import InvalidInput
from triplane.unified_ir import ops
from triplane.unified_ir.files.samples import transpose_hint
from triplane.unified_ir.frontend.cell import Cell
from triplane.unified_ir.ir.types import ShapeError
from triplane.unified_ir.ops.source import user_location

Sizes = int | Sequence[int]
AXES: Final = {1: "L", 2: "H, W", 3: "D, H, W"}
"""Names of spatial axes in messages, by their number."""


def positive(layer: str, **sizes: int) -> tuple[int, ...]:
    """Return the sizes in order, each an integer of at least 1."""
    for name, size in sizes.items():
        # Not `isinstance`, which would accept True.
        if type(size) is not int or size < 1:
            raise InvalidInput(f"{layer} needs {name} to be a whole number >= 1, got {size!r}")
    return tuple(sizes.values())


def check_axis(
    layer: str, takes: str, x: ops.Tensor, axis: int, size: int, ranks: Sequence[int] = ()
) -> None:
    """Check that x has `size` elements along `axis`, and one of `ranks` if there are any.

    takes: the shape that the error states.
    """
    check_rank(layer, takes, x, *ranks)
    if not -x.rank <= axis < x.rank or x.shape[axis] != size:
        expected = [size if k == axis else None for k in range(x.rank)]
        raise shape_error(layer, takes, x, transpose_hint(x.shape, expected))


def check_rank(layer: str, takes: str, x: ops.Tensor, *ranks: int) -> None:
    """Check that x is a tensor, with one of these numbers of axes if there are any."""
    if not isinstance(x, ops.Tensor):
        raise InvalidInput(
            f"{layer} takes x: {takes}, got a {type(x).__name__}; pass an array, such as "
            "np.asarray(x, np.float32)"
        )
    if ranks and x.rank not in ranks:
        raise shape_error(layer, takes, x)


def shape_error(layer: str, takes: str, x: ops.Tensor, hint: str = "") -> ShapeError:
    """Return the error of a layer that takes another shape; hint: what may be meant."""
    where = user_location()
    place = f" (at {where})" if where else ""
    return ShapeError(f"{layer} takes x: {takes}, got {x.type}{place}{hint}")


def options_of(cell: Cell, *names: str) -> dict[str, Any]:
    """Return attributes of a cell as keyword arguments of an operator."""
    return {name: getattr(cell, name) for name in names}
