"""Code that rows over regions share: control flow as nodes with closed regions.

Cond(p, *operands): one of two regions of the operands.
Scan(*carry, *xs, *captures): region (carry, slice of each x along axis 0, captures) -> (carry, ys).
Loop(trips?, go, *carry, *captures): region (i, go, carry, captures) -> (go, carry, stacked).
A gradient runs the region's own gradient in a node of the same kind: Scan and Loop keep the carry
of every trip and walk back over it. Gradients are such nodes again, so every order exists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.dims import Dim
from triplane.unified_ir.ir.graph import Function
from triplane.unified_ir.ir.types import OWN, TensorType, TypeMismatch
from triplane.unified_ir.ops.batching import BatchedCall, with_axis
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.inline import inline, introduced_sizes
from triplane.unified_ir.ops.lowering import Region, XlaContext
from triplane.unified_ir.ops.recorder import recorder
from triplane.unified_ir.ops.row import OpCall
from triplane.unified_ir.ops.rows.movement.structure import zeros
from triplane.unified_ir.ops.tensor import Tensor

Types = tuple[TensorType, ...]


VjpOf = Callable[[Function, Sequence[int], Sequence[int]], Function]
"""(function, parameters wanted, results given) -> its pullback as a function."""


Pullback = Callable[[Sequence[Tensor | None]], list[Tensor | None]]


def region_results(call: OpCall, i: int, params: Sequence[TensorType]) -> Types:
    """Return the result types that region `i` declares; refuse a region that takes other types."""
    param_types = [p.type for p in call.regions[i].params]
    if param_types != list(params):
        raise TypeMismatch(f"{call.row} passes {list(params)} to a region that takes {param_types}")
    return tuple(r.type for r in call.regions[i].results)


def region_types(call: OpCall, i: int, params: Sequence[TensorType]) -> Types:
    """Like `region_results`, but refuse results of sizes that only the region's data decide."""
    results = region_results(call, i, params)
    known_outside(call, results, inner_sizes(call.regions[i]))
    return results


def check_bprop(call: OpCall, results: Types) -> None:
    """Refuse a second region that is not a gradient of the first, whose results are `results`."""
    operands = all_types(call)
    floats = [t for t in results if t.dtype.is_float]
    wanted = [t for t in operands if t.dtype.is_float]
    cotangents = list(region_results(call, 1, [*operands, *results, *floats]))
    if cotangents != wanted:
        raise TypeMismatch(
            f"bprop must return one cotangent per floating-point operand {wanted}, got {cotangents}"
        )


def pulled_by(
    back: Function, inputs: Sequence[Tensor], ys: Sequence[Tensor], gs: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Return cotangents of `inputs` by a bprop: (inputs, results, cotangents) -> them."""
    # A bprop has one signature whichever results are used, so missing cotangents are zeros.
    floats = [
        zeros(y.shape, y.dtype) if g is None else g
        for y, g in zip(ys, gs, strict=True)
        if y.dtype.is_float
    ]
    return by_operand(inputs, inline(back, [*inputs, *ys, *floats]))


def closed(build: Build, results: Sequence[Tensor], what: str) -> Function:
    """Return the finished function; refuse captures in the name of `what`, which has them."""
    if build.captured:
        raise InvalidInput(
            f"{what} must take everything it uses as an argument; it captures {build.captured}"
        )
    return build.finish(numbered(results))


def inner_sizes(region: Function) -> set[str]:
    """Return the names of sizes that exist only inside a region."""
    return {name for node in region.nodes for name in introduced_sizes(node)}


def known_outside(call: OpCall, results: Sequence[TensorType], inner: set[str]) -> None:
    """Refuse results with a size that only a region's data decide."""
    if any(inner & r.symbols for r in results):
        raise TypeMismatch(
            f"a region of {call.row} gives {list(results)}, a size of which depends on data in it; "
            "return a tensor of a size that is known outside"
        )


def seen_outside(type_: TensorType, inner: set[str]) -> TensorType:
    """Return a sequence's or optional's type without a region's sizes: each element has its own."""
    return type_.with_sizes(dict.fromkeys(inner, OWN))


def all_types(call: OpCall) -> list[TensorType]:
    """Return the types of all operands, each of which must be present."""
    return [call.type(i) for i in range(len(call.types))]


def check_regions(call: OpCall, n: int) -> None:
    """Refuse a number of regions other than `n`."""
    if len(call.regions) != n:
        raise InvalidInput(f"{call.row} has {n} regions, got {len(call.regions)}")


def float_positions(operands: Sequence[Tensor]) -> list[int]:
    """Return the positions of floating-point operands, which are those with a cotangent."""
    return [i for i, x in enumerate(operands) if x.dtype.is_float]


def by_operand(operands: Sequence[Tensor], cotangents: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the floating-point operands' cotangents in their places, None for the others."""
    in_order = iter(cotangents)
    return [next(in_order) if x.dtype.is_float else None for x in operands]


def given_positions(gs: Sequence[Tensor | None]) -> list[int]:
    """Return the positions of the results that have a cotangent."""
    return [i for i, g in enumerate(gs) if g is not None]


def all_batched(outputs: Sequence[Tensor], batched: Sequence[bool], size: Dim) -> list[Tensor]:
    """Return the outputs, each of them over the batch."""
    return [y if b else with_axis(y, size) for y, b in zip(outputs, batched, strict=True)]


def carry_batched(
    call: BatchedCall, carry: Sequence[Any], now: Sequence[bool], wanted: Sequence[bool]
) -> list[Any]:
    """Return the carry of a loop on batches, with the new axis wherever it is wanted."""
    flags = zip(carry, now, wanted, strict=False)
    return [with_axis(x, call.size) if w and not b and x is not None else x for x, b, w in flags]


def batched_results(
    call: BatchedCall, outputs: Sequence[Tensor], batched: Sequence[bool], carry: int
) -> list[Tensor]:
    """Return the outputs of a loop on batches, all of them over the batch; trips come second."""
    stacked = zip(outputs[carry:], batched[carry:], strict=True)
    turned = [*outputs[:carry], *(swapped(y) if b else y for y, b in stacked)]
    return all_batched(turned, batched, call.size)


def settled(
    call: BatchedCall, flags: Sequence[bool], lead: int, carry: int
) -> tuple[Build, list[Tensor], list[bool], list[bool]]:
    """Return the body of a loop on batches: a carry that some trip batches is so from the start.

    `lead` parameters come before the carry, and one result less.
    """
    before = max(lead - 1, 0)
    now = list(flags[lead : lead + carry])
    body = call.regions[0]
    # A fixed point: one batched carry may make another one batched in the next trip. The flags only
    # ever change to True, so this ends after at most `carry` rounds.
    while True:
        entering = [*flags[:lead], *now, *flags[lead + carry :]]
        wanted = [False] * len(body.results)
        wanted[before : before + carry] = now
        build, results, leaving = call.vectorized(body, entering, call.size, wanted)
        if leaving[before : before + carry] == now:
            return build, results, leaving, now
        now = leaving[before : before + carry]


class XlaRegion:
    """A region that runs in XLA's control flow, out of which its failures are handed."""

    def __init__(self, k: XlaContext, i: int = 0) -> None:
        self._k = k
        self._run: Region = k.region(i)
        self._may_fail = False

    def __call__(self, *args: Any) -> tuple[list[Any], Any]:
        """Return the results, and which requirement failed: int32, 0 if none."""
        results, failed = self._run(*args)
        self._may_fail |= not isinstance(failed, np.integer)
        return results, failed

    def after(self, before: Any, *args: Any) -> tuple[list[Any], Any]:
        """Like a call, but the failure of an earlier trip, `before`, stays."""
        results, failed = self(*args)
        if isinstance(failed, np.integer):
            return results, before
        return results, self._k.np.where(before == 0, failed, before)

    def hand_out(self, failed: Any) -> None:
        """Refuse the run if the region failed; a region that cannot fail costs nothing."""
        if self._may_fail:
            self._k.merge(failed)


def swapped(x: Tensor) -> Tensor:
    """Exchange the first two axes: steps and slices of a batch."""
    return x.transpose(1, 0, *range(2, x.rank))


def numbered(results: Sequence[Any]) -> dict[str, Any]:
    """Return results by the names y0, y1, ..."""
    return {f"y{i}": r for i, r in enumerate(results)}


def inside(build: Build, items: Sequence[Any]) -> list[Tensor]:
    """Return items as tensors of a build."""
    with build:
        return [build.as_operand(x) for x in items]


def share_captures(builds: Sequence[Build]) -> list[Tensor]:
    """Give every build the captures of all, in one order, and return the outer tensors."""
    outer: dict[Any, Tensor] = {}
    for build in builds:
        for x in build.captured:
            outer.setdefault(x.value, x)
    for build in builds:
        # Both regions of a node take the same operands, so each gets the other's captures as
        # parameters that it may not read.
        plain = [p for p in build.params if all(p is not c.value for c in build.captures.values())]
        with build:
            inner = [build.as_operand(x).value for x in outer.values()]
        build.params = [*plain, *inner]
    return list(outer.values())


def with_regions(
    call: BatchedCall, operands: Sequence[Any], batched: Callable[[int], bool]
) -> Sequence[Tensor]:
    """Apply the row with its regions on batches; all their results are batched."""
    regions = []
    for r in call.regions:
        flags = [batched(i) for i in range(len(r.params))]
        build, results, _ = call.vectorized(r, flags, call.size, [True] * len(r.results))
        assert not build.captured
        regions.append(build.finish(numbered(results)))
    return recorder().apply(
        call.row, operands, call.attrs, regions=tuple(regions), outputs=len(call.types)
    )
