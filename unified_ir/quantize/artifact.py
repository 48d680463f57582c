"""A frozen function as what a bundle holds: an ONNX graph and its weights beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from triplane.unified_ir.ir.graph import Array
from triplane.unified_ir.onnx import External, Initializer, OnnxTarget, emit, serialize
from triplane.unified_ir.quantize.frozen import Frozen
from triplane.unified_ir.runtime import DEFAULT_OPTIONS, Session, SessionOptions, weight_offsets


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

    def session(self, options: SessionOptions = DEFAULT_OPTIONS) -> Session:
        """The graph on onnxruntime."""
        return Session(self.model, weights=self.weights, options=options)


def artifact(frozen: Frozen, target: OnnxTarget | None = None) -> Artifact:
    """The graph of a function; the same function gives the same bytes."""
    offsets = weight_offsets(frozen.weights) if frozen.weights else {}
    held = {
        name: Initializer(array, External(*offsets[name])) for name, array in frozen.weights.items()
    }
    model = emit(frozen.function, target=target or OnnxTarget(), initializers=held)
    return Artifact(serialize(model), frozen.weights)
