"""Regions with a gradient of their own, and regions that run again in the backward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from triplane.unified_ir.ir.graph import Function
from triplane.unified_ir.ops.build import Build, region
from triplane.unified_ir.ops.inline import inline
from triplane.unified_ir.ops.recorder import recorder
from triplane.unified_ir.ops.row import DOMAIN, Op, OpCall, OpKind
from triplane.unified_ir.ops.rows.control import control
from triplane.unified_ir.ops.rows.control.conditional import cond_row
from triplane.unified_ir.ops.rows.control.control import Pullback, Types, VjpOf
from triplane.unified_ir.ops.rows.movement.structure import zeros
from triplane.unified_ir.ops.tensor import Tensor, as_tensor, emit
from triplane.unified_ir.ops.trees import leaves, rebuild


def _custom_types(call: OpCall) -> Types:
    control.check_regions(call, 2)
    outputs = control.region_types(call, 0, control.all_types(call))
    control.check_bprop(call, outputs)
    return outputs


def _custom_vjp_with_residuals(
    inputs: Sequence[Tensor], attrs: Mapping[str, Any], regions: Sequence[Function],
    outputs: int, vjp_of: VjpOf,
) -> tuple[Sequence[Tensor], Pullback]:  # fmt: skip
    # The forward nodes are inlined: only the pullback differs from what the rules of these nodes
    # give.
    ys = inline(regions[0], list(inputs))
    return ys, lambda gs: control.pulled_by(regions[1], inputs, ys, gs)


custom_row = Op(
    name="CustomGradient",
    computes=(
        "region 0 of the operands, with the gradient that region 1 computes from operands, "
        "results and cotangents"
    ),
    kind=OpKind.CONTROL,
    domain=DOMAIN,
    operands=("*",),
    infer=_custom_types,
    reference=lambda *operands, regions: tuple(regions[0](*operands)),
    vjp_with_residuals=_custom_vjp_with_residuals,
    # all operands get the new axis, so that each slice has a cotangent of its own
    batch=lambda call: control.with_regions(call, call.all(), lambda _: True),
    inline_region=True,
)


def custom_gradient(f: Any, bprop: Any, *operands: Any) -> Any:
    """Return `f(*operands)`, differentiated by `bprop(*operands, y, g)` instead of by the rules.

    y: the result (a tree), g: cotangents of its floating-point leaves in order (one tensor if
    there is one); `bprop` returns one cotangent per floating-point operand.
    """
    flat = [as_tensor(x) for x in leaves(operands)]
    n = len(flat)
    forward, tree = region("forward", [x.type for x in flat], lambda xs: f(*rebuild(operands, xs)))
    results = control.inside(forward, leaves(tree))
    floats = [r.type for r in results if r.dtype.is_float]

    def back(xs: list[Tensor]) -> Any:
        y = rebuild(tree, xs[n : n + len(results)])
        gs = xs[n + len(results) :]
        return bprop(*rebuild(operands, xs[:n]), y, gs[0] if len(gs) == 1 else tuple(gs))

    types = [*(x.type for x in flat), *(r.type for r in results), *floats]
    backward, cotangents = region("bprop", types, back)
    what = "a function with its own bprop"
    regions = (
        control.closed(forward, results, what),
        control.closed(backward, leaves(cotangents), what),
    )
    outputs = recorder().apply(custom_row, flat, {}, regions=regions, outputs=len(results))
    return rebuild(tree, outputs)


def _checkpoint_types(call: OpCall) -> Types:
    control.check_regions(call, 1)
    return control.region_types(call, 0, control.all_types(call))


def _checkpoint_vjp_with_residuals(
    inputs: Sequence[Tensor], attrs: Mapping[str, Any], regions: Sequence[Function],
    outputs: int, vjp_of: VjpOf,
) -> tuple[Sequence[Tensor], Pullback]:  # fmt: skip
    ys = recorder().apply(checkpoint_row, inputs, attrs, regions=tuple(regions), outputs=outputs)
    wanted = control.float_positions(inputs)

    def pullback(gs: Sequence[Tensor | None]) -> list[Tensor | None]:
        present = control.given_positions(gs)
        back = vjp_of(regions[0], wanted, present)
        operands = [*inputs, *(gs[i] for i in present)]
        # The backward region is a branch of an If that is always taken. Outside a branch, a runtime
        # would merge its forward nodes with those of the forward pass and keep their values in
        # memory.
        cotangents = recorder().apply(
            cond_row,
            (_always(operands[len(inputs)], _varying(inputs)), *operands),
            {},
            regions=(back, _zeros_like(back)),
            outputs=len(wanted),
        )
        return control.by_operand(inputs, cotangents)

    return ys, pullback


def _always(g: Tensor | None, operand: Tensor | None) -> Tensor:
    """Return true in a form that no optimizer can simplify and that depends on the cotangent.

    Otherwise a runtime would find that the forward pass has computed the same values, and keep
    those. The cotangent may be a constant, as that of a sum is, so the value reads an operand too.
    """
    assert g is not None
    first = _first_element(g)
    if operand is not None:
        first = first + _first_element(operand).cast(g.dtype)
    return emit("Or", first > 0.0, emit("Not", first > 0.0))


def _first_element(x: Tensor) -> Tensor:
    """Return a scalar; 0 if there are no elements."""
    return x.reshape(-1)[:1].sum()


def _varying(operands: Sequence[Tensor]) -> Tensor | None:
    """Return the first operand of floats that is not a constant of the graph."""
    floats = (x for x in operands if x.dtype.is_float and x.build.known(x) is None)
    return next(floats, None)


def _zeros_like(function: Function) -> Function:
    """Return a function of the same operands that returns zeros of the same types."""
    build = Build(recorder().table, f"{function.name}.never")
    with build:
        for p in function.params:
            build.param(p.name, p.type)
        results = [zeros(r.type.shape, r.type.dtype) for r in function.results]
    return build.finish(control.numbered(results))


checkpoint_row = Op(
    name="Checkpoint",
    computes=(
        "its region of the operands; a backward pass keeps only the operands and computes "
        "the rest again"
    ),
    kind=OpKind.CONTROL,
    domain=DOMAIN,
    operands=("*",),
    infer=_checkpoint_types,
    reference=lambda *operands, regions: tuple(regions[0](*operands)),
    vjp_with_residuals=_checkpoint_vjp_with_residuals,
    batch=lambda call: control.with_regions(call, call.inputs, lambda i: call.batched[i]),
    inline_region=True,
)


def checkpointed(function: Function, operands: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the results of `function`, computed again where their gradient needs more."""
    return recorder().apply(
        checkpoint_row, operands, {}, regions=(function,), outputs=len(function.results)
    )
