"""Forward mode, derived from the reverse rules: a row has one gradient rule, not two.

The pullback u -> J^T u is linear in u, so the pullback of the pullback at any u is v -> J v. The
graph also holds J^T u itself, which nothing reads, so cleaning the graph removes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from triplane.unified_ir.autodiff.reverse import record_vjp
from triplane.unified_ir.ir.graph import Function
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.recorder import recorder
from triplane.unified_ir.ops.rows.movement.structure import zeros
from triplane.unified_ir.ops.tensor import Tensor

Push = Callable[[Sequence[Tensor]], list[Tensor | None]]
"""Tangents of the wanted parameters -> tangents of the results; None for an independent result."""


def pushforward(
    function: Function, args: Sequence[Tensor], wanted: Sequence[int]
) -> tuple[list[Tensor], Push]:
    """Record `function`; return its results and the map J of tangents.

    `wanted`: indices of floating-point parameters; results of other types have no tangent.
    """
    # The pullback is recorded into a function of its own, at u = 0. It is linear in u, so the point
    # does not matter, and zeros are cheapest.
    outer = recorder()
    outputs, pull = record_vjp(function, args, wanted)
    floats = [i for i, y in enumerate(outputs) if y.dtype.is_float]
    at_zero = [zeros(outputs[i].shape, outputs[i].dtype) for i in floats]
    inner = Build(
        outer.table,
        f"{function.name}.push",
        run=getattr(outer, "run", None),
        sizes=getattr(outer, "sizes", None),
    )
    with inner:
        us = {}
        for i, zero in zip(floats, at_zero, strict=True):
            # A build that computes as it records (eager mode) needs the values of parameters as
            # well.
            array = None if outer.arrays is None else outer.arrays[zero.value]
            us[i] = inner.param(f"u{i}", zero.type, array)
        pulled = pull([us.get(i) for i in range(len(outputs))])
        reached = {f"d{k}": d for k, d in enumerate(pulled) if d is not None}
    transposed = inner.finish(reached)
    numbers = [k for k, d in enumerate(pulled) if d is not None]
    # Values of the primal computation that the pullback reads are captured as further parameters;
    # only the first ones, u, are differentiated.
    _, push_back = record_vjp(transposed, [*at_zero, *inner.captured], range(len(floats)))

    def push(tangents: Sequence[Tensor]) -> list[Tensor | None]:
        pushed = dict(zip(floats, push_back([tangents[k] for k in numbers]), strict=True))
        return [pushed.get(i) for i in range(len(outputs))]

    return outputs, push
