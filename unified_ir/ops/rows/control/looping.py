"""Loops that make a number of trips, or run until a condition of the data ends them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.dims import Dim, is_symbol, symbol, symbols
from triplane.unified_ir.ir.graph import Function, Node
from triplane.unified_ir.ir.types import (
    OptionalType,
    TensorType,
    TypeMismatch,
    bool_,
    fits,
    int64,
    is_plain,
    joined,
)
from triplane.unified_ir.ops.batching import BatchedCall, NeedsScan
from triplane.unified_ir.ops.build import region
from triplane.unified_ir.ops.emission import EmissionContext
from triplane.unified_ir.ops.lowering import XlaContext
from triplane.unified_ir.ops.recorder import recorder
from triplane.unified_ir.ops.row import DOMAIN, OPEN, AttrSpec, Op, OpCall, OpKind
from triplane.unified_ir.ops.rows.control import control
from triplane.unified_ir.ops.rows.control.control import Pullback, Types, VjpOf
from triplane.unified_ir.ops.rows.control.scanning import (
    BackwardWalk,
    check_structure,
    saving_carry,
    split,
)
from triplane.unified_ir.ops.tensor import Tensor, as_tensor, dims_of, emit
from triplane.unified_ir.ops.trees import leaves, rebuild
from triplane.unified_ir.ops.values import bind


def _loop_types(call: OpCall) -> Types:
    control.check_regions(call, 1)
    n = call.attrs["num_carry"]
    if call.has(0) and call.type(0) != TensorType(int64, ()):
        raise TypeMismatch(f"a trip count must be an int64 scalar, got {call.type(0)}")
    if call.type(1) != TensorType(bool_, ()):
        raise TypeMismatch(f"a loop condition must be a bool scalar, got {call.type(1)}")
    rest = [call.type(i) for i in range(2, len(call.types))]
    carry, captures = rest[:n], rest[n:]
    (body,) = call.regions
    i, flag, *params = [p.type for p in body.params]
    passed, wanted = [i, flag, *params[n:]], [TensorType(int64, ()), TensorType(bool_, ())]
    if passed != [*wanted, *captures] or len(params) != len(rest):
        raise TypeMismatch(f"{call.row} passes {rest} to a region that takes {params}")
    go, *results = [r.type for r in body.results]
    inner = control.inner_sizes(body) | set(call.open)
    after, ys = [_seen_outside_if_held(r, inner) for r in results[:n]], results[n:]
    pairs = zip([*carry, *after], params[:n] * 2, strict=True)
    if go != TensorType(bool_, ()) or not all(_carried(t, p, call.open) for t, p in pairs):
        raise TypeMismatch(
            f"the body of a loop must return (bool, carry like {carry}, ...), got ({go}, {after}); "
            "keep shapes and element types the same from trip to trip"
        )
    control.known_outside(call, ys, inner)
    # A loop that stacks nothing needs no symbol for its number of trips.
    trips = symbol(call.attrs["trips"]) if ys else 0
    carried = (a if _opens_optional(p, a) else p for p, a in zip(params[:n], after, strict=True))
    return (*carried, *(y.with_shape((trips, *y.shape)) for y in ys))


def _opens_optional(param: TensorType, result: TensorType) -> bool:
    """Return whether a body takes an optional and returns the value that it might hold.

    ONNX allows this.
    """
    return isinstance(param, OptionalType) and not isinstance(result, OptionalType)


def _seen_outside_if_held(type_: TensorType, inner: set[str]) -> TensorType:
    return type_ if is_plain(type_) else control.seen_outside(type_, inner)


def _carried(result: TensorType, param: TensorType, free: Sequence[str]) -> bool:
    """Return whether a value may enter the next trip; a size in `free` may differ in each."""
    if isinstance(param, OptionalType) and _opens_optional(param, result):
        return fits(result, param.element)
    if not is_plain(param) or not is_plain(result):
        return fits(result, param)
    if result.dtype != param.dtype or result.rank != param.rank:
        return False
    pairs = zip(result.shape, param.shape, strict=True)
    return all(p == d or (is_symbol(p) and str(p) in free) for d, p in pairs)


@dataclass(frozen=True)
class LoopCarry:
    """The types of the carry as a loop's body takes it; sizes in `free` may change by trip."""

    types: tuple[TensorType, ...]
    free: tuple[str, ...] = ()

    def joined(
        self, after: Sequence[TensorType], body: Function, fresh: Callable[[], str]
    ) -> LoopCarry:
        """Return a carry that also takes the types `after`, which `body` returned for this one.

        A size that changed gets a name from `fresh`, a sequence the type that joins both. Equal to
        this carry if it is wide enough already. Raise TypeMismatch if nothing joins two types.
        """
        inner, free, types = control.inner_sizes(body) | set(self.free), list(self.free), []
        for param, result in zip(self.types, after, strict=True):
            alike = (param.dtype, param.rank) == (result.dtype, result.rank)
            if is_plain(param) and is_plain(result) and alike:
                shape = tuple(
                    self._size(p, d, inner, free, fresh)
                    for p, d in zip(param.shape, result.shape, strict=True)
                )
                types.append(param.with_shape(shape))
                continue
            seen = _seen_outside_if_held(result, inner)
            if _opens_optional(param, seen):
                seen = OptionalType(seen)
            common = joined(param, seen)
            if common is None:
                raise TypeMismatch(f"a loop carries {param} into a trip and {result} out of it")
            types.append(common)
        return LoopCarry(tuple(types), tuple(free))

    def _size(
        self, p: Dim, d: Dim, inner: set[str], free: list[str], fresh: Callable[[], str]
    ) -> Dim:
        stays = p == d and not symbols(d) & inner
        # Widening is one-way, from a known size to a free symbol, so repeating it reaches a fixed
        # point.
        if stays or (is_symbol(p) and str(p) in self.free):
            return p
        free.append(fresh())
        return symbol(free[-1])


def _loop_reference(
    count: Any, go: Any, /, *operands: Any, regions: Any, num_carry: int, **_: Any
) -> tuple[Any, ...]:
    carry, captures = split(operands, num_carry)
    rows = []
    i = 0
    while go and (count is None or i < count):
        go, *results = regions[0](np.array(i, np.int64), np.array(go), *carry, *captures)
        carry = results[:num_carry]
        rows.append(results[num_carry:])
        i += 1
    return (*carry, *[np.stack(column) for column in zip(*rows, strict=True)])


def _no_gradient(gs: Sequence[Tensor | None]) -> list[Tensor | None]:
    raise InvalidInput(
        "a gradient through a loop needs a carry of tensors that keep their sizes, since the carry "
        "of every trip is stacked; carry a padded tensor and a count instead"
    )


def _loop_vjp_with_residuals(
    inputs: Sequence[Tensor | None], attrs: Mapping[str, Any], regions: Sequence[Function],
    outputs: int, vjp_of: VjpOf,
) -> tuple[tuple[Tensor, ...], Pullback]:  # fmt: skip
    n = attrs["num_carry"]
    body = regions[0]
    build = recorder()
    # The backward walk stacks the carry of every trip, which takes tensors of one size.
    if attrs.get(OPEN) or not all(is_plain(p.type) for p in body.params):
        return build.apply(loop_row, inputs, attrs, regions=(body,), outputs=outputs), _no_gradient
    trips = f"trips_{'_'.join(map(str, build.position()))}"
    ys = build.apply(
        loop_row,
        inputs,
        {**attrs, "trips": trips},
        # Each trip also stacks the carry that it started from: its gradient needs that point, and
        # stored values cost less than running all earlier trips again.
        regions=(saving_carry(body, n, 2),),
        outputs=outputs + n,
    )
    saved = ys[outputs:]
    carry, captures = split(inputs[2:], n)

    def pullback(gs: Sequence[Tensor | None]) -> list[Tensor | None]:
        walk = BackwardWalk(body, [*carry, *captures], gs, n, vjp_of, lead=2)
        if not saved:
            return [None] * len(inputs)
        count = dims_of([symbol(trips)]).reshape(())
        g_ys = [gs[n + i] for i in walk.y_given]

        def step(i: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            # The walk goes back, from the last trip to the first.
            j = count - 1 - i
            here = [emit("Gather", s, j, axis=0) for s in saved]
            g_here = [emit("Gather", g, j, axis=0) for g in g_ys]
            params = [j, as_tensor(np.array(True)), *here, *captures]
            after, _ = walk.pulled(params, state, g_here, ())
            return tuple(after)

        last_state = fori_loop(count, step, tuple(walk.start()))
        return walk.result(len(inputs), leaves(last_state), ())

    return ys[:outputs], pullback


def _loop_batch(call: BatchedCall) -> Sequence[Tensor]:
    """Batch the body if all slices make the same trips; otherwise request a scan."""
    n = call.attrs["num_carry"]
    if any(call.batched[:2]):
        raise NeedsScan
    build, results, leaving, carried = control.settled(call, call.batched, 2, n)
    # The condition depends on the slice, so slices would stop at different trips.
    if leaving[0]:
        raise NeedsScan
    count, go, *rest = call.inputs
    first = control.carry_batched(call, rest, call.batched[2:], carried)
    body = build.finish(control.numbered(results))
    outputs = recorder().apply(
        loop_row,
        (count, go, *first, *rest[n:], *build.captured),
        call.attrs,
        regions=(body,),
        outputs=len(call.types),
    )
    return control.batched_results(call, outputs, leaving[1 : 1 + len(outputs)], n)


def _emit_loop(context: EmissionContext, node: Node) -> None:
    """Emit a Loop whose captures are outer names."""
    n = 2 + int(node.attrs["num_carry"])  # type: ignore[arg-type]
    names = context.inputs(node)
    body = context.subgraph(node.regions[0], n, names[n:])
    context.add("Loop", names[:n], context.output_names(node), body=body)


def _loop_xla(
    k: XlaContext, count: Any, go: Any, *operands: Any, num_carry: int, trips: str
) -> tuple[Any, ...]:
    carry, captures = split(operands, num_carry)
    body = control.XlaRegion(k)

    def trip(i: Any, failed: Any, before: Sequence[Any]) -> tuple[Any, Any, Any]:
        # In a trip the condition holds, so it is known.
        (more, *results), failed = body.after(failed, i, np.array(True), *before, *captures)
        return more, (i + 1, failed, results[:num_carry]), results[num_carry:]

    stacked = k.node.outputs[num_carry:]
    total = _known_trips(k, count, go, needed=bool(stacked))
    if total == 0:
        # Not traced: the body may read what earlier trips have stacked, which is empty.
        sizes = _sizes_of(k.node, (count, go, *operands)) | {trips: 0}
        return (*carry, *(np.zeros(v.type.concrete(sizes), v.type.dtype.numpy) for v in stacked))
    start, ys = (np.int64(0), np.int32(0), carry), ()
    if total is not None:
        end, ys = k.lax.scan(lambda state, _: trip(*state)[1:], start, None, length=total)
    else:
        enters = lambda state: _enters(count, *state)
        _, end = k.lax.while_loop(enters, lambda state: trip(*state[1])[:2], (go, start))
    body.hand_out(end[1])
    return (*end[2], *ys)


def _sizes_of(node: Node, operands: Sequence[Any]) -> dict[str, int]:
    """Return the sizes of the symbols in the operands' types."""
    sizes: dict[str, int] = {}
    for value, x in zip(node.inputs, operands, strict=True):
        if value is not None:
            bind(sizes, value.type, x)
    return sizes


def _enters(count: Any, go: Any, state: Any) -> Any:
    """Return whether a trip is made: none after a failure, whose values may never end a loop."""
    i, failed, _ = state
    enters = go & (failed == 0)
    return enters if count is None else enters & (i < count)


def _known_trips(k: XlaContext, count: Any, go: Any, *, needed: bool) -> int | None:
    """Return the number of trips, None if data decide it; refuse that if it is `needed`."""
    counted = count if _goes_on(k.node.regions[0]) else None
    if needed:
        counted, go = (k.known(x, "the trips of a loop that stacks results") for x in (counted, go))
    if not isinstance(counted, np.ndarray) or not isinstance(go, np.ndarray):
        return None
    return max(int(counted), 0) if go else 0


def _goes_on(body: Function) -> bool:
    """Return whether the condition stays true after each trip, so that only the count ends it."""
    producers, flag = body.producers(), body.results[0]
    while flag in producers and producers[flag].op.name == "Identity":
        (flag,) = producers[flag].inputs  # type: ignore[assignment]
    if flag is body.params[1]:
        return True
    value = producers[flag].attrs.get("value") if flag in producers else None
    return isinstance(value, np.ndarray) and bool(value.all())


loop_row = Op(
    name="Loop",
    computes=(
        "the carry after `while go and i < trips: go, carry, ys = region(i, go, carry); i += "
        "1`, and the stacked ys"
    ),
    kind=OpKind.CONTROL,
    emit=_emit_loop,
    domain=DOMAIN,
    operands=("I?", "P", "*"),
    data_dependent_dims=lambda call: 0,
    attrs={"num_carry": AttrSpec("INT", required=True), "trips": AttrSpec("STRING", "")},
    infer=_loop_types,
    reference=_loop_reference,
    vjp_with_residuals=_loop_vjp_with_residuals,
    batch=_loop_batch,
    xla=_loop_xla,
)


def while_loop(condition: Any, body: Any, init: Any) -> Any:
    """Return x after `x = init; while condition(x): x = body(x)`; the carry keeps its types."""
    carry = [as_tensor(x) for x in leaves(init)]
    go = as_tensor(condition(rebuild(init, carry))).reshape(())
    return _loop((None, go), condition, lambda _, x: body(x), init, carry)


def fori_loop(count: Any, body: Any, init: Any) -> Any:
    """Return x after `x = init; for i in range(count): x = body(i, x)`.

    count: an int or an int64 scalar tensor.
    """
    carry = [as_tensor(x) for x in leaves(init)]
    trips = as_tensor(count)
    if trips.dtype.kind not in {"int", "uint"}:
        raise TypeMismatch(f"a trip count must be a whole number, got {count!r}")
    trips = trips.cast(int64).reshape(())
    return _loop((trips, as_tensor(np.array(True))), lambda _: np.array(True), body, init, carry)


def _loop(head: Sequence[Any], condition: Any, body: Any, init: Any, carry: list[Tensor]) -> Any:
    """Return the carry after a loop whose node takes `head` first: (trip count or None, condition).

    A tensor keeps its type; that of a sequence widens until the body returns what it takes.
    """

    def trip(ts: Sequence[Tensor]) -> list[Any]:
        after = body(ts[0], rebuild(init, ts[2:]))
        check_structure("a loop", init, after)
        return [condition(after), *leaves(after)]

    flags, types = [TensorType(int64, ()), TensorType(bool_, ())], [x.type for x in carry]
    while True:
        build, results = region("loop", [*flags, *types], trip)
        function = build.finish(control.numbered(results))
        inner = control.inner_sizes(function)
        wider = [
            t if is_plain(t) else joined(t, control.seen_outside(r.type, inner)) or t
            for t, r in zip(types, function.results[1:], strict=False)
        ]
        if wider == types:
            break
        types = wider
    outputs = recorder().apply(
        loop_row,
        (*head, *carry, *build.captured),
        {"num_carry": len(carry)},
        regions=(function,),
        outputs=len(carry),
    )
    return rebuild(init, outputs)
