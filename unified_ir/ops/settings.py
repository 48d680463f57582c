"""Operands that set an operator, such as axes or sizes, where they are computed while it runs.

Their contents decide the output's shape. Where they are known when a graph is built, the row's rule
gives it; where they are not, the sizes they decide are open: each is a symbol of the node's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from triplane.unified_ir.ir.dims import Dim
from triplane.unified_ir.ir.types import ShapeError, TensorType
from triplane.unified_ir.ops.row import Infer, OpCall

OpenShape = Callable[[OpCall], Sequence[Dim | None]]


def settled(rule: Infer, shape: OpenShape, *operands: int) -> dict[str, Any]:
    """`infer` and `data_dependent_dims` of a row: `rule` where the operands' contents are known.

    shape: otherwise the shape of every output, None for each size that the contents decide.
    """

    def data_dependent_dims(call: OpCall) -> int:
        return 0 if _known(call, operands) else list(shape(call)).count(None)

    def infer(call: OpCall) -> tuple[TensorType, ...]:
        if _known(call, operands):
            return rule(call)
        number = 0
        dims: list[Dim] = []
        for d in shape(call):
            dims.append(call.opened(number) if d is None else d)
            number += d is None
        return (call.type(0).with_shape(dims),) * call.outputs

    return {"infer": infer, "data_dependent_dims": data_dependent_dims}


def _known(call: OpCall, operands: Sequence[int]) -> bool:
    return all(
        not call.has(i) or call.known[i] is not None or call.type(i).shape == (0,) for i in operands
    )


def length(call: OpCall, i: int) -> int:
    """How many numbers the vector in operand `i` has."""
    t = call.type(i)
    if t.rank != 1 or not isinstance(t.shape[0], int):
        raise ShapeError(f"{call.row} takes a vector of a fixed length as operand {i}, got {t}")
    return t.shape[0]


def all_open(rank: Callable[[OpCall], int]) -> OpenShape:
    """As many open sizes as `rank` says."""
    return lambda call: (None,) * rank(call)
