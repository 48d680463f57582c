"""How a row's emission rule sees the ONNX graph that is written; rules that several rows share.

A rule stands in its row (`Op.emit`, `Op.lower_below`) and turns one IR node into ONNX nodes where a
copy would not do. It uses values of the IR and the context it is handed, so `ops` needs no layer
above it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import numpy as np

from triplane.unified_ir.ir.dims import Dim
from triplane.unified_ir.ir.graph import Array, Function, Node, Value

DYNAMIC_LSTM: Final = "com.microsoft.DynamicQuantizeLSTM"
"""onnxruntime's LSTM on int8 weights, which rounds its input and its state while it runs."""


class EmissionTarget(Protocol):
    """What an emitted graph may use."""

    @property
    def opset(self) -> int:
        """The version of ai.onnx."""

    @property
    def operators(self) -> frozenset[str]:
        """Names with their domain of operators beyond ai.onnx."""


class EmissionContext(Protocol):
    """The ONNX graph being emitted, as a rule sees it."""

    nodes: list[Any]
    names: dict[Value, str]

    @property
    def target(self) -> EmissionTarget:
        """What the graph may use."""

    def plain(self, node: Node, **changes: Any) -> None:
        """The ONNX operator of the same name."""

    def plain_broadcast(self, node: Node) -> None:
        """As `plain`, with operands of one element at the rank that a runtime is fast with."""

    def add(self, op: str, inputs: Sequence[str], outputs: Sequence[str], **attrs: Any) -> None:
        """Appends an ONNX node."""

    def emit(self, op: str, *inputs: str, **attrs: Any) -> str:
        """Appends a node with one new output; its name."""

    def constant(self, array: Array) -> str:
        """An initializer."""

    def fresh(self, stem: str = "v") -> str:
        """A name no other value has."""

    def inputs(self, node: Node) -> list[str]:
        """Names of the operands, empty where absent."""

    def output_names(self, node: Node) -> list[str]:
        """New names for the outputs."""

    def dims(self, dims: Sequence[Dim]) -> str:
        """An int64 vector of sizes."""

    def size(self, symbol: str) -> str:
        """An int64[1] holding a symbol's size."""

    def region(self, function: Function, names: Sequence[str], label: str) -> Any:
        """A region as a subgraph without inputs."""

    def local_function(self, name: str, domain: str, body: Function) -> str:
        """The name under which the model holds a body as a local function."""

    def subgraph(self, region: Function, own: int, captures: Sequence[str]) -> Any:
        """A region whose first `own` parameters are its inputs and whose rest are outer names."""

    def held(self, name: str) -> Array | None:
        """The array of that name, where it is one of the model's."""

    def producer(self, name: str, op: str) -> tuple[list[str], dict[str, Any]] | None:
        """Inputs and attributes of the node `op` that gives a value; None where another does."""


Emit = Callable[[EmissionContext, Node], None]


def emit_broadcast(context: EmissionContext, node: Node) -> None:
    """The operator itself, its operands of different ranks aligned."""
    context.plain_broadcast(node)


def first_number(context: EmissionContext, name: str) -> str:
    """The first element of a float tensor as a scalar; 0 where it has none."""
    flat = context.emit("Reshape", name, context.constant(np.array([-1])))
    ends = [context.constant(np.array([n])) for n in (0, 1)]
    first = context.emit("Slice", flat, *ends)
    return context.emit("ReduceSum", first, keepdims=0)
