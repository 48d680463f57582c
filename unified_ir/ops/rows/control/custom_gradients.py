"""Regions with a gradient of their own, and regions that run again in the backward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.graph import Function
from triplane.unified_ir.ir.types import (
    TypeMismatch,
)
from triplane.unified_ir.ops.batching import BatchedCall
from triplane.unified_ir.ops.build import Build, region
from triplane.unified_ir.ops.inline import inline
from triplane.unified_ir.ops.recorder import recorder
from triplane.unified_ir.ops.row import DOMAIN, Op, OpCall, OpKind
from triplane.unified_ir.ops.rows.control.conditional import cond_row
from triplane.unified_ir.ops.rows.control.control import (
    Pullback,
    Types,
    VjpOf,
    all_types,
    check_regions,
    inside,
    numbered,
    region_types,
    scattered,
    with_regions,
)
from triplane.unified_ir.ops.rows.movement.structure import zeros
from triplane.unified_ir.ops.tensor import Tensor, as_tensor, emit
from triplane.unified_ir.ops.trees import leaves, rebuild


def _custom_types(call: OpCall) -> Types:
    check_regions(call, 2)
    operands = all_types(call)
    outputs = region_types(call, 0, operands)
    floats = [t for t in outputs if t.dtype.is_float]
    back = region_types(call, 1, [*operands, *outputs, *floats])
    wanted = [t for t in operands if t.dtype.is_float]
    if list(back) != wanted:
        raise TypeMismatch(
            f"bprop gives one cotangent per floating-point operand {wanted}, got {list(back)}"
        )
    return outputs


def _custom_vjp_with_residuals(
    inputs: Sequence[Tensor], attrs: Mapping[str, Any], regions: Sequence[Function],
    outputs: int, vjp_of: VjpOf,
) -> tuple[Sequence[Tensor], Pullback]:  # fmt: skip
    ys = inline(regions[0], list(inputs))
    wanted = [i for i, x in enumerate(inputs) if x.dtype.is_float]

    def pullback(gs: Sequence[Tensor | None]) -> list[Tensor | None]:
        filled = [
            zeros(y.shape, y.dtype) if g is None else g
            for y, g in zip(ys, gs, strict=True)
            if y.dtype.is_float
        ]
        cotangents = inline(regions[1], [*inputs, *ys, *filled])
        return scattered(len(inputs), dict(zip(wanted, cotangents, strict=True)))

    return ys, pullback


def _custom_batch(call: BatchedCall) -> Sequence[Tensor]:
    """All operands get the axis, so that each slice has a cotangent of its own."""
    return with_regions(call, call.all(), lambda _: True)


custom_row = Op(
    name="CustomGradient",
    kind=OpKind.CONTROL,
    domain=DOMAIN,
    operands=("*",),
    infer=_custom_types,
    reference=lambda *operands, regions: tuple(regions[0](*operands)),
    vjp_with_residuals=_custom_vjp_with_residuals,
    batch=_custom_batch,
    inline_region=True,
)


def custom_gradient(f: Any, bprop: Any, *operands: Any) -> Any:
    """`f(*operands)`, differentiated by `bprop(*operands, y, g)` instead of by the rules.

    y: the result (a tree), g: cotangents of its floating-point leaves in order (one tensor if
    there is one); `bprop` gives one cotangent per floating-point operand.
    """
    flat = [as_tensor(x) for x in leaves(operands)]
    n = len(flat)
    forward, tree = region("forward", [x.type for x in flat], lambda xs: f(*rebuild(operands, xs)))
    results = inside(forward, leaves(tree))
    floats = [r.type for r in results if r.dtype.is_float]

    def back(xs: list[Tensor]) -> Any:
        y = rebuild(tree, xs[n : n + len(results)])
        gs = xs[n + len(results) :]
        return bprop(*rebuild(operands, xs[:n]), y, gs[0] if len(gs) == 1 else tuple(gs))

    types = [*(x.type for x in flat), *(r.type for r in results), *floats]
    backward, cotangents = region("bprop", types, back)
    if forward.captured or backward.captured:
        raise InvalidInput(
            "a function with its own bprop takes everything it uses as an argument; "
            f"it captures {[*forward.captured, *backward.captured]}"
        )
    regions = (
        forward.finish(numbered(results)),
        backward.finish(numbered(inside(backward, leaves(cotangents)))),
    )
    outputs = recorder().apply(custom_row, flat, {}, regions=regions, outputs=len(results))
    return rebuild(tree, outputs)


def _checkpoint_types(call: OpCall) -> Types:
    check_regions(call, 1)
    return region_types(call, 0, all_types(call))


def _checkpoint_vjp_with_residuals(
    inputs: Sequence[Tensor], attrs: Mapping[str, Any], regions: Sequence[Function],
    outputs: int, vjp_of: VjpOf,
) -> tuple[Sequence[Tensor], Pullback]:  # fmt: skip
    ys = recorder().apply(checkpoint_row, inputs, attrs, regions=tuple(regions), outputs=outputs)
    wanted = [i for i, x in enumerate(inputs) if x.dtype.is_float]

    def pullback(gs: Sequence[Tensor | None]) -> list[Tensor | None]:
        present = [i for i, g in enumerate(gs) if g is not None]
        back = vjp_of(regions[0], wanted, present)
        operands = [*inputs, *(gs[i] for i in present)]
        cotangents = recorder().apply(
            cond_row,
            (_always(operands[len(inputs)], _varying(inputs)), *operands),
            {},
            regions=(back, _zeros_like(back)),
            outputs=len(wanted),
        )
        return scattered(len(inputs), dict(zip(wanted, cotangents, strict=True)))

    return ys, pullback


def _always(g: Tensor | None, operand: Tensor | None) -> Tensor:
    """True, in a way that no optimizer sees through, and known only when the cotangent is.

    Else a runtime would find that the forward pass has computed it all, and keep that. The
    cotangent may be a constant, as that of a sum is; so the number comes from the operand too.
    """
    assert g is not None
    first = _first_element(g)
    if operand is not None:
        first = first + _first_element(operand).cast(g.dtype)
    return emit("Or", first > 0.0, emit("Not", first > 0.0))


def _first_element(x: Tensor) -> Tensor:
    """A scalar; 0 where there are no elements."""
    return x.reshape(-1)[:1].sum()


def _varying(operands: Sequence[Tensor]) -> Tensor | None:
    """The first operand of floats that is not a constant of the graph."""
    floats = (x for x in operands if x.dtype.is_float and x.build.known(x) is None)
    return next(floats, None)


def _zeros_like(function: Function) -> Function:
    """A function of the same operands that gives zeros of the same types."""
    build = Build(recorder().table, f"{function.name}.never")
    with build:
        for p in function.params:
            build.param(p.name, p.type)
        results = [zeros(r.type.shape, r.type.dtype) for r in function.results]
    return build.finish(numbered(results))


checkpoint_row = Op(
    name="Checkpoint",
    kind=OpKind.CONTROL,
    domain=DOMAIN,
    operands=("*",),
    infer=_checkpoint_types,
    reference=lambda *operands, regions: tuple(regions[0](*operands)),
    vjp_with_residuals=_checkpoint_vjp_with_residuals,
    batch=lambda call: with_regions(call, call.inputs, lambda i: call.batched[i]),
    inline_region=True,
)
"""Its region, of which a backward pass keeps the operands alone and computes the rest again."""


def checkpointed(function: Function, operands: Sequence[Tensor]) -> Sequence[Tensor]:
    """The results of `function` on `operands`, computed again where their gradient needs more."""
    return recorder().apply(
        checkpoint_row, operands, {}, regions=(function,), outputs=len(function.results)
    )
