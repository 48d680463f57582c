"""A frozen function in the form of a bundle: an ONNX graph and its weights beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from onnx import ModelProto, load_from_string

from triplane.unified_ir.ir.graph import Array
from triplane.unified_ir.onnx import EmittedInitializer, External, OnnxTarget, emit, serialize
from triplane.unified_ir.passes.frozen import Frozen
from triplane.unified_ir.runtime import DEFAULT_OPTIONS, Session, SessionOptions, weight_offsets

WATCHING: Final = SessionOptions(disabled_optimizers=("FastGeluFusion",))
"""For graphs that also return inner values: this fusion of onnxruntime 1.31 removes 0.5 x although
another node reads it, and the graph is then refused."""


@dataclass(frozen=True, slots=True, eq=False)
class Artifact:
    """model: ONNX bytes whose initializers named in `weights` are external."""

    model: bytes
    weights: Mapping[str, Array]

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights alone."""
        return sum(array.nbytes for array in self.weights.values())

    @property
    def size_bytes(self) -> int:
        """Bytes of graph and weights."""
        return len(self.model) + self.weight_bytes

    @property
    def operators(self) -> tuple[str, ...]:
        """The graph's operators that ai.onnx does not define, as domain.name."""
        model = load_from_string(self.model)
        called = {(n.domain, n.op_type) for n in model.graph.node if n.domain}
        called -= {(f.domain, f.name) for f in model.functions}
        return tuple(sorted(f"{domain}.{name}" for domain, name in called))

    def session(self, options: SessionOptions = DEFAULT_OPTIONS) -> Session:
        """Return the graph on onnxruntime."""
        return Session(self.model, weights=self.weights, options=options)


def artifact(frozen: Frozen, target: OnnxTarget | None = None) -> Artifact:
    """Emit a function and the weights that it reads; equal functions give equal bytes."""
    target = target or OnnxTarget()
    model = _emitted(frozen, frozen.weights, target)
    read = {tensor.name for tensor in model.graph.initializer}
    weights = {name: array for name, array in frozen.weights.items() if name in read}
    if len(weights) < len(frozen.weights):
        model = _emitted(frozen, weights, target)  # offsets follow the weights that remain
    return Artifact(serialize(model), weights)


def _emitted(frozen: Frozen, weights: Mapping[str, Array], target: OnnxTarget) -> ModelProto:
    """Emit the graph with `weights` beside it; it reads no other arrays of the function."""
    offsets = weight_offsets(weights) if weights else {}
    initializers = {
        name: EmittedInitializer(array, External(*offsets[name]) if name in offsets else None)
        for name, array in frozen.weights.items()
    }
    return emit(frozen.function, target=target, initializers=initializers)
