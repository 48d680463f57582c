"""Operands that configure an operator, such as axes or sizes, and may be computed in a run.

Their contents decide the output's shape. If they are known when a graph is built, the row's rule
infers the shape. If not, the sizes they decide are open: each is a symbol of the node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from triplane.unified_ir.ir.dims import Dim
from triplane.unified_ir.ir.types import ShapeError, TensorType
from triplane.unified_ir.ops.row import Infer, OpCall

OpenShape = Callable[[OpCall], Sequence[Dim | None]]


def settled(rule: Infer, shape: OpenShape, *operands: int) -> dict[str, Any]:
    """Return `infer` and `data_dependent_dims` of a row that uses `rule` if the operands are known.

    shape: the shape of every output otherwise, None for each size that the contents decide.
    """

    def data_dependent_dims(call: OpCall) -> int:
        return 0 if _known(call, operands) else list(shape(call)).count(None)

    def infer(call: OpCall) -> tuple[TensorType, ...]:
        if _known(call, operands):
            return rule(call)
        numbers = count()
        dims = [call.opened(next(numbers)) if d is None else d for d in shape(call)]
        return (call.type(0).with_shape(dims),) * call.outputs

    return {"infer": infer, "data_dependent_dims": data_dependent_dims}


def _known(call: OpCall, operands: Sequence[int]) -> bool:
    # An empty vector has known contents.
    return all(
        not call.has(i) or call.known[i] is not None or call.type(i).shape == (0,) for i in operands
    )


def length(call: OpCall, i: int) -> int:
    """Return the length of the vector in operand `i`."""
    t = call.type(i)
    if t.rank != 1 or not isinstance(t.shape[0], int):
        raise ShapeError(f"{call.row} takes a vector of a fixed length as operand {i}, got {t}")
    return t.shape[0]


def all_open(rank: Callable[[OpCall], int]) -> OpenShape:
    """Return a shape in which all of `rank(call)` sizes are open."""
    return lambda call: (None,) * rank(call)
