"""Control flow as nodes with closed regions.

Cond(p, *operands): one of two regions of the operands.
Scan(*carry, *xs, *captures): region (carry, slice of each x along axis 0, captures) -> (carry, ys).
Loop(trips?, go, *carry, *captures): region (i, go, carry, captures) -> (go, carry, stacked).
A gradient runs the region's own gradient in a node of the same kind: Scan and Loop keep the carry
of every trip and walk back over it. Gradients are again such nodes, so any order exists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.dims import Dim, is_symbol, symbol, symbols
from triplane.unified_ir.ir.graph import Function, Node, Value
from triplane.unified_ir.ir.types import (
    OWN,
    OptionalType,
    TensorType,
    TypeMismatch,
    bool_,
    fits,
    int64,
    is_plain,
    joined,
)
from triplane.unified_ir.ops.batching import BatchedCall, NeedsScan, with_axis
from triplane.unified_ir.ops.build import Build, region
from triplane.unified_ir.ops.emit_control import emit_cond, emit_loop, emit_scan
from triplane.unified_ir.ops.inline import inline, introduced
from triplane.unified_ir.ops.recorder import recorder
from triplane.unified_ir.ops.row import DOMAIN, OPEN, AttrSpec, Op, OpCall, OpKind
from triplane.unified_ir.ops.structure import zeros
from triplane.unified_ir.ops.tensor import Tensor, TensorLike, as_tensor, dims_of, emit
from triplane.unified_ir.ops.trees import leaves, rebuild, structure

Types = tuple[TensorType, ...]
VjpOf = Callable[[Function, Sequence[int], Sequence[int]], Function]
"""(function, parameters wanted, results given) -> its pullback as a function."""
Pullback = Callable[[Sequence[Tensor | None]], list[Tensor | None]]


def _region_types(call: OpCall, i: int, params: Sequence[TensorType]) -> Types:
    """Result types of region `i` after checking that it takes `params`."""
    found = [p.type for p in call.regions[i].params]
    if found != list(params):
        raise TypeMismatch(f"{call.row} passes {list(params)} to a region that takes {found}")
    results = tuple(r.type for r in call.regions[i].results)
    _known_outside(call, results, _inner_sizes(call.regions[i]))
    return results


def _inner_sizes(region: Function) -> set[str]:
    """Names of sizes that mean nothing outside a region."""
    return {name for node in region.nodes for name in introduced(node)}


def _known_outside(call: OpCall, results: Sequence[TensorType], inner: set[str]) -> None:
    if any(inner & r.symbols for r in results):
        raise TypeMismatch(
            f"a region of {call.row} gives {list(results)}, a size of which depends on data in it; "
            "give back a tensor of a size that is known outside"
        )


def _seen_outside(made: TensorType, inner: set[str]) -> TensorType:
    """A sequence or optional without a region's sizes: each element has its own."""
    return made.with_sizes(dict.fromkeys(inner, OWN))


def _all_types(call: OpCall) -> list[TensorType]:
    return [call.type(i) for i in range(len(call.types))]


def _check_regions(call: OpCall, n: int) -> None:
    if len(call.regions) != n:
        raise InvalidInput(f"{call.row} has {n} regions, got {len(call.regions)}")


def _cond_types(call: OpCall) -> Types:
    _check_regions(call, 2)
    if call.type(0) != TensorType(bool_, ()):
        raise TypeMismatch(f"a condition is a bool scalar, got {call.type(0)}; reduce it with all?")
    operands = _all_types(call)[1:]
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
    inner = [_inner_sizes(region) for region in call.regions]
    if not all(map(is_plain, pair)):
        seen = [_seen_outside(t, names) for t, names in zip(pair, inner, strict=True)]
        found = joined(*seen)
        if found is None:
            raise TypeMismatch(f"both branches of a condition give one type, got {pair}")
        return found
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
    _check_regions(call, 2)
    inner = [_inner_sizes(region) for region in call.regions]
    pairs = [p for p in _branch_types(call) if all(map(is_plain, p)) and p[0].rank == p[1].rank]
    return sum(
        _differs(a, b, inner) for yes, no in pairs for a, b in zip(yes.shape, no.shape, strict=True)
    )


def _cond_vjp_with_residuals(
    inputs: Sequence[Tensor], attrs: Mapping[str, Any], regions: Sequence[Function],
    outputs: int, vjp_of: VjpOf,
) -> tuple[tuple[Tensor, ...], Pullback]:  # fmt: skip
    made = recorder().apply(cond_row, inputs, attrs, regions=tuple(regions), outputs=outputs)
    wanted = [i for i, x in enumerate(inputs[1:]) if x.dtype.is_float]

    def pullback(gs: Sequence[Tensor | None]) -> list[Tensor | None]:
        given = [i for i, g in enumerate(gs) if g is not None]
        if any(regions[0].results[i].type != regions[1].results[i].type for i in given):
            raise InvalidInput(
                "a gradient needs both branches of a condition to give tensors of one size, got "
                f"{[[r.results[i].type for i in given] for r in regions]}"
            )
        back = tuple(vjp_of(r, wanted, given) for r in regions)
        operands = (*inputs, *(gs[i] for i in given))
        found = recorder().apply(cond_row, operands, {}, regions=back, outputs=len(wanted))
        return _scattered(len(inputs), {i + 1: g for i, g in zip(wanted, found, strict=True)})

    return made, pullback


def _scattered(n: int, found: Mapping[int, Tensor]) -> list[Tensor | None]:
    return [found.get(i) for i in range(n)]


def _cond_batch(call: BatchedCall) -> Sequence[Tensor]:
    """Where the slices share one condition, both branches are batched; else a scan decides."""
    if call.batched[0]:
        raise NeedsScan
    flags, wanted = call.batched[1:], [False] * len(call.types)
    for r in call.regions:
        found = call.vectorized(r, flags, call.size, wanted)[2]
        wanted = [a or b for a, b in zip(wanted, found, strict=True)]
    sides = [call.vectorized(r, flags, call.size, wanted) for r in call.regions]
    predicate, *operands = call.inputs
    made = cond_node(predicate, operands, [b for b, *_ in sides], [r for _, r, _ in sides])  # type: ignore[arg-type]
    return _all_batched(made, wanted, call.size)


def _all_batched(made: Sequence[Tensor], batched: Sequence[bool], size: Dim) -> list[Tensor]:
    return [y if b else with_axis(y, size) for y, b in zip(made, batched, strict=True)]


def _settled(
    call: BatchedCall, flags: Sequence[bool], lead: int, carry: int
) -> tuple[Build, list[Tensor], list[bool], list[bool]]:
    """The body of a loop on batches: a carry that any trip makes batched is so from the start.

    `lead` counts parameters before the carry; results before it are as many less one.
    """
    before = max(lead - 1, 0)
    now = list(flags[lead : lead + carry])
    body = call.regions[0]
    while True:
        given = [*flags[:lead], *now, *flags[lead + carry :]]
        wanted = [False] * len(body.results)
        wanted[before : before + carry] = now
        build, results, found = call.vectorized(body, given, call.size, wanted)
        if found[before : before + carry] == now:
            return build, results, found, now
        now = found[before : before + carry]


def _swapped(x: Tensor) -> Tensor:
    """The first two axes exchanged: steps and slices of a batch."""
    return x.transpose(1, 0, *range(2, x.rank))


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


def _split(items: Sequence[Any], *counts: int) -> list[list[Any]]:
    """Consecutive groups of the given sizes, then the rest."""
    groups, start = [], 0
    for n in counts:
        groups.append(list(items[start : start + n]))
        start += n
    return [*groups, list(items[start:])]


def _scan_types(call: OpCall) -> Types:
    _check_regions(call, 1)
    carry, xs, captures = _split(
        _all_types(call), call.attrs["num_carry"], call.attrs["num_scanned"]
    )
    if not xs or any(not x.rank or x.shape[0] != xs[0].shape[0] for x in xs):
        raise InvalidInput(f"scan walks over tensors with one first axis in common, got {xs}")
    slices = [x.with_shape(x.shape[1:]) for x in xs]
    results = _region_types(call, 0, [*carry, *slices, *captures])
    after, ys = results[: len(carry)], results[len(carry) :]
    if list(after) != carry:
        raise TypeMismatch(f"scan keeps the carry's types, got {carry} and {list(after)} after")
    return (*after, *(y.with_shape((xs[0].shape[0], *y.shape)) for y in ys))


def _scan_reference(
    *operands: Any, regions: Any, num_carry: int, num_scanned: int, reverse: int
) -> tuple[Any, ...]:
    carry, xs, captures = _split(operands, num_carry, num_scanned)
    length = len(xs[0])
    order = range(length)[:: -1 if reverse else 1]
    rows: list[Any] = [None] * length
    for i in order:
        results = regions[0](*carry, *(x[i] for x in xs), *captures)
        carry, rows[i] = results[:num_carry], results[num_carry:]
    stacked = [np.stack(column) for column in zip(*rows, strict=True)]
    return (*carry, *stacked)


def _saving_carry(body: Function, num_carry: int, first: int) -> Function:
    """`body` that also gives the carry it started from, as extra last results."""
    build = Build(recorder().table, body.name)
    with build:
        params = [build.param(p.name, p.type) for p in body.params]
        results = inline(body, params)
        kept = [emit("Identity", p) for p in params[first : first + num_carry]]
    return build.finish(_numbered([*results, *kept]))


def _numbered(results: Sequence[Tensor]) -> dict[str, Tensor]:
    return {f"y{i}": r for i, r in enumerate(results)}


def _scan_vjp_with_residuals(
    inputs: Sequence[Tensor], attrs: Mapping[str, Any], regions: Sequence[Function],
    outputs: int, vjp_of: VjpOf,
) -> tuple[tuple[Tensor, ...], Pullback]:  # fmt: skip
    n, m = attrs["num_carry"], attrs["num_scanned"]
    reverse = attrs.get("reverse", 0)
    body = regions[0]
    made = recorder().apply(
        scan_row, inputs, attrs, regions=(_saving_carry(body, n, 0),), outputs=outputs + n
    )
    saved = made[outputs:]
    carry, xs, captures = _split(inputs, n, m)

    def pullback(gs: Sequence[Tensor | None]) -> list[Tensor | None]:
        walk = _BackwardWalk(body, [*carry, *(None for _ in xs), *captures], gs, n, vjp_of)
        x_wanted = [n + i for i, x in enumerate(xs) if x.dtype.is_float]
        g_ys = [gs[n + i] for i in walk.y_given]
        scanned = [*saved, *xs, *g_ys]
        apart = _ProductsApart.of(walk.backward(x_wanted), len(walk.carry), walk.width, scanned)
        start = [x for k, x in enumerate(walk.start()) if k not in apart.products]
        walked = recorder().apply(
            scan_row,
            (*start, *scanned, *captures),
            {"num_carry": len(start), "num_scanned": len(scanned), "reverse": 1 - reverse},
            regions=(apart.step,),
            outputs=len(apart.step.results),
        )
        found = apart.joined(walked, walk.width)
        return walk.result(len(inputs), found, x_wanted)

    return made[:outputs], pullback


@dataclass(frozen=True)
class _ProductsApart:
    """A step back without those sums among its states that add a product a^T b.

    The factors are further results instead: one product of all steps, taken after the walk, is the
    sum. A weight's gradient is such a sum, and would be added up as a whole in every step.

    products: factors by number of the state. walked: for factors that are scanned, all steps of
    them. more: factors that became results, in order.
    """

    step: Function
    products: Mapping[int, tuple[Value, Value]]
    walked: Mapping[Value, Tensor]
    more: tuple[Value, ...]

    @classmethod
    def of(cls, step: Function, first: int, last: int, scanned: Sequence[Tensor]) -> _ProductsApart:
        """states first..last-1 are sums; the parameters behind them are slices of `scanned`."""
        producer = step.producers()
        reads = Counter(v for node in step.nodes for v in node.inputs)
        products = {}
        for k in range(first, last):
            add = producer.get(step.results[k])
            if add is None or add.op.name != "Add" or add.inputs[0] is not step.params[k]:
                continue
            factors = _factors(producer, add.inputs[1])
            if factors is not None and reads[step.params[k]] == 1:
                products[k] = factors
        walked = dict(zip(step.params[last:], scanned, strict=False))
        every = dict.fromkeys(v for pair in products.values() for v in pair)
        more = tuple(v for v in every if v not in walked)
        results = [*(r for k, r in enumerate(step.results) if k not in products), *more]
        params = tuple(p for k, p in enumerate(step.params) if k not in products)
        names = tuple(f"y{i}" for i in range(len(results)))
        nodes = _needed(step.nodes, results)
        left = step.with_(params=params, results=results, result_names=names, nodes=nodes)
        return cls(left, products, walked, more)

    def joined(self, results: Sequence[Tensor], width: int) -> list[Tensor]:
        """The results of a whole walk, with the sums in their places among `width` states."""
        count = len(results) - len(self.more)
        found = {**self.walked, **dict(zip(self.more, results[count:], strict=True))}
        rest = iter(results[:count])
        states = []
        for k in range(width):
            if k in self.products:
                flat = (found[v].reshape((-1, found[v].shape[2])) for v in self.products[k])
                states.append(emit("Gemm", *flat, transA=1))
            else:
                states.append(next(rest))
        return [*states, *rest]


def _factors(producer: Mapping[Value, Node], x: Value | None) -> tuple[Value, Value] | None:
    """(a, b) where x is a^T b of two matrices."""
    node = None if x is None else producer.get(x)
    if node is None or len(node.inputs) != 2:
        return None
    a, b = node.inputs
    turn = None if a is None else producer.get(a)
    if node.op.name == "MatMul" and turn is not None and turn.op.name == "Transpose":
        a = turn.inputs[0] if turn.attrs.get("perm", (1, 0)) == (1, 0) else None
    elif node.op.name != "Gemm" or node.attrs != {"transA": 1}:
        return None
    if a is None or b is None or a.type.rank != 2 or b.type.rank != 2:
        return None
    return a, b


def _needed(nodes: Sequence[Node], results: Sequence[Value]) -> tuple[Node, ...]:
    """The nodes that the results depend on."""
    wanted: set[Value | None] = set(results)
    kept = []
    for node in reversed(nodes):
        if not wanted.isdisjoint(node.outputs):
            kept.append(node)
            wanted.update(node.inputs)
    return tuple(kept[::-1])


class _BackwardWalk:
    """The state of a backward walk: cotangents of the carry, sums of cotangents of captures."""

    def __init__(
        self, body: Function, operands: Sequence[Tensor | None],
        gs: Sequence[Tensor | None], num_carry: int, vjp_of: VjpOf, *, lead: int = 0,
    ) -> None:  # fmt: skip
        self.body, self.gs, self.lead, self.vjp_of = body, gs, lead, vjp_of
        self.operands = operands
        floats = [i for i, x in enumerate(operands) if x is not None and x.dtype.is_float]
        self.carry = [i for i in floats if i < num_carry]
        self.captures = [i for i in floats if i >= num_carry]
        self.y_given = [i - num_carry for i in range(num_carry, len(gs)) if gs[i] is not None]
        self.num_carry = num_carry
        self.width = len(self.carry) + len(self.captures)

    def start(self) -> list[Tensor]:
        """Cotangents of the final carry, then zeros like each capture."""
        at = [*self.carry, *self.captures]
        given = {i: self.gs[i] for i in self.carry}
        starts = []
        for i in at:
            x, g = self.operands[i], given.get(i)
            assert x is not None
            starts.append(zeros(x.shape, x.dtype) if g is None else g)
        return starts

    def pulled(
        self,
        params: Sequence[Tensor],
        state: Sequence[Tensor],
        g_ys: Sequence[Tensor],
        extra: Sequence[int],
    ) -> tuple[list[Tensor], list[Tensor]]:
        """One step back: the next state, and cotangents of the `extra` parameters."""
        wanted = [self.lead + i for i in (*self.carry, *self.captures)]
        wanted += [self.lead + i for i in extra]
        given = [self._result_of(i) for i in self.carry]
        given += [self._result_of(self.num_carry + i) for i in self.y_given]
        back = self.vjp_of(self.body, wanted, given)
        n = len(self.carry)
        found = inline(back, [*params, *state[:n], *g_ys])
        sums = [a + b for a, b in zip(state[n:], found[n : self.width], strict=True)]
        return [*found[:n], *sums], list(found[self.width :])

    def _result_of(self, i: int) -> int:
        """Position of carry or y number `i` among the body's results (a loop gives `go` first)."""
        return i + (1 if self.lead else 0)

    def backward(self, extra: Sequence[int]) -> Function:
        """The region of the backward scan: (state, saved carry, xs, g_ys, captures)."""
        build = Build(recorder().table, f"{self.body.name}.back")
        num_xs = sum(x is None for x in self.operands)
        with build:
            state = [build.param(f"s{k}", x.type) for k, x in enumerate(self._state_operands())]
            head = self.body.params[: self.num_carry + num_xs]
            inner = [build.param(f"p{k}", p.type) for k, p in enumerate(head)]
            g_ys = [
                build.param(f"g{k}", self.body.results[self.num_carry + i].type)
                for k, i in enumerate(self.y_given)
            ]
            captures = [
                build.param(f"c{k}", p.type)
                for k, p in enumerate(self.body.params[self.num_carry + num_xs :])
            ]
            after, slices = self.pulled([*inner, *captures], state, g_ys, extra)
        return build.finish(_numbered([*after, *slices]))

    def _state_operands(self) -> list[Tensor]:
        found = [self.operands[i] for i in (*self.carry, *self.captures)]
        return [x for x in found if x is not None]

    def result(
        self, n: int, found: Sequence[Tensor], extra: Sequence[int], *, shift: int = 0
    ) -> list[Tensor | None]:
        """Cotangents by operand."""
        at = [*self.carry, *self.captures, *extra]
        return _scattered(n, {i + shift: g for i, g in zip(at, found, strict=True)})


def _scan_batch(call: BatchedCall) -> Sequence[Tensor]:
    n, m = call.attrs["num_carry"], call.attrs["num_scanned"]
    build, results, found, carried = _settled(call, call.batched, 0, n)
    carry, xs, captures = _split(call.inputs, n, m)
    first = [x if b or not c else with_axis(x, call.size)
             for x, b, c in zip(carry, call.batched, carried, strict=False)]  # fmt: skip
    walked = [_swapped(x) if b else x for x, b in zip(xs, call.batched[n : n + m], strict=True)]
    body = build.finish(_numbered(_inside(build, results)))
    made = recorder().apply(
        scan_row,
        (*first, *walked, *captures, *build.captured),
        call.attrs,
        regions=(body,),
        outputs=len(call.types),
    )
    turned = [*made[:n], *(_swapped(y) if b else y
                           for y, b in zip(made[n:], found[n:], strict=True))]  # fmt: skip
    return _all_batched(turned, found, call.size)


scan_row = Op(
    name="Scan",
    kind=OpKind.CONTROL,
    emit=emit_scan,
    domain=DOMAIN,
    operands=("*",),
    attrs={
        "num_carry": AttrSpec("INT", required=True),
        "num_scanned": AttrSpec("INT", required=True),
        "reverse": AttrSpec("INT", 0),
    },
    infer=_scan_types,
    reference=_scan_reference,
    vjp_with_residuals=_scan_vjp_with_residuals,
    batch=_scan_batch,
)


def _loop_types(call: OpCall) -> Types:
    _check_regions(call, 1)
    n = call.attrs["num_carry"]
    if call.has(0) and call.type(0) != TensorType(int64, ()):
        raise TypeMismatch(f"a trip count is an int64 scalar, got {call.type(0)}")
    if call.type(1) != TensorType(bool_, ()):
        raise TypeMismatch(f"a loop condition is a bool scalar, got {call.type(1)}")
    rest = [call.type(i) for i in range(2, len(call.types))]
    carry, captures = rest[:n], rest[n:]
    (body,) = call.regions
    i, flag, *params = [p.type for p in body.params]
    found, wanted = [i, flag, *params[n:]], [TensorType(int64, ()), TensorType(bool_, ())]
    if found != [*wanted, *captures] or len(params) != len(rest):
        raise TypeMismatch(f"{call.row} passes {rest} to a region that takes {params}")
    go, *results = [r.type for r in body.results]
    inner = _inner_sizes(body) | set(call.open)
    after, ys = [_seen_outside_if_held(r, inner) for r in results[:n]], results[n:]
    pairs = zip([*carry, *after], params[:n] * 2, strict=True)
    if go != TensorType(bool_, ()) or not all(_carried(t, p, call.open) for t, p in pairs):
        raise TypeMismatch(
            f"a loop's body gives (bool, carry like {carry}, ...), got ({go}, {after}); "
            "keep shapes and element types the same from trip to trip"
        )
    _known_outside(call, ys, inner)
    trips = symbol(call.attrs["trips"]) if ys else 0
    carried = (a if _opens_optional(p, a) else p for p, a in zip(params[:n], after, strict=True))
    return (*carried, *(y.with_shape((trips, *y.shape)) for y in ys))


def _opens_optional(param: TensorType, made: TensorType) -> bool:
    """Whether a body takes an optional and gives what it might hold, as ONNX lets it."""
    return isinstance(param, OptionalType) and not isinstance(made, OptionalType)


def _seen_outside_if_held(made: TensorType, inner: set[str]) -> TensorType:
    return made if is_plain(made) else _seen_outside(made, inner)


def _carried(given: TensorType, param: TensorType, free: Sequence[str]) -> bool:
    """Whether a value may enter the next trip: a size in `free` may be another in each."""
    if isinstance(param, OptionalType) and _opens_optional(param, given):
        return fits(given, param.element)
    if not is_plain(param) or not is_plain(given):
        return fits(given, param)
    if given.dtype != param.dtype or given.rank != param.rank:
        return False
    pairs = zip(given.shape, param.shape, strict=True)
    return all(p == d or (is_symbol(p) and str(p) in free) for d, p in pairs)


@dataclass(frozen=True)
class LoopCarry:
    """What a loop's body takes of the carry; `free` names the sizes that may change by trip."""

    types: tuple[TensorType, ...]
    free: tuple[str, ...] = ()

    def joined(
        self, after: Sequence[TensorType], body: Function, fresh: Callable[[], str]
    ) -> LoopCarry:
        """What also takes that which `body` gave, recorded on this entry.

        A size that changed gets a name from `fresh`, a sequence the type that joins both; nothing
        has to be widened where the entry comes back equal. TypeMismatch: nothing joins them.
        """
        inner, free, types = _inner_sizes(body) | set(self.free), list(self.free), []
        for param, made in zip(self.types, after, strict=True):
            alike = (param.dtype, param.rank) == (made.dtype, made.rank)
            if is_plain(param) and is_plain(made) and alike:
                shape = tuple(
                    self._size(p, d, inner, free, fresh)
                    for p, d in zip(param.shape, made.shape, strict=True)
                )
                types.append(param.with_shape(shape))
                continue
            seen = _seen_outside_if_held(made, inner)
            if _opens_optional(param, seen):
                seen = OptionalType(seen)
            found = joined(param, seen)
            if found is None:
                raise TypeMismatch(f"a loop carries {param} into a trip and {made} out of it")
            types.append(found)
        return LoopCarry(tuple(types), tuple(free))

    def _size(
        self, p: Dim, d: Dim, inner: set[str], free: list[str], fresh: Callable[[], str]
    ) -> Dim:
        stays = p == d and not symbols(d) & inner
        if stays or (is_symbol(p) and str(p) in self.free):
            return p
        free.append(fresh())
        return symbol(free[-1])


def _loop_reference(
    count: Any, go: Any, /, *operands: Any, regions: Any, num_carry: int, **_: Any
) -> tuple[Any, ...]:
    carry, captures = _split(operands, num_carry)
    rows = []
    i = 0
    while go and (count is None or i < count):
        go, *results = regions[0](np.array(i, np.int64), np.array(go), *carry, *captures)
        carry = results[:num_carry]
        rows.append(results[num_carry:])
        i += 1
    return (*carry, *[np.stack(column) for column in zip(*rows, strict=True)])


def _no_way_back(gs: Sequence[Tensor | None]) -> list[Tensor | None]:
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
    if attrs.get(OPEN) or not all(is_plain(p.type) for p in body.params):
        return build.apply(loop_row, inputs, attrs, regions=(body,), outputs=outputs), _no_way_back
    trips = f"trips_{_position()}"
    made = build.apply(
        loop_row,
        inputs,
        {**attrs, "trips": trips},
        regions=(_saving_carry(body, n, 2),),
        outputs=outputs + n,
    )
    saved = made[outputs:]
    carry, captures = _split(inputs[2:], n)

    def pullback(gs: Sequence[Tensor | None]) -> list[Tensor | None]:
        walk = _BackwardWalk(body, [*carry, *captures], gs, n, vjp_of, lead=2)
        if not saved:
            return [None] * len(inputs)
        count = dims_of([symbol(trips)]).reshape(())
        g_ys = [gs[n + i] for i in walk.y_given]

        def step(i: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            j = count - 1 - i
            here = [emit("Gather", s, j, axis=0) for s in saved]
            g_here = [emit("Gather", g, j, axis=0) for g in g_ys]
            params = [j, as_tensor(np.array(True)), *here, *captures]
            after, _ = walk.pulled(params, state, g_here, ())
            return tuple(after)

        found = fori_loop(count, step, tuple(walk.start()))
        return walk.result(len(inputs), leaves(found), (), shift=2)

    return made[:outputs], pullback


def _loop_batch(call: BatchedCall) -> Sequence[Tensor]:
    """Where all slices make the same trips; a scan of loops where they do not."""
    n = call.attrs["num_carry"]
    if any(call.batched[:2]):
        raise NeedsScan
    build, results, found, carried = _settled(call, call.batched, 2, n)
    if found[0]:
        raise NeedsScan
    count, go, *rest = call.inputs
    first = [
        with_axis(x, call.size) if c and not b and x is not None else x
        for x, b, c in zip(rest, call.batched[2:], carried, strict=False)
    ]
    body = build.finish(_numbered(_inside(build, results)))
    made = recorder().apply(
        loop_row,
        (count, go, *first, *rest[n:], *build.captured),
        call.attrs,
        regions=(body,),
        outputs=len(call.types),
    )
    turned = [*made[:n], *(_swapped(y) if b else y
                           for y, b in zip(made[n:], found[n + 1 :], strict=False))]  # fmt: skip
    return _all_batched(turned, found[1 : 1 + len(made)], call.size)


loop_row = Op(
    name="Loop",
    kind=OpKind.CONTROL,
    emit=emit_loop,
    domain=DOMAIN,
    operands=("I?", "P", "*"),
    data_dependent_dims=lambda call: 0,
    attrs={
        "num_carry": AttrSpec("INT", required=True),
        "trips": AttrSpec("STRING", ""),
    },
    infer=_loop_types,
    reference=_loop_reference,
    vjp_with_residuals=_loop_vjp_with_residuals,
    batch=_loop_batch,
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
        branch = partial(_applied, f, operands)
        build, made = region(name, [x.type for x in flat], branch)
        builds.append(build)
        trees.append(made)
    if structure(trees[0]) != structure(trees[1]):
        raise InvalidInput(
            f"both branches of a condition give one structure, got {structure(trees[0])} "
            f"and {structure(trees[1])}"
        )
    results = [_inside(b, leaves(tree)) for b, tree in zip(builds, trees, strict=True)]
    return rebuild(trees[0], cond_node(predicate, flat, builds, results))


def cond_node(
    predicate: Tensor,
    operands: Sequence[Tensor],
    builds: Sequence[Build],
    results: Sequence[Sequence[Tensor]],
) -> tuple[Tensor, ...]:
    """The Cond of two recorded branches that take `operands` first; `results` are theirs."""
    captured = _share_captures(builds)
    regions = tuple(b.finish(_numbered(r)) for b, r in zip(builds, results, strict=True))
    return recorder().apply(
        cond_row, (predicate, *operands, *captured), {}, regions=regions, outputs=len(results[0])
    )


def _applied(f: Any, operands: Any, xs: Sequence[Tensor]) -> Any:
    return f(*rebuild(operands, xs))


def _inside(build: Build, items: Sequence[Any]) -> list[Tensor]:
    with build:
        return [build.as_operand(x) for x in items]


def _share_captures(builds: Sequence[Build]) -> list[Tensor]:
    """Gives every build the captures of all, in one order; their outer tensors."""
    outer: dict[Any, Tensor] = {}
    for build in builds:
        for x in build.captured:
            outer.setdefault(x.value, x)
    for build in builds:
        plain = [p for p in build.params if all(p is not c.value for c in build.captures.values())]
        with build:
            inner = [build.as_operand(x).value for x in outer.values()]
        build.params = [*plain, *inner]
    return list(outer.values())


def scan(f: Any, init: Any, xs: Any, *, reverse: bool = False) -> tuple[Any, Any]:
    """(carry, ys) after `carry, y = f(carry, x)` for each slice x of `xs` along axis 0.

    An axis of length 0 runs on `reference`; onnxruntime's Scan refuses it (InvalidInput).
    """
    carry, scanned = [as_tensor(x) for x in leaves(init)], [as_tensor(x) for x in leaves(xs)]
    n, m = len(carry), len(scanned)
    types = [x.type for x in carry] + [x.type.with_shape(x.shape[1:]) for x in scanned]
    build, made = region("scan", types, lambda ts: f(rebuild(init, ts[:n]), rebuild(xs, ts[n:])))
    if not isinstance(made, tuple) or len(made) != 2:
        raise InvalidInput(f"a scan's body gives a pair (carry, y), got {made!r}")
    after, ys = made
    _check_structure("a scan", init, after)
    results = _inside(build, [*leaves(after), *leaves(ys)])
    body = build.finish(_numbered(results))
    outputs = recorder().apply(
        scan_row,
        (*carry, *scanned, *build.captured),
        {"num_carry": n, "num_scanned": m, "reverse": int(reverse)},
        regions=(body,),
        outputs=len(results),
    )
    return rebuild(init, outputs[:n]), rebuild(ys, outputs[n:])


def _check_structure(loop: str, before: Any, after: Any) -> None:
    if structure(before) != structure(after):
        raise InvalidInput(
            f"{loop} keeps its carry's structure, got {structure(before)} and "
            f"{structure(after)} after"
        )


def while_loop(condition: Any, body: Any, init: Any) -> Any:
    """`x = init; while condition(x): x = body(x)`; the carry keeps its types."""
    carry = [as_tensor(x) for x in leaves(init)]
    go = condition(rebuild(init, carry))

    def trip(ts: Sequence[Tensor]) -> Any:
        after = body(rebuild(init, ts[2:]))
        _check_structure("a loop", init, after)
        return [condition(after), *leaves(after)]

    return _loop(None, as_tensor(go).reshape(()), trip, init, carry)


def fori_loop(count: Any, body: Any, init: Any) -> Any:
    """`x = init; for i in range(count): x = body(i, x)`; count: int or int64 scalar tensor."""
    carry = [as_tensor(x) for x in leaves(init)]

    def trip(ts: Sequence[Tensor]) -> Any:
        after = body(ts[0], rebuild(init, ts[2:]))
        _check_structure("a loop", init, after)
        return [as_tensor(np.array(True)), *leaves(after)]

    trips = as_tensor(count)
    if trips.dtype.kind not in {"int", "uint"}:
        raise TypeMismatch(f"a trip count is a whole number, got {count!r}")
    trips = trips.cast(int64).reshape(())
    return _loop(trips, as_tensor(np.array(True)), trip, init, carry)


def _loop(trips: Tensor | None, go: Tensor, trip: Any, init: Any, carry: list[Tensor]) -> Any:
    """A tensor keeps its type; a sequence's widens until the body gives what it takes."""
    flags, types = [TensorType(int64, ()), TensorType(bool_, ())], [x.type for x in carry]
    while True:
        build, made = region("loop", [*flags, *types], trip)
        body = build.finish(_numbered(_inside(build, made)))
        after = [r.type for r in body.results[1:]]
        wider = [
            t if is_plain(t) else joined(t, _seen_outside(a, _inner_sizes(body))) or t
            for t, a in zip(types, after, strict=False)
        ]
        if wider == types:
            break
        types = wider
    outputs = recorder().apply(
        loop_row,
        (trips, go, *carry, *build.captured),
        {"num_carry": len(carry)},
        regions=(body,),
        outputs=len(carry),
    )
    return rebuild(init, outputs)


def _position() -> str:
    """A suffix no other loop of the enclosing graphs has."""
    return "_".join(str(n) for n in recorder().position())


def _custom_types(call: OpCall) -> Types:
    _check_regions(call, 2)
    operands = _all_types(call)
    outputs = _region_types(call, 0, operands)
    floats = [t for t in outputs if t.dtype.is_float]
    back = _region_types(call, 1, [*operands, *outputs, *floats])
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
    made = inline(regions[0], list(inputs))
    wanted = [i for i, x in enumerate(inputs) if x.dtype.is_float]

    def pullback(gs: Sequence[Tensor | None]) -> list[Tensor | None]:
        given = [
            zeros(y.shape, y.dtype) if g is None else g
            for y, g in zip(made, gs, strict=True)
            if y.dtype.is_float
        ]
        found = inline(regions[1], [*inputs, *made, *given])
        return _scattered(len(inputs), dict(zip(wanted, found, strict=True)))

    return made, pullback


def _custom_batch(call: BatchedCall) -> Sequence[Tensor]:
    """All operands get the axis, so that each slice has a cotangent of its own."""
    return _with_regions(call, call.all(), lambda _: True)


def _with_regions(
    call: BatchedCall, operands: Sequence[Any], batched: Callable[[int], bool]
) -> Sequence[Tensor]:
    """The row with its regions on batches; all their results are batched."""
    regions = []
    for r in call.regions:
        flags = [batched(i) for i in range(len(r.params))]
        build, results, _ = call.vectorized(r, flags, call.size, [True] * len(r.results))
        assert not build.captured
        regions.append(build.finish(_numbered(_inside(build, results))))
    return recorder().apply(
        call.row, operands, call.attrs, regions=tuple(regions), outputs=len(call.types)
    )


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
    results = _inside(forward, leaves(tree))
    floats = [r.type for r in results if r.dtype.is_float]

    def back(xs: list[Tensor]) -> Any:
        y = rebuild(tree, xs[n : n + len(results)])
        gs = xs[n + len(results) :]
        return bprop(*rebuild(operands, xs[:n]), y, gs[0] if len(gs) == 1 else tuple(gs))

    types = [*(x.type for x in flat), *(r.type for r in results), *floats]
    backward, found = region("bprop", types, back)
    if forward.captured or backward.captured:
        raise InvalidInput(
            "a function with its own bprop takes everything it uses as an argument; "
            f"it captures {[*forward.captured, *backward.captured]}"
        )
    regions = (
        forward.finish(_numbered(results)),
        backward.finish(_numbered(_inside(backward, leaves(found)))),
    )
    outputs = recorder().apply(custom_row, flat, {}, regions=regions, outputs=len(results))
    return rebuild(tree, outputs)


def _checkpoint_types(call: OpCall) -> Types:
    _check_regions(call, 1)
    return _region_types(call, 0, _all_types(call))


def _checkpoint_vjp_with_residuals(
    inputs: Sequence[Tensor], attrs: Mapping[str, Any], regions: Sequence[Function],
    outputs: int, vjp_of: VjpOf,
) -> tuple[Sequence[Tensor], Pullback]:  # fmt: skip
    made = recorder().apply(checkpoint_row, inputs, attrs, regions=tuple(regions), outputs=outputs)
    wanted = [i for i, x in enumerate(inputs) if x.dtype.is_float]

    def pullback(gs: Sequence[Tensor | None]) -> list[Tensor | None]:
        given = [i for i, g in enumerate(gs) if g is not None]
        back = vjp_of(regions[0], wanted, given)
        operands = [*inputs, *(gs[i] for i in given)]
        found = recorder().apply(
            cond_row,
            (_always(operands[len(inputs)], _varying(inputs)), *operands),
            {},
            regions=(back, _zeros_like(back)),
            outputs=len(wanted),
        )
        return _scattered(len(inputs), dict(zip(wanted, found, strict=True)))

    return made, pullback


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
    return build.finish(_numbered(results))


checkpoint_row = Op(
    name="Checkpoint",
    kind=OpKind.CONTROL,
    domain=DOMAIN,
    operands=("*",),
    infer=_checkpoint_types,
    reference=lambda *operands, regions: tuple(regions[0](*operands)),
    vjp_with_residuals=_checkpoint_vjp_with_residuals,
    batch=lambda call: _with_regions(call, call.inputs, lambda i: call.batched[i]),
    inline_region=True,
)
"""Its region, of which a backward pass keeps the operands alone and computes the rest again."""


def checkpointed(function: Function, operands: Sequence[Tensor]) -> Sequence[Tensor]:
    """The results of `function` on `operands`, computed again where their gradient needs more."""
    return recorder().apply(
        checkpoint_row, operands, {}, regions=(function,), outputs=len(function.results)
    )
