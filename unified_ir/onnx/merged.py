"""Initializers that an exporter merged because they were equal before any training.

PyTorch's exporter writes equal weights once: in an untrained network, one vector of zeros is the
running mean of every batch normalization of that width, and often also their bias. The others read
it through Identity, which keeps the original name of the tensor. To be trained, each layer needs
its own. Other vectors than zeros or ones are left alone: equal trained numbers are one weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Final

from onnx import GraphProto, NodeProto, TensorProto

from triplane.unified_ir.ir.types import BY_ONNX
from triplane.unified_ir.onnx.source import array_of, unused
from triplane.unified_ir.ops.rows.arithmetic.norm import is_untrained

MAX_CHANNELS: Final = 2**16
"""Longer vectors stay shared."""
MAX_COPIED_BYTES: Final = 2**26
"""The most bytes of all copies; vectors beyond it stay shared."""
STATISTICS: Final = {3: "running_mean", 4: "running_var"}
"""Operands of batch normalization that training updates, and the names of their copies."""

_STANDARD: Final = frozenset({"", "ai.onnx"})

Layer = tuple[str, ...]
"""Names of scale, bias, mean and variance; a layer that is applied twice reads the same ones."""


def separated(graph: GraphProto, folder: Path | None) -> tuple[list[NodeProto], list[TensorProto]]:
    """Return the nodes and their initializers, with a copy for each layer where that is known.

    A vector of zeros or ones gets a copy under the name of each Identity that reads it, and one for
    the statistics of each batch normalization that shares it with another layer or operand. Batch
    normalizations whose four operands are the same may be one layer applied twice; they stay so.
    """
    nodes, held = list(graph.node), list(graph.initializer)
    vectors = _Vectors(held, folder, {i.name for i in graph.input})
    nodes = [node for node in nodes if not _is_copied(node, vectors)]
    taken = {n for node in graph.node for n in node.output} | {t.name for t in held}
    taken |= {i.name for i in graph.input}
    layers = {i: tuple(n.input[1:5]) for i, n in enumerate(nodes) if _has_statistics(n)}
    # Who reads a name: None for a reader that is no running statistic, else (operand, layer). A
    # layer that is applied twice counts once.
    readers: dict[str, set[object]] = {}
    for i, node in enumerate(nodes):
        for k, name in enumerate(node.input):
            is_statistic = i in layers and k in STATISTICS
            readers.setdefault(name, set()).add((k, layers[i]) if is_statistic else None)
    own: dict[tuple[str, int, Layer], str] = {}
    for i, layer in layers.items():
        for k, suffix in STATISTICS.items():
            name = layer[k - 1]
            if len(readers[name]) < 2 or not vectors.is_shareable(name):
                continue
            if (name, k, layer) not in own:
                statistic = name
                # One statistic may keep the original tensor, if nothing but statistics reads it.
                if None in readers[name] or name in own.values():
                    statistic = unused(f"{layer[0].removesuffix('.weight')}.{suffix}", taken)
                    taken.add(statistic)
                    if not vectors.copy(name, statistic):
                        continue
                own[name, k, layer] = statistic
            nodes[i] = deepcopy(nodes[i])
            nodes[i].input[k] = own[name, k, layer]
    return nodes, [*held, *vectors.copies.values()]


class _Vectors:
    """Initializers by name, and copies of those that are untrained vectors."""

    def __init__(self, held: Sequence[TensorProto], folder: Path | None, inputs: set[str]) -> None:
        self.inputs = inputs
        self.held: Mapping[str, TensorProto] = {t.name: t for t in held}
        self.folder = folder
        self.copies: dict[str, TensorProto] = {}
        self.bytes = 0
        self._known: dict[str, bool] = {}

    def is_shareable(self, name: str) -> bool:
        """Return whether a name is a float vector of zeros or of ones."""
        if name not in self._known:
            tensor = self.copies.get(name) or self.held.get(name)
            self._known[name] = tensor is not None and self._is_untrained(tensor)
        return self._known[name]

    def _is_untrained(self, tensor: TensorProto) -> bool:
        if len(tensor.dims) != 1 or not 0 < tensor.dims[0] <= MAX_CHANNELS:
            return False
        dtype = BY_ONNX.get(tensor.data_type)
        is_float = dtype is not None and dtype.is_float
        return is_float and is_untrained(array_of(tensor, self.folder))

    def copy(self, name: str, new: str) -> bool:
        """Add a copy under a new name; return False if the name is taken or the limit reached."""
        if new in self.held or new in self.copies or new in self.inputs:
            return False
        tensor = self.copies.get(name) or self.held[name]
        # An upper bound: elements have at most 8 bytes.
        size = tensor.dims[0] * 8
        if self.bytes + size > MAX_COPIED_BYTES:
            return False
        self.bytes += size
        self.copies[new] = deepcopy(tensor)
        self.copies[new].name = new
        return True


def _is_copied(node: NodeProto, vectors: _Vectors) -> bool:
    """Copy the vector that an Identity reads; return whether the node is no longer needed."""
    return (
        node.op_type == "Identity"
        and node.domain in _STANDARD
        and len(node.input) == len(node.output) == 1
        and bool(node.output[0])
        and vectors.is_shareable(node.input[0])
        and vectors.copy(node.input[0], node.output[0])
    )


def _has_statistics(node: NodeProto) -> bool:
    """Return whether a node is batch normalization with running statistics."""
    is_one = node.op_type == "BatchNormalization" and node.domain in _STANDARD
    return is_one and len(node.input) == 5 and not any(node.output[1:])
