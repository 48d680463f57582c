"""Scan: a region walks along the first axis of operands with a carry; its gradient walks back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.graph import Function, Node, Value
from triplane.unified_ir.ir.types import TypeMismatch
from triplane.unified_ir.ops.batching import BatchedCall
from triplane.unified_ir.ops.build import Build, region
from triplane.unified_ir.ops.emission import EmissionContext
from triplane.unified_ir.ops.inline import inline
from triplane.unified_ir.ops.lowering import XlaContext
from triplane.unified_ir.ops.recorder import recorder
from triplane.unified_ir.ops.row import DOMAIN, AttrSpec, Op, OpCall, OpKind
from triplane.unified_ir.ops.rows.control import control
from triplane.unified_ir.ops.rows.control.control import Pullback, Types, VjpOf
from triplane.unified_ir.ops.rows.movement.structure import zeros
from triplane.unified_ir.ops.tensor import Tensor, as_tensor, emit
from triplane.unified_ir.ops.trees import leaves, rebuild, structure


def split(items: Sequence[Any], *counts: int) -> list[list[Any]]:
    """Split into consecutive groups of the given sizes, then the rest."""
    groups, start = [], 0
    for n in counts:
        groups.append(list(items[start : start + n]))
        start += n
    return [*groups, list(items[start:])]


def _scan_types(call: OpCall) -> Types:
    control.check_regions(call, 1)
    carry, xs, captures = split(
        control.all_types(call), call.attrs["num_carry"], call.attrs["num_scanned"]
    )
    if not xs or any(not x.rank or x.shape[0] != xs[0].shape[0] for x in xs):
        raise InvalidInput(f"scan needs tensors whose first axes are equally long, got {xs}")
    slices = [x.with_shape(x.shape[1:]) for x in xs]
    results = control.region_types(call, 0, [*carry, *slices, *captures])
    after, ys = results[: len(carry)], results[len(carry) :]
    if list(after) != carry:
        raise TypeMismatch(
            f"the body of a scan must keep the types of its carry {carry}, got {list(after)}"
        )
    return (*after, *(y.with_shape((xs[0].shape[0], *y.shape)) for y in ys))


def _scan_reference(
    *operands: Any, regions: Any, num_carry: int, num_scanned: int, reverse: int
) -> tuple[Any, ...]:
    carry, xs, captures = split(operands, num_carry, num_scanned)
    length = len(xs[0])
    order = range(length)[:: -1 if reverse else 1]
    rows: list[Any] = [None] * length
    for i in order:
        results = regions[0](*carry, *(x[i] for x in xs), *captures)
        carry, rows[i] = results[:num_carry], results[num_carry:]
    stacked = [np.stack(column) for column in zip(*rows, strict=True)]
    return (*carry, *stacked)


def saving_carry(body: Function, num_carry: int, first: int) -> Function:
    """Return `body` with the carry it started from as additional last results."""
    build = Build(recorder().table, body.name)
    with build:
        params = [build.param(p.name, p.type) for p in body.params]
        results = inline(body, params)
        kept = [emit("Identity", p) for p in params[first : first + num_carry]]
    return build.finish(control.numbered([*results, *kept]))


def _scan_vjp_with_residuals(
    inputs: Sequence[Tensor], attrs: Mapping[str, Any], regions: Sequence[Function],
    outputs: int, vjp_of: VjpOf,
) -> tuple[tuple[Tensor, ...], Pullback]:  # fmt: skip
    n, m = attrs["num_carry"], attrs["num_scanned"]
    reverse = attrs.get("reverse", 0)
    body = regions[0]
    ys = recorder().apply(
        scan_row, inputs, attrs, regions=(saving_carry(body, n, 0),), outputs=outputs + n
    )
    saved = ys[outputs:]
    carry, xs, captures = split(inputs, n, m)

    def pullback(gs: Sequence[Tensor | None]) -> list[Tensor | None]:
        walk = BackwardWalk(body, [*carry, *(None for _ in xs), *captures], gs, n, vjp_of)
        x_wanted = [n + i for i, x in enumerate(xs) if x.dtype.is_float]
        g_ys = [gs[n + i] for i in walk.y_given]
        scanned = [*saved, *xs, *g_ys]
        apart = _ProductsApart.of(walk.backward(x_wanted), len(walk.carry), walk.width, scanned)
        start = [x for k, x in enumerate(walk.start()) if k not in apart.products]
        walked = recorder().apply(
            scan_row,
            (*start, *scanned, *captures),
            # Back to front: the step that ran last is pulled back first.
            {"num_carry": len(start), "num_scanned": len(scanned), "reverse": 1 - reverse},
            regions=(apart.step,),
            outputs=len(apart.step.results),
        )
        cotangents = apart.joined(walked, walk.width)
        return walk.result(len(inputs), cotangents, x_wanted)

    return ys[:outputs], pullback


@dataclass(frozen=True)
class _ProductsApart:
    """A step back without those sums among its states that add a product a^T b.

    The factors become further results instead, and one product over all steps, computed after the
    walk, is the sum. A weight's gradient is such a sum, which every step would add to as a whole.

    products: factors by number of the state. walked: for factors that are scanned, all steps of
    them. more: factors that became results, in order.
    """

    step: Function
    products: Mapping[int, tuple[Value, Value]]
    walked: Mapping[Value, Tensor]
    more: tuple[Value, ...]

    @classmethod
    def of(cls, step: Function, first: int, last: int, scanned: Sequence[Tensor]) -> _ProductsApart:
        """States first..last-1 are sums; the parameters after them are slices of `scanned`."""
        producer = step.producers()
        reads = step.reads()
        products = {}
        for k in range(first, last):
            add = producer.get(step.results[k])
            # The gradient of a capture is a sum over steps, state + contribution. If the
            # contribution is a product of two matrices, it is left for one product over all steps.
            if add is None or add.op.name != "Add" or add.inputs[0] is not step.params[k]:
                continue
            factors = _factors(producer, add.inputs[1])
            # The running sum must not be read otherwise, since the walk no longer computes it.
            if factors is not None and reads[step.params[k]] == 1:
                products[k] = factors
        walked = dict(zip(step.params[last:], scanned, strict=False))
        every = dict.fromkeys(v for pair in products.values() for v in pair)
        more = tuple(v for v in every if v not in walked)
        results = [*(r for k, r in enumerate(step.results) if k not in products), *more]
        params = tuple(p for k, p in enumerate(step.params) if k not in products)
        names = tuple(f"y{i}" for i in range(len(results)))
        needed = step.needed_for(results)
        nodes = (node for node in step.nodes if not needed.isdisjoint(node.outputs))
        left = step.with_(params=params, results=results, result_names=names, nodes=nodes)
        return cls(left, products, walked, more)

    def joined(self, results: Sequence[Tensor], width: int) -> list[Tensor]:
        """Return the results of a walk, with the sums in their places among `width` states."""
        count = len(results) - len(self.more)
        tensors = {**self.walked, **dict(zip(self.more, results[count:], strict=True))}
        rest = iter(results[:count])
        states = []
        for k in range(width):
            if k in self.products:
                # sum_t A_t^T B_t = A^T B with the steps stacked: (T, M, K) -> (T M, K).
                flat = (tensors[v].reshape((-1, tensors[v].shape[2])) for v in self.products[k])
                states.append(emit("Gemm", *flat, transA=1))
            else:
                states.append(next(rest))
        return [*states, *rest]


def _factors(producer: Mapping[Value, Node], x: Value | None) -> tuple[Value, Value] | None:
    """Return (a, b) if x is a^T b of two matrices."""
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


class BackwardWalk:
    """The state of a backward walk: cotangents of the carry and sums of those of captures."""

    def __init__(
        self, body: Function, operands: Sequence[Tensor | None],
        gs: Sequence[Tensor | None], num_carry: int, vjp_of: VjpOf, *, lead: int = 0,
    ) -> None:  # fmt: skip
        self.body, self.gs, self.lead, self.vjp_of = body, gs, lead, vjp_of
        self.num_carry, self.num_xs = num_carry, sum(x is None for x in operands)
        self.state = {i: x for i, x in enumerate(operands) if x is not None and x.dtype.is_float}
        self.carry = [i for i in self.state if i < num_carry]
        self.y_given = control.given_positions(gs[num_carry:])
        self.width = len(self.state)

    def start(self) -> list[Tensor]:
        """Return the cotangents of the final carry, then zeros like each capture."""
        starts = []
        for i, x in self.state.items():
            g = self.gs[i] if i < self.num_carry else None
            starts.append(zeros(x.shape, x.dtype) if g is None else g)
        return starts

    def pulled(
        self,
        params: Sequence[Tensor],
        state: Sequence[Tensor],
        g_ys: Sequence[Tensor],
        extra: Sequence[int],
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Make one step back; return the next state and cotangents of the `extra` parameters."""
        wanted = [self.lead + i for i in (*self.state, *extra)]
        first = int(self.lead > 0)  # a loop's body gives `go` before the carry
        cotangents = [first + i for i in self.carry]
        cotangents += [first + self.num_carry + i for i in self.y_given]
        back = self.vjp_of(self.body, wanted, cotangents)
        n = len(self.carry)
        pulled = inline(back, [*params, *state[:n], *g_ys])
        # A capture enters every step, so its cotangent is the sum over the steps. A carry's is
        # replaced.
        sums = [a + b for a, b in zip(state[n:], pulled[n : self.width], strict=True)]
        return [*pulled[:n], *sums], list(pulled[self.width :])

    def backward(self, extra: Sequence[int]) -> Function:
        """Return the region of the backward scan: (state, saved carry, xs, g_ys, captures)."""
        build = Build(recorder().table, f"{self.body.name}.back")

        def params(letter: str, values: Iterable[Value | Tensor]) -> list[Tensor]:
            return [build.param(f"{letter}{k}", v.type) for k, v in enumerate(values)]

        head, results = self.num_carry + self.num_xs, self.body.results[self.num_carry :]
        with build:
            state = params("s", self.state.values())
            inner = params("p", self.body.params[:head])
            g_ys = params("g", [results[i] for i in self.y_given])
            captures = params("c", self.body.params[head:])
            after, slices = self.pulled([*inner, *captures], state, g_ys, extra)
        return build.finish(control.numbered([*after, *slices]))

    def result(
        self, n: int, cotangents: Sequence[Tensor], extra: Sequence[int]
    ) -> list[Tensor | None]:
        """Return the cotangents of the state and of `extra` operands, by operand of `n`."""
        places = (self.lead + i for i in (*self.state, *extra))
        by_place = dict(zip(places, cotangents, strict=True))
        return [by_place.get(i) for i in range(n)]


def _scan_batch(call: BatchedCall) -> Sequence[Tensor]:
    n, m = call.attrs["num_carry"], call.attrs["num_scanned"]
    build, results, leaving, carried = control.settled(call, call.batched, 0, n)
    carry, xs, captures = split(call.inputs, n, m)
    first = control.carry_batched(call, carry, call.batched, carried)
    walked = [
        control.swapped(x) if b else x for x, b in zip(xs, call.batched[n : n + m], strict=True)
    ]
    body = build.finish(control.numbered(results))
    outputs = recorder().apply(
        scan_row,
        (*first, *walked, *captures, *build.captured),
        call.attrs,
        regions=(body,),
        outputs=len(call.types),
    )
    return control.batched_results(call, outputs, leaving, n)


def _emit_scan(context: EmissionContext, node: Node) -> None:
    """Emit a Scan whose captures are outer names."""
    n, m = int(node.attrs["num_carry"]), int(node.attrs["num_scanned"])  # type: ignore[arg-type]
    names = context.inputs(node)
    stacked = len(node.outputs) - n
    attrs: dict[str, Any] = {"num_scan_inputs": m}
    if node.attrs.get("reverse", 0):
        attrs["scan_input_directions"] = [1] * m
        if stacked:
            attrs["scan_output_directions"] = [1] * stacked
    body = context.subgraph(node.regions[0], n + m, names[n + m :])
    context.add("Scan", names[: n + m], context.output_names(node), body=body, **attrs)


def _scan_xla(
    k: XlaContext, *operands: Any, num_carry: int, num_scanned: int, reverse: int
) -> tuple[Any, ...]:
    carry, xs, captures = split(operands, num_carry, num_scanned)
    body = control.XlaRegion(k)

    def step(state: Any, slices: Any) -> Any:
        before, failed = state
        results, failed = body.after(failed, *before, *slices, *captures)
        return (results[:num_carry], failed), results[num_carry:]

    (carry, failed), ys = k.lax.scan(step, (carry, np.int32(0)), xs, reverse=bool(reverse))
    body.hand_out(failed)
    return (*carry, *ys)


scan_row = Op(
    name="Scan",
    computes=(
        "the carry after `carry, y = region(carry, x)` for each slice x along axis 0, and "
        "the stacked ys; from the last slice with `reverse`"
    ),
    kind=OpKind.CONTROL,
    emit=_emit_scan,
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
    xla=_scan_xla,
)


def scan(f: Any, init: Any, xs: Any, *, reverse: bool = False) -> tuple[Any, Any]:
    """Return (carry, ys) after `carry, y = f(carry, x)` for each slice x of `xs` along axis 0.

    An axis of length 0 runs on `reference`; onnxruntime's Scan refuses it (InvalidInput).
    """
    carry, scanned = [as_tensor(x) for x in leaves(init)], [as_tensor(x) for x in leaves(xs)]
    n, m = len(carry), len(scanned)
    types = [x.type for x in carry] + [x.type.with_shape(x.shape[1:]) for x in scanned]
    build, value = region("scan", types, lambda ts: f(rebuild(init, ts[:n]), rebuild(xs, ts[n:])))
    if not isinstance(value, tuple) or len(value) != 2:
        raise InvalidInput(f"the body of a scan must return a pair (carry, y), got {value!r}")
    after, ys = value
    check_structure("a scan", init, after)
    body = build.finish(control.numbered([*leaves(after), *leaves(ys)]))
    outputs = recorder().apply(
        scan_row,
        (*carry, *scanned, *build.captured),
        {"num_carry": n, "num_scanned": m, "reverse": int(reverse)},
        regions=(body,),
        outputs=len(body.results),
    )
    return rebuild(init, outputs[:n]), rebuild(ys, outputs[n:])


def check_structure(loop: str, before: Any, after: Any) -> None:
    """Refuse a carry that has another structure after a trip than before."""
    if structure(before) != structure(after):
        raise InvalidInput(
            f"{loop} must keep the structure of its carry, got {structure(before)} before a trip "
            f"and {structure(after)} after it"
        )
