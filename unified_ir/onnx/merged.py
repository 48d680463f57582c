"""Initializers that an exporter merged because they were equal before any training.

PyTorch's exporter writes equal weights once: in an untrained network one vector of zeros is the
running mean of every batch normalization of that width, and often their bias, too. The others read
it through Identity, which keeps the name that the tensor had. Trained further, each layer needs its
own. What is not all zeros or ones is left alone: equal numbers that training gave are one weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from onnx import GraphProto, NodeProto, TensorProto

from triplane.unified_ir.ir.types import BY_ONNX
from triplane.unified_ir.onnx.source import array_of
from triplane.unified_ir.ops.rows.arithmetic.norm import is_untrained

MAX_CHANNELS: Final = 2**16
"""Longer vectors are left shared."""
MAX_COPIED_BYTES: Final = 2**26
"""Copies of all vectors together; what would exceed it stays shared."""
STATISTICS: Final = {3: "running_mean", 4: "running_var"}
"""Operands of batch normalization that training moves, and the names of their copies."""

_STANDARD: Final = frozenset({"", "ai.onnx"})

Layer = tuple[str, ...]
"""Names of scale, bias, mean and variance: a layer that is applied twice reads the same."""


def separated(graph: GraphProto, folder: Path | None) -> tuple[list[NodeProto], list[TensorProto]]:
    """The nodes, and the initializers they read, with a copy for each layer where that is known.

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
                is_free = None not in readers[name] and name not in own.values()
                statistic = (
                    name
                    if is_free
                    else _unused(f"{layer[0].removesuffix('.weight')}.{suffix}", taken)
                )
                if not is_free and not vectors.copy(name, statistic):
                    continue
                own[name, k, layer] = statistic
            nodes[i] = _reading(nodes[i], k, own[name, k, layer])
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
        """Whether a name is a float vector of zeros or of ones."""
        if name not in self._known:
            tensor = self.copies.get(name) or self.held.get(name)
            self._known[name] = tensor is not None and self._is_untrained(tensor)
        return self._known[name]

    def _is_untrained(self, tensor: TensorProto) -> bool:
        if len(tensor.dims) != 1 or not 0 < tensor.dims[0] <= MAX_CHANNELS:
            return False
        dtype = BY_ONNX.get(tensor.data_type)
        if dtype is None or not dtype.is_float:
            return False
        return is_untrained(array_of(tensor, self.folder))

    def copy(self, name: str, new: str) -> bool:
        """Adds a copy under a new name; False where the name or the bytes are taken."""
        if new in self.held or new in self.copies or new in self.inputs:
            return False
        tensor = self.copies.get(name) or self.held[name]
        size = tensor.dims[0] * 8
        if self.bytes + size > MAX_COPIED_BYTES:
            return False
        self.bytes += size
        copied = TensorProto()
        copied.CopyFrom(tensor)
        copied.name = new
        self.copies[new] = copied
        return True


def _is_copied(node: NodeProto, vectors: _Vectors) -> bool:
    """Whether an Identity gives what is now an initializer of its own."""
    return (
        node.op_type == "Identity"
        and node.domain in _STANDARD
        and len(node.input) == len(node.output) == 1
        and bool(node.output[0])
        and vectors.is_shareable(node.input[0])
        and vectors.copy(node.input[0], node.output[0])
    )


def _has_statistics(node: NodeProto) -> bool:
    """Whether a node is batch normalization by running statistics."""
    is_one = node.op_type == "BatchNormalization" and node.domain in _STANDARD
    return is_one and len(node.input) == 5 and not any(node.output[1:])


def _unused(name: str, taken: set[str]) -> str:
    free, k = name, 1
    while free in taken:
        k += 1
        free = f"{name}.{k}"
    taken.add(free)
    return free


def _reading(node: NodeProto, k: int, name: str) -> NodeProto:
    """The node, another name being its operand `k`."""
    reader = NodeProto()
    reader.CopyFrom(node)
    reader.input[k] = name
    return reader
