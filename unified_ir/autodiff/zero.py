"""Explain why a gradient is zero by construction: the nodes between parameter and result.

A gradient passes a node if the node's rule gives a cotangent for an operand that depends on the
parameter. Otherwise the node stops it: a comparison, a cast to integers, an `argmax`,
`stop_gradient`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from triplane.unified_ir.autodiff.reverse import record_vjp
from triplane.unified_ir.ir.graph import Function, Node, Value
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.rows.movement.structure import ones
from triplane.unified_ir.ops.table import TABLE, row_of

MAX_NAMED = 3
"""The most nodes that an explanation names."""


@dataclass(frozen=True, slots=True)
class ZeroGradient:
    """A parameter whose gradient is zero whatever the values are; `stops` explain it."""

    parameter: str
    result: str
    reached: bool
    """Whether the result depends on the parameter at all."""
    stops: tuple[Node, ...]
    """The nodes that pass no gradient on, in order; empty if the parameter is not read."""

    def __str__(self) -> str:
        head = f"the gradient of {self.result!r} for {self.parameter!r} is zero by construction"
        if not self.reached:
            return f"{head}: nothing that {self.result!r} is computed from reads it"
        shown = [_place(n) for n in self.stops[:MAX_NAMED]]
        more = len(self.stops) - len(shown)
        shown += [f"{more} more"] if more else []
        return f"{head}: none passes {', '.join(shown)}"


def zero_gradient(function: Function, name: str, of: str | None = None) -> ZeroGradient | None:
    """Explain why the gradient of the result `of` (the first) for parameter `name` is always zero.

    None if it is not. Only the structure counts, so a gradient that is zero for some values is not
    reported.
    """
    target = function.result_names[0] if of is None else of
    result, param = function.result(target), function.param(name)
    needed = function.needed_for([result])
    depends, live = {param}, {param} if param.type.dtype.is_float else set()
    known = {v: n for n in function.nodes if not n.inputs for v in n.outputs}
    stops = []
    for node in function.nodes:
        # A node on no path from the parameter to the result explains nothing.
        if needed.isdisjoint(node.outputs) or depends.isdisjoint(node.inputs):
            continue
        depends.update(node.outputs)
        alive = [i for i, v in enumerate(node.inputs) if v in live]
        if not alive:
            continue
        passed = [v for v in node.outputs if v.type.dtype.is_float and v in needed]
        if passed and _passes(function, node, alive, known):
            live.update(passed)
        else:
            stops.append(node)
    if result in live:
        return None
    return ZeroGradient(name, target, result in depends, tuple(stops))


def _passes(
    function: Function, node: Node, alive: Sequence[int], known: Mapping[Value, Node]
) -> bool:
    """Return whether the node's rule gives a cotangent for one of these operands.

    `known`: nodes without operands (constants, sizes) by their outputs; rules read such contents.
    """
    if not row_of(node).differentiable:
        return False
    operands = list(dict.fromkeys(v for v in node.inputs if v is not None))
    params = {v: Value(v.type, f"p{i}") for i, v in enumerate(operands) if v not in known}
    inputs = tuple(None if v is None else params.get(v, v) for v in node.inputs)
    names = tuple(f"y{i}" for i in range(len(node.outputs)))
    constants = dict.fromkeys(known[v] for v in operands if v in known)
    nodes = (*constants, replace(node, inputs=inputs))
    single = function.with_(
        params=params.values(), results=node.outputs, result_names=names, nodes=nodes
    )
    wanted = sorted({list(params).index(v) for i in alive if (v := node.inputs[i]) is not None})
    build = Build(TABLE, "passes")
    with build:
        args = [build.param(p.name, p.type) for p in params.values()]
        outputs, pull = record_vjp(single, args, wanted)
        gs = [ones(y.shape, y.dtype) if y.dtype.is_float else None for y in outputs]
        return any(g is not None for g in pull(gs))


def _place(node: Node) -> str:
    where = f" (at {node.meta.location})" if node.meta.location else ""
    scope = f" in {node.meta.scope}" if node.meta.scope else ""
    kind = f" to {node.outputs[0].type.dtype}" if node.op.name == "Cast" else ""
    return f"{node.op}{kind}{where}{scope}"
