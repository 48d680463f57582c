"""A value that is not to be used before another exists.

A runtime orders nodes as it likes and joins equal ones. What is computed a second time to save
memory would so be computed early, once, and kept; behind a barrier it can only come late.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from triplane.unified_ir.ir.graph import Node
from triplane.unified_ir.ir.types import TensorType, int64
from triplane.unified_ir.ops.emission import EmissionContext, first_number
from triplane.unified_ir.ops.row import DOMAIN, Op, OpCall, OpKind
from triplane.unified_ir.ops.samples import normal, sample


def _like_first(call: OpCall) -> tuple[TensorType, ...]:
    return (call.type(0),)


def _first(x: Any, _: Any, **__: Any) -> Any:
    return x


def _emit_barrier(context: EmissionContext, node: Node) -> None:
    """Reshape to the shape it has, plus nothing, said by a number that needs `after`.

    The memory stays where it is. No rewrite of a runtime sees through: that 0 times any number is
    nothing does not hold for NaN, which a cast to an integer ends.
    """
    x, after = context.inputs(node)
    number = first_number(context, after)
    nothing = context.emit(
        "Mul", context.emit("Cast", number, to=int64.onnx), context.constant(np.array(0))
    )
    shape = context.emit("Add", context.emit("Shape", x), nothing)
    context.add("Reshape", [x, shape], context.output_names(node))


barrier = Op(
    name="Barrier",
    kind=OpKind.MOVEMENT,
    preserves_elements=True,
    emit=_emit_barrier,
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
