"""Branches: one of two regions runs, by a predicate of the data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.dims import Dim, symbols
from triplane.unified_ir.ir.graph import Function
from triplane.unified_ir.ir.types import (
    TensorType,
    TypeMismatch,
    bool_,
    is_plain,
    joined,
)
from triplane.unified_ir.ops.batching import BatchedCall, NeedsScan
from triplane.unified_ir.ops.build import Build, region
from triplane.unified_ir.ops.recorder import recorder
from triplane.unified_ir.ops.row import DOMAIN, Op, OpCall, OpKind
from triplane.unified_ir.ops.rows.control.control import (
    Pullback,
    Types,
    VjpOf,
    all_batched,
    all_types,
    applied,
    check_regions,
    inner_sizes,
    inside,
    numbered,
    scattered,
    seen_outside,
    share_captures,
)
from triplane.unified_ir.ops.rows.control.emit_control import emit_cond
from triplane.unified_ir.ops.tensor import Tensor, TensorLike, as_tensor
from triplane.unified_ir.ops.trees import leaves, rebuild, structure


def _cond_types(call: OpCall) -> Types:
    check_regions(call, 2)
    if call.type(0) != TensorType(bool_, ()):
        raise TypeMismatch(f"a condition is a bool scalar, got {call.type(0)}; reduce it with all?")
    operands = all_types(call)[1:]
    for r in call.regions:
        if [p.type for p in r.params] != operands:
            raise TypeMismatch(f"{call.row} passes {operands} to a region {r.params}")
    numbers = count()
    return tuple(_either(call, pair, numbers) for pair in _branch_types(call))


def _branch_types(call: OpCall) -> list[tuple[TensorType, TensorType]]:
    """What both branches give, by result."""
    yes, no = (tuple(r.type for r in region.results) for region in call.regions)
    if len(yes) != len(no):
        raise TypeMismatch(f"both branches of a condition give one type, got {yes} and {no}")
    return list(zip(yes, no, strict=True))


def _either(
    call: OpCall, pair: tuple[TensorType, TensorType], numbers: Iterator[int]
) -> TensorType:
    """The type of a result; a size in which the branches differ is one of its own."""
    inner = [inner_sizes(region) for region in call.regions]
    if not all(map(is_plain, pair)):
        seen = [seen_outside(t, names) for t, names in zip(pair, inner, strict=True)]
        common = joined(*seen)
        if common is None:
            raise TypeMismatch(f"both branches of a condition give one type, got {pair}")
        return common
    yes, no = pair
    if yes.dtype != no.dtype or yes.rank != no.rank:
        raise TypeMismatch(
            f"both branches of a condition give one type, got {yes} and {no}; sizes may differ, "
            "element types and the number of axes may not"
        )
    return yes.with_shape(
        call.opened(next(numbers)) if _differs(a, b, inner) else a
        for a, b in zip(yes.shape, no.shape, strict=True)
    )


def _differs(yes: Dim, no: Dim, inner: Sequence[set[str]]) -> bool:
    return yes != no or bool(symbols(yes) & inner[0] or symbols(no) & inner[1])


def _cond_opens(call: OpCall) -> int:
    check_regions(call, 2)
    inner = [inner_sizes(region) for region in call.regions]
    pairs = [p for p in _branch_types(call) if all(map(is_plain, p)) and p[0].rank == p[1].rank]
    return sum(
        _differs(a, b, inner) for yes, no in pairs for a, b in zip(yes.shape, no.shape, strict=True)
    )


def _cond_vjp_with_residuals(
    inputs: Sequence[Tensor], attrs: Mapping[str, Any], regions: Sequence[Function],
    outputs: int, vjp_of: VjpOf,
) -> tuple[tuple[Tensor, ...], Pullback]:  # fmt: skip
    ys = recorder().apply(cond_row, inputs, attrs, regions=tuple(regions), outputs=outputs)
    wanted = [i for i, x in enumerate(inputs[1:]) if x.dtype.is_float]

    def pullback(gs: Sequence[Tensor | None]) -> list[Tensor | None]:
        present = [i for i, g in enumerate(gs) if g is not None]
        if any(regions[0].results[i].type != regions[1].results[i].type for i in present):
            raise InvalidInput(
                "a gradient needs both branches of a condition to give tensors of one size, got "
                f"{[[r.results[i].type for i in present] for r in regions]}"
            )
        back = tuple(vjp_of(r, wanted, present) for r in regions)
        operands = (*inputs, *(gs[i] for i in present))
        cotangents = recorder().apply(cond_row, operands, {}, regions=back, outputs=len(wanted))
        return scattered(len(inputs), {i + 1: g for i, g in zip(wanted, cotangents, strict=True)})

    return ys, pullback


def _cond_batch(call: BatchedCall) -> Sequence[Tensor]:
    """Where the slices share one condition, both branches are batched; else a scan decides."""
    if call.batched[0]:
        raise NeedsScan
    flags, wanted = call.batched[1:], [False] * len(call.types)
    for r in call.regions:
        flags_of_results = call.vectorized(r, flags, call.size, wanted)[2]
        wanted = [a or b for a, b in zip(wanted, flags_of_results, strict=True)]
    sides = [call.vectorized(r, flags, call.size, wanted) for r in call.regions]
    predicate, *operands = call.inputs
    outputs = cond_node(predicate, operands, [b for b, *_ in sides], [r for _, r, _ in sides])  # type: ignore[arg-type]
    return all_batched(outputs, wanted, call.size)


cond_row = Op(
    name="Cond",
    kind=OpKind.CONTROL,
    emit=emit_cond,
    domain=DOMAIN,
    operands=("P", "*"),
    data_dependent_dims=_cond_opens,
    infer=_cond_types,
    reference=lambda p, *operands, regions: tuple(regions[0 if p else 1](*operands)),
    vjp_with_residuals=_cond_vjp_with_residuals,
    batch=_cond_batch,
)


def cond(predicate: TensorLike, then: Any, otherwise: Any, *operands: Any) -> Any:
    """`then(*operands)` or `otherwise(*operands)`; both give trees of the same types."""
    flat = [as_tensor(x) for x in leaves(operands)]
    predicate = as_tensor(predicate)
    if predicate.rank:
        predicate = predicate.reshape(())
    trees: list[Any] = []
    builds = []
    for name, f in (("then", then), ("else", otherwise)):
        branch = partial(applied, f, operands)
        build, value = region(name, [x.type for x in flat], branch)
        builds.append(build)
        trees.append(value)
    if structure(trees[0]) != structure(trees[1]):
        raise InvalidInput(
            f"both branches of a condition give one structure, got {structure(trees[0])} "
            f"and {structure(trees[1])}"
        )
    results = [inside(b, leaves(tree)) for b, tree in zip(builds, trees, strict=True)]
    return rebuild(trees[0], cond_node(predicate, flat, builds, results))


def cond_node(
    predicate: Tensor,
    operands: Sequence[Tensor],
    builds: Sequence[Build],
    results: Sequence[Sequence[Tensor]],
) -> tuple[Tensor, ...]:
    """The Cond of two recorded branches that take `operands` first; `results` are theirs."""
    captured = share_captures(builds)
    regions = tuple(b.finish(numbered(r)) for b, r in zip(builds, results, strict=True))
    return recorder().apply(
        cond_row, (predicate, *operands, *captured), {}, regions=regions, outputs=len(results[0])
    )
