"""Forward mode, derived from the reverse rules: a row has one gradient rule, not two.

The pullback u -> J^T u is linear in u, so the pullback of the pullback at any u is v -> J v. What
it computes besides (J^T u itself) nothing needs, and cleaning a graph removes it.
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
"""Tangents of the wanted parameters -> those of the results, None where there is no dependence."""


def pushforward(
    function: Function, args: Sequence[Tensor], wanted: Sequence[int]
) -> tuple[list[Tensor], Push]:
    """Results of `function` in the graph being recorded, and the map of tangents J.

    `wanted` numbers floating-point parameters; results of other types have no tangent.
    """
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
        us: list[Tensor | None] = [None] * len(outputs)
        for i, zero in zip(floats, at_zero, strict=True):
            array = None if outer.arrays is None else outer.arrays[zero.value]
            us[i] = inner.param(f"u{i}", zero.type, array)
        pulled = pull(us)
        reached = {f"d{k}": d for k, d in enumerate(pulled) if d is not None}
    transposed = inner.finish(reached)
    numbers = [k for k, d in enumerate(pulled) if d is not None]
    _, push_back = record_vjp(transposed, [*at_zero, *inner.captured], range(len(floats)))

    def push(tangents: Sequence[Tensor]) -> list[Tensor | None]:
        pushed: list[Tensor | None] = [None] * len(outputs)
        for i, t in zip(floats, push_back([tangents[k] for k in numbers]), strict=True):
            pushed[i] = t
        return pushed

    return outputs, push
