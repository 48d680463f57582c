"""Functions as ONNX files with multi-device annotations, for export."""

from __future__ import annotations

from collections.abc import Mapping

from onnx import ModelProto

from triplane.unified_ir.ir.graph import Function, Node
from triplane.unified_ir.onnx.emit import PRODUCER, EmittedInitializer, Emitter, emit
from triplane.unified_ir.onnx.multi_device import ShardedNode, annotate, sharded_node
from triplane.unified_ir.onnx.target import DEFAULT, OnnxTarget
from triplane.unified_ir.passes.clean import clean


def emit_annotated(
    function: Function,
    *,
    target: OnnxTarget = DEFAULT,
    initializers: Mapping[str, EmittedInitializer] | None = None,
) -> ModelProto:
    """Like `emit`, for files that leave this machine: strategies become multi-device annotations.

    Nodes are not fused then, since a node that is replaced has no strategy. Opsets below the
    default one are for runtimes that may not read a format with annotations, so they have none.
    """
    if target.opset < DEFAULT.opset or not any(n.strategy for n in function.walk()):
        return emit(function, target=target, initializers=initializers)
    emitter = _Annotated(target, clean(function), initializers or {})
    model = emitter.model(producer_name=PRODUCER)
    annotate(model, emitter.sharded)
    return model


class _Annotated(Emitter):
    """Remembers the nodes of the top-level graph that have a strategy, as they are emitted."""

    def __init__(
        self, target: OnnxTarget, function: Function, held: Mapping[str, EmittedInitializer]
    ) -> None:
        super().__init__(target, function, held)
        self.sharded: list[ShardedNode] = []

    def node(self, node: Node) -> None:
        """See `Emitter.node`."""
        first = len(self.nodes)
        super().node(node)
        emitted = self.nodes[first:]
        item = sharded_node(node, self.inputs(node), emitted, self.contents)
        self.sharded += [] if item is None else [item]
