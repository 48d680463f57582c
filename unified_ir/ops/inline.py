"""Replays a function's nodes into the graph being recorded."""

from __future__ import annotations

from collections.abc import Sequence

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.graph import Function, Node, Value
from triplane.unified_ir.ops.recorder import Recorder, recorder
from triplane.unified_ir.ops.tensor import Tensor


def inline(function: Function, args: Sequence[Tensor]) -> list[Tensor]:
    """The results of `function` on tensors of the graph being recorded; types are inferred anew."""
    if len(args) != len(function.params):
        raise InvalidInput(
            f"function {function.name!r} takes {', '.join(function.param_names) or 'nothing'}; "
            f"got {len(args)} arguments"
        )
    build = recorder()
    env: dict[Value, Tensor] = dict(zip(function.params, args, strict=True))
    for node in function.nodes:
        env.update(zip(node.outputs, replay(build, node, env), strict=True))
    return [build.admit(env[r]) for r in function.results]


def replay(build: Recorder, node: Node, env: dict[Value, Tensor]) -> tuple[Tensor, ...]:
    """One node again, on the tensors that stand for its inputs."""
    if node.op.name == "Constant":
        return (build.admit(node.attrs["value"]),)
    if node.op.name == "Dims":
        return (build.dims(node.attrs["dims"]),)  # type: ignore[arg-type]
    inputs = [None if v is None else env[v] for v in node.inputs]
    row = build.table[node.op.domain, node.op.name]
    with build.at(node.meta):
        return build.apply(
            row, inputs, node.attrs, regions=node.regions, outputs=len(node.outputs)
        )
