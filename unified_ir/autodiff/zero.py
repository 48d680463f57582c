"""Why a gradient is zero by construction: what stands between a parameter and a result.

A gradient passes a node where the node's own rule gives a cotangent for an operand that depends on
the parameter. Where it passes none, the node stops it: a comparison, a cast to whole numbers, an
`argmax`, `stop_gradient`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from triplane.unified_ir.autodiff.reverse import record_vjp
from triplane.unified_ir.ir.graph import Function, Node, Value
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.rows.movement.structure import ones
from triplane.unified_ir.ops.table import TABLE

MAX_NAMED = 3
"""Nodes that an explanation names."""


@dataclass(frozen=True, slots=True)
class ZeroGradient:
    """A parameter whose gradient is zero whatever the values are; `stops` are why."""

    parameter: str
    result: str
    reached: bool
    """Whether the result depends on the parameter at all."""
    stops: tuple[Node, ...]
    """The nodes that pass no gradient on, in order; empty where the parameter is not read."""

    def __str__(self) -> str:
        head = f"the gradient of {self.result!r} for {self.parameter!r} is zero by construction"
        if not self.reached:
            return f"{head}: nothing that {self.result!r} is made of reads it"
        shown = [_place(n) for n in self.stops[:MAX_NAMED]]
        more = len(self.stops) - len(shown)
        shown += [f"{more} more"] if more else []
        return f"{head}: none passes {', '.join(shown)}"


def zero_gradient(function: Function, name: str, of: str | None = None) -> ZeroGradient | None:
    """What makes the gradient of the result `of` (the first) for parameter `name` zero, or None.

    Only the structure is looked at: a gradient that some values make zero is none of these.
    """
    target = function.result_names[0] if of is None else of
    result, param = function.result(target), function.param(name)
    needed = _behind(function, result)
    depends, live = {param}, {param} if param.type.dtype.is_float else set()
    known = {v: n for n in function.nodes if not n.inputs for v in n.outputs}
    stops = []
    for node in function.nodes:
        if not any(v in needed for v in node.outputs) or not _reads(node, depends):
            continue
        depends.update(node.outputs)
        alive = [i for i, v in enumerate(node.inputs) if v in live]
        if not alive:
            continue
        passed = [v for v in node.outputs if v.type.dtype.is_float and v in needed]
        if passed and _passes(node, alive, known):
            live.update(passed)
        else:
            stops.append(node)
    if result in live:
        return None
    return ZeroGradient(name, target, result in depends, tuple(stops))


def _reads(node: Node, values: set[Value]) -> bool:
    return any(v in values for v in node.inputs if v is not None)


def _behind(function: Function, result: Value) -> set[Value]:
    """Values that the result is made of."""
    needed = {result}
    for node in reversed(function.nodes):
        if any(v in needed for v in node.outputs):
            needed.update(v for v in node.inputs if v is not None)
    return needed


def _passes(node: Node, alive: Sequence[int], known: Mapping[Value, Node]) -> bool:
    """Whether the node's rule gives a cotangent for one of these operands.

    `known`: nodes without operands (constants, sizes) by what they make; rules read such contents.
    """
    if not TABLE[node.op.domain, node.op.name].differentiable:
        return False
    operands = list(dict.fromkeys(v for v in node.inputs if v is not None))
    params = {v: Value(v.type, f"p{i}") for i, v in enumerate(operands) if v not in known}
    inputs = tuple(None if v is None else params.get(v, v) for v in node.inputs)
    again = replace(node, inputs=inputs)
    single = Function(
        "one",
        tuple(params.values()),
        node.outputs,
        tuple(f"y{i}" for i in range(len(node.outputs))),
        (*dict.fromkeys(known[v] for v in operands if v in known), again),
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
