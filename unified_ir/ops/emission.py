"""The ONNX graph as emission rules see it, and rules that several rows share.

A rule is a column of its row (`Op.emit`, `Op.lower_below`) and turns one IR node into ONNX nodes
where copying it is not enough. It uses values of the IR and the context that it is passed, so `ops`
needs no layer above it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import numpy as np

from triplane.unified_ir.ir.dims import Dim
from triplane.unified_ir.ir.graph import Array, Function, Node, Value

DYNAMIC_LSTM: Final = "com.microsoft.DynamicQuantizeLSTM"
"""onnxruntime's LSTM on int8 weights, which also rounds its input and state while it runs."""


class EmissionTarget(Protocol):
    """What an emitted graph may use."""

    @property
    def opset(self) -> int:
        """The version of ai.onnx."""

    @property
    def operators(self) -> frozenset[str]:
        """Operators beyond ai.onnx, by name with domain."""

    @property
    def device(self) -> str:
        """Whose kernels run it: "cpu" or "cuda"."""


class EmissionContext(Protocol):
    """The ONNX graph being emitted, as a rule sees it."""

    nodes: list[Any]
    names: dict[Value, str]

    @property
    def target(self) -> EmissionTarget:
        """What the graph may use."""

    def plain(self, node: Node, **changes: Any) -> None:
        """Add the ONNX operator of the same name."""

    def plain_broadcast(self, node: Node) -> None:
        """Like `plain`, with one-element operands in the rank that a runtime is fast with."""

    def add(self, op: str, inputs: Sequence[str], outputs: Sequence[str], **attrs: Any) -> None:
        """Add an ONNX node."""

    def emit(self, op: str, *inputs: str, **attrs: Any) -> str:
        """Add a node with one new output and return its name."""

    def constant(self, array: Array) -> str:
        """Add an initializer and return its name."""

    def fresh(self, stem: str = "v") -> str:
        """Return a name that no other value has."""

    def inputs(self, node: Node) -> list[str]:
        """Return the names of the operands, empty where absent."""

    def output_names(self, node: Node) -> list[str]:
        """Return new names for the outputs."""

    def dims(self, dims: Sequence[Dim]) -> str:
        """Add an int64 vector of sizes and return its name."""

    def size(self, symbol: str) -> str:
        """Return the name of an int64[1] with a symbol's size."""

    def region(self, function: Function, names: Sequence[str], label: str) -> Any:
        """Return a region as a subgraph without inputs."""

    def local_function(self, name: str, domain: str, body: Function) -> str:
        """Return the name under which the model has a body as a local function."""

    def subgraph(self, region: Function, own: int, captures: Sequence[str]) -> Any:
        """Return a region as a subgraph; parameters after the first `own` are outer names."""

    def held(self, name: str) -> Array | None:
        """Return the array of that name, if it is one of the model's."""

    def producer(self, name: str, op: str) -> tuple[list[str], dict[str, Any]] | None:
        """Return inputs and attributes of a value's node if that is an `op`, else None."""


Emit = Callable[[EmissionContext, Node], None]


def emit_broadcast(context: EmissionContext, node: Node) -> None:
    """Emit the operator itself, its operands of different ranks aligned."""
    context.plain_broadcast(node)


def first_number(context: EmissionContext, name: str) -> str:
    """Emit the first element of a float tensor as a scalar, 0 for an empty one."""
    # Slicing before summing gives 0 instead of an error if the tensor is empty.
    flat = context.emit("Reshape", name, context.constant(np.array([-1])))
    ends = [context.constant(np.array([n])) for n in (0, 1)]
    first = context.emit("Slice", flat, *ends)
    return context.emit("ReduceSum", first, keepdims=0)
