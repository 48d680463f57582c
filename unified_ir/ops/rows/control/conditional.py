"""Branches: a predicate decides which of two regions runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.dims import Dim, symbols
from triplane.unified_ir.ir.graph import Function, Node
from triplane.unified_ir.ir.types import TensorType, TypeMismatch, bool_, is_plain, joined
from triplane.unified_ir.ops.batching import BatchedCall, NeedsScan
from triplane.unified_ir.ops.build import Build, region
from triplane.unified_ir.ops.emission import EmissionContext, first_number
from triplane.unified_ir.ops.lowering import XlaContext
from triplane.unified_ir.ops.recorder import recorder
from triplane.unified_ir.ops.row import DOMAIN, Op, OpCall, OpKind
from triplane.unified_ir.ops.rows.control import control
from triplane.unified_ir.ops.rows.control.control import Pullback, Types, VjpOf
from triplane.unified_ir.ops.tensor import Tensor, TensorLike, as_tensor
from triplane.unified_ir.ops.trees import leaves, rebuild, structure


def _cond_types(call: OpCall) -> Types:
    control.check_regions(call, 2)
    if call.type(0) != TensorType(bool_, ()):
        raise TypeMismatch(f"a condition is a bool scalar, got {call.type(0)}; reduce it with all?")
    numbers = count()
    return tuple(_either(call, pair, numbers) for pair in _branch_types(call))


def _branch_types(call: OpCall) -> list[tuple[TensorType, TensorType]]:
    """Return, for each result, its types in both branches."""
    yes, no = (control.region_results(call, i, control.all_types(call)[1:]) for i in range(2))
    if len(yes) != len(no):
        raise TypeMismatch(f"both branches of a condition return one type, got {yes} and {no}")
    return list(zip(yes, no, strict=True))


def _either(
    call: OpCall, pair: tuple[TensorType, TensorType], numbers: Iterator[int]
) -> TensorType:
    """Return a result's type; each size in which the branches differ is a symbol of the node."""
    inner = [control.inner_sizes(region) for region in call.regions]
    if not all(map(is_plain, pair)):
        seen = [control.seen_outside(t, names) for t, names in zip(pair, inner, strict=True)]
        common = joined(*seen)
        if common is None:
            raise TypeMismatch(f"both branches of a condition return one type, got {pair}")
        return common
    yes, no = pair
    if yes.dtype != no.dtype or yes.rank != no.rank:
        raise TypeMismatch(
            f"both branches of a condition return one type, got {yes} and {no}; sizes may differ, "
            "element types and the number of axes may not"
        )
    return yes.with_shape(
        call.opened(next(numbers)) if _differs(a, b, inner) else a
        for a, b in zip(yes.shape, no.shape, strict=True)
    )


def _differs(yes: Dim, no: Dim, inner: Sequence[set[str]]) -> bool:
    # Equal names are not equal sizes if a branch introduced them: the two branches use one
    # namespace each.
    return yes != no or bool(symbols(yes) & inner[0] or symbols(no) & inner[1])


def _cond_opens(call: OpCall) -> int:
    control.check_regions(call, 2)
    inner = [control.inner_sizes(region) for region in call.regions]
    pairs = [p for p in _branch_types(call) if all(map(is_plain, p)) and p[0].rank == p[1].rank]
    return sum(
        _differs(a, b, inner) for yes, no in pairs for a, b in zip(yes.shape, no.shape, strict=True)
    )


def _cond_vjp_with_residuals(
    inputs: Sequence[Tensor], attrs: Mapping[str, Any], regions: Sequence[Function],
    outputs: int, vjp_of: VjpOf,
) -> tuple[tuple[Tensor, ...], Pullback]:  # fmt: skip
    ys = recorder().apply(cond_row, inputs, attrs, regions=tuple(regions), outputs=outputs)
    wanted = control.float_positions(inputs[1:])

    def pullback(gs: Sequence[Tensor | None]) -> list[Tensor | None]:
        present = control.given_positions(gs)
        # A cotangent has the size of its result, so the regions of the backward node would need
        # different operands.
        if any(regions[0].results[i].type != regions[1].results[i].type for i in present):
            raise InvalidInput(
                "a gradient needs both branches of a condition to give tensors of one size, got "
                f"{[[r.results[i].type for i in present] for r in regions]}"
            )
        back = tuple(vjp_of(r, wanted, present) for r in regions)
        operands = (*inputs, *(gs[i] for i in present))
        cotangents = recorder().apply(cond_row, operands, {}, regions=back, outputs=len(wanted))
        return control.by_operand(inputs, cotangents)  # the predicate is no float

    return ys, pullback


def _cond_batch(call: BatchedCall) -> Sequence[Tensor]:
    """Batch both branches if all slices share one condition; otherwise request a scan."""
    if call.batched[0]:
        raise NeedsScan
    # First find which results either branch batches, then record both so that they agree on them.
    flags, wanted = call.batched[1:], [False] * len(call.types)
    for r in call.regions:
        flags_of_results = call.vectorized(r, flags, call.size, wanted)[2]
        wanted = [a or b for a, b in zip(wanted, flags_of_results, strict=True)]
    sides = [call.vectorized(r, flags, call.size, wanted) for r in call.regions]
    predicate, *operands = call.inputs
    outputs = cond_node(predicate, operands, [b for b, *_ in sides], [r for _, r, _ in sides])  # type: ignore[arg-type]
    return control.all_batched(outputs, wanted, call.size)


def _emit_cond(context: EmissionContext, node: Node) -> None:
    """Emit an If, whose predicate is kept from being folded if it contains another If."""
    predicate, *operands = context.inputs(node)
    if any(n.op == node.op for region in node.regions for n in region.walk()):
        predicate = _never_folded(context, node, predicate)
    context.add(
        "If",
        [predicate],
        context.output_names(node),
        then_branch=context.region(node.regions[0], operands, "then"),
        else_branch=context.region(node.regions[1], operands, "else"),
    )


def _never_folded(context: EmissionContext, node: Node, predicate: str) -> str:
    """Return the predicate, joined with an operand in a way that does not change its value.

    If onnxruntime 1.31 finds the predicates of two nested Ifs constant, it inlines the inner branch
    first and then fails on the outer one: Graph::InlineIfSubgraph takes the nodes in the order in
    which they were created. A predicate that depends on an operand is not constant.
    """
    for value, name in zip(node.inputs, context.inputs(node), strict=True):
        if value is not None and value.type.dtype.is_float and context.held(name) is None:
            number = first_number(context, name)
            zero = context.constant(np.zeros((), value.type.dtype.numpy))
            positive = context.emit("Greater", number, zero)
            # positive and not positive is always false, also for NaN, which no optimizer of
            # onnxruntime finds.
            never = context.emit("And", positive, context.emit("Not", positive))
            return context.emit("Or", predicate, never)
    return predicate


def _cond_xla(k: XlaContext, p: Any, *operands: Any) -> list[Any]:
    yes, no = (control.XlaRegion(k, i) for i in range(2))
    if isinstance(p, np.ndarray):
        taken = yes if p else no
        results, failed = taken(*operands)
        taken.hand_out(failed)
        return results
    # The branches capture their operands, so that sizes among them stay numbers.
    results, failed = k.lax.cond(p, lambda: yes(*operands), lambda: no(*operands))
    yes.hand_out(failed)
    no.hand_out(failed)
    return list(results)


cond_row = Op(
    name="Cond",
    computes=(
        "region 0 of the other operands where the predicate, operand 0, is true, else region "
        "1 of them"
    ),
    kind=OpKind.CONTROL,
    emit=_emit_cond,
    domain=DOMAIN,
    operands=("P", "*"),
    data_dependent_dims=_cond_opens,
    infer=_cond_types,
    reference=lambda p, *operands, regions: tuple(regions[0 if p else 1](*operands)),
    vjp_with_residuals=_cond_vjp_with_residuals,
    batch=_cond_batch,
    xla=_cond_xla,
)


def cond(predicate: TensorLike, then: Any, otherwise: Any, *operands: Any) -> Any:
    """Return `then(*operands)` or `otherwise(*operands)`; both return trees of the same types."""
    flat = [as_tensor(x) for x in leaves(operands)]
    types = [x.type for x in flat]
    predicate = as_tensor(predicate).reshape(())
    yes, tree = region("then", types, lambda xs: then(*rebuild(operands, xs)))
    no, other = region("else", types, lambda xs: otherwise(*rebuild(operands, xs)))
    if structure(tree) != structure(other):
        raise InvalidInput(
            f"both branches of a condition must return one structure, got {structure(tree)} "
            f"and {structure(other)}"
        )
    results = [control.inside(yes, leaves(tree)), control.inside(no, leaves(other))]
    return rebuild(tree, cond_node(predicate, flat, [yes, no], results))


def cond_node(
    predicate: Tensor,
    operands: Sequence[Tensor],
    builds: Sequence[Build],
    results: Sequence[Sequence[Tensor]],
) -> tuple[Tensor, ...]:
    """Add the Cond of two recorded branches, whose first parameters are `operands`."""
    captured = control.share_captures(builds)
    regions = tuple(b.finish(control.numbered(r)) for b, r in zip(builds, results, strict=True))
    return recorder().apply(
        cond_row, (predicate, *operands, *captured), {}, regions=regions, outputs=len(results[0])
    )
