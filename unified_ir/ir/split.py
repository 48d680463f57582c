"""Strategies of nodes: what makes one well formed, whoever wrote it.

Whether the operator can be split that way is not checked here; `ops.sharding` and the planner know.
Slices that do not divide are well formed, because a function may be used with other sizes later.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir import limits
from triplane.unified_ir.ir.graph import Split, Value
from triplane.unified_ir.ir.types import is_plain


def checked_split(split: Sequence[tuple[int, ...]], operands: Sequence[Value | None]) -> Split:
    """Return a strategy for these operands; InvalidInput: it has another form."""
    if len(split) != len(operands):
        raise InvalidInput(
            f"a strategy says for each operand into how many slices each of its axes is cut; there "
            f"are {len(operands)} operands, and the strategy is for {len(split)}: {split!r:.200}"
        )
    for k, (slices, operand) in enumerate(zip(split, operands, strict=True)):
        check_slices(slices, operand, f"operand {k}")
    return tuple(split)


def check_slices(slices: tuple[int, ...], operand: Value | None, what: str) -> None:
    """Refuse slices for another number of axes, and too many of them."""
    shape = () if operand is None or not is_plain(operand.type) else operand.type.shape
    if len(slices) != len(shape):
        shown = "absent" if operand is None else str(operand.type)
        raise InvalidInput(
            f"{what} is {shown} and has {len(shape)} axes; a strategy has a number of slices for "
            f"each of them, got {slices!r:.200}"
        )
    if not all(n >= 1 for n in slices) or math.prod(slices) > limits.MAX_SLICES:
        raise InvalidInput(
            f"{what} is cut into 1 slice or more along each axis, and into at most "
            f"{limits.MAX_SLICES} in all, got {slices!r:.200}"
        )


def check_divides(slices: tuple[int, ...], operand: Value, what: str) -> None:
    """Refuse slices that would not be equal, as far as sizes are numbers."""
    shape = operand.type.shape
    for axis, (n, size) in enumerate(zip(slices, shape, strict=True)):
        if isinstance(size, int) and size % n:
            raise InvalidInput(
                f"{what} has {size} elements along axis {axis}, which {n} slices do not divide; "
                f"slices are equal, so cut it into a divisor of {size}"
            )
