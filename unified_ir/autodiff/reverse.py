"""Reverse-mode differentiation from function to function; no tape survives the call.

The forward nodes are replayed into a new graph, and the rules of their rows are applied in reverse
order. The rules record operators, so the result is an ordinary function: it can be exported, and
differentiated again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.graph import NO_META, AttrValue, Function, Meta, Node, Value
from triplane.unified_ir.ir.types import is_plain
from triplane.unified_ir.ops.build import Build, body_function
from triplane.unified_ir.ops.inline import Replay
from triplane.unified_ir.ops.recorder import recorder
from triplane.unified_ir.ops.row import Op
from triplane.unified_ir.ops.rows.data.sequences import added
from triplane.unified_ir.ops.rows.movement.structure import zeros
from triplane.unified_ir.ops.tensor import Tensor

Cotangents = Sequence[Tensor | None]
Pullback = Callable[..., Sequence[Tensor | None]]
_Step = tuple[Node, Pullback]


def record_vjp(
    function: Function, args: Sequence[Tensor], wanted: Sequence[int]
) -> tuple[list[Tensor], Pullback]:
    """Record `function`; return its results and their pullback.

    The pullback maps cotangents of the results to cotangents of the parameters whose indices are in
    `wanted`; None for a parameter that no result depends on.
    """
    replay = Replay(function, args)
    # Only nodes that a wanted parameter reaches get a pullback, so rows without a gradient rule are
    # allowed anywhere else.
    active = {function.params[i] for i in wanted if function.params[i].type.carries_gradient}
    steps: list[_Step] = []
    for node in function.nodes:
        if not any(v in active for v in node.inputs if v is not None):
            replay.run(node)
            continue
        outputs, pullback = _record_node(replay, node)
        replay.define(node, outputs)
        active.update(v for v in node.outputs if v.type.carries_gradient)
        steps.append((node, pullback))

    def pull(gs: Cotangents) -> list[Tensor | None]:
        cotangents: dict[Value, Tensor] = {}
        for value, g in zip(function.results, gs, strict=True):
            _accumulate(cotangents, value, g)
        for node, pullback in reversed(steps):
            _pull_node(recorder(), node, pullback, cotangents, active)
        return [cotangents.get(function.params[i]) for i in wanted]

    return replay.results(), pull


def _accumulate(cotangents: dict[Value, Tensor], value: Value, g: Tensor | None) -> None:
    if g is not None:
        cotangents[value] = added(cotangents[value], g) if value in cotangents else g


def _pull_node(
    build: Build,
    node: Node,
    pullback: Pullback,
    cotangents: dict[Value, Tensor],
    active: set[Value],
) -> None:
    # Each value has one producer and all its readers come later, so its cotangent is complete here.
    # It is removed because nothing reads it again, which bounds memory in eager mode.
    gs = [cotangents.pop(v, None) for v in node.outputs]
    if all(g is None for g in gs):
        return
    # Graph pictures and error messages tell backward nodes from forward ones by this scope.
    with build.at(_place_of_gradient(build, node.meta)):
        # A rule may leave out trailing operands, to which no gradient flows.
        for value, g in zip(node.inputs, pullback(gs), strict=False):
            if value is not None and value in active:
                _accumulate(cotangents, value, g)


def _place_of_gradient(build: Build, meta: Meta) -> Meta:
    # Those of a row's body have no place of their own: theirs is that of the node with the row.
    if meta == NO_META and build.meta is not None and build.meta.scope.startswith("grad"):
        return build.meta
    return Meta(meta.location, f"grad.{meta.scope}".rstrip("."))


def _record_node(replay: Replay, node: Node) -> tuple[Sequence[Tensor], Pullback]:
    row = replay.build.table[node.op.domain, node.op.name]
    inputs, attrs = replay.inputs(node), replay.attrs(node)
    regions, n = replay.regions(node), len(node.outputs)
    place = replay.build.meta if node.meta == NO_META else node.meta
    with replay.build.at(place or NO_META):
        # Such a row records its own forward nodes, because its gradient needs values that the plain
        # node does not return, such as those inside a loop.
        if row.vjp_with_residuals is not None and not _passes_held(node):
            return row.vjp_with_residuals(inputs, attrs, regions, n, vjp_of=_vjp_of)
        # A rule of the row itself takes precedence over its body: it is there because it is cheaper
        # or numerically better.
        if row.vjp is None and row.body is not None:
            return _record_body(row, attrs, _cut(replay.build, node, inputs), n)
        outputs = replay.build.apply(
            row, inputs, attrs, regions=regions, outputs=n, strategy=node.strategy
        )
    return outputs, _pullback_of_row(row, node, inputs, outputs)


def _cut(build: Build, node: Node, inputs: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """Return the operands, cut as the strategy of a node says that its body replaces."""
    identity = build.table["", "Identity"]
    splits = node.strategy or ((),) * len(inputs)
    return [
        x if x is None or max(slices, default=1) == 1
        else build.apply(identity, [x], {}, strategy=(slices,))[0]
        for x, slices in zip(inputs, splits, strict=True)
    ]  # fmt: skip


def _passes_held(node: Node) -> bool:
    """Return whether a node passes on floats inside sequences or optionals."""
    values = [v for v in (*node.inputs, *node.outputs) if v is not None]
    return any(v.type.carries_gradient and not is_plain(v.type) for v in values)


def _pullback_of_row(
    row: Op, node: Node, inputs: Sequence[Tensor | None], outputs: Sequence[Tensor]
) -> Pullback:
    attrs = row.full_attrs(node.attrs)

    def pull(gs: Cotangents) -> list[Tensor | None]:
        if row.vjp_with_residuals is not None:
            raise InvalidInput(
                f"{row} passes on a sequence or an optional, which has no gradient here (at "
                f"{node.meta.location}); stack its elements, or use ops.stop_gradient"
            )
        if row.vjp is None:
            raise InvalidInput(
                f"{row} is not differentiable (at {node.meta.location}); wrap its operand in "
                "ops.stop_gradient if no gradient should pass"
            )
        if len(outputs) == 1:
            return list(row.vjp(gs[0], outputs[0], *inputs, **attrs))
        return list(row.vjp(tuple(gs), tuple(outputs), *inputs, **attrs))

    return pull


def _record_body(
    row: Op, attrs: Mapping[str, AttrValue], inputs: Sequence[Tensor | None], n: int
) -> tuple[Sequence[Tensor], Pullback]:
    types = tuple(None if x is None else x.type for x in inputs)
    known = [None if x is None else recorder().known(x) for x in inputs]
    # Bodies may depend on the contents of operands, such as axes; those are part of the cache's
    # key.
    body = body_function(recorder().table, row, types, attrs, n, known)
    # A body is shared by all nodes of the row, so the places of its nodes are those of another.
    body = body.with_(nodes=[replace(node, meta=NO_META) for node in body.nodes])
    present = [i for i, x in enumerate(inputs) if x is not None]
    args = [x for x in inputs if x is not None]
    outputs, inner = record_vjp(body, args, range(len(args)))

    def pull(gs: Cotangents) -> list[Tensor | None]:
        at = dict(zip(present, inner(gs), strict=True))
        return [at.get(i) for i in range(len(inputs))]

    return outputs, pull


def _vjp_of(function: Function, wanted: Sequence[int], present: Sequence[int]) -> Function:
    """Return the pullback as a function of all parameters and the present results' cotangents."""
    build = Build(recorder().table, f"{function.name}.vjp")
    with build:
        params = [build.param(f"p{i}", p.type) for i, p in enumerate(function.params)]
        gs = {i: build.param(f"g{i}", function.results[i].type) for i in present}
        _, pull = record_vjp(function, params, wanted)
        cotangents = pull([gs.get(i) for i in range(len(function.results))])
        results = {
            f"d{i}": zeros(params[i].shape, params[i].dtype) if d is None else d
            for i, d in zip(wanted, cotangents, strict=True)
        }
    return build.finish(results)
