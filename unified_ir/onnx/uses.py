"""What an initializer is for, by where it is read: weight, running statistics, or plain constant.

A weight becomes state that can be trained, whether it is an initializer, a Constant or a filled
tensor; numbers that an operator needs when a graph is built (sizes, scales, bounds) stay constants.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from onnx import NodeProto

from triplane.unified_ir.ir.graph import Array, Role
from triplane.unified_ir.ir.types import type_of
from triplane.unified_ir.onnx.fold import MAX_CONTENTS
from triplane.unified_ir.onnx.source import subgraphs_of

# fmt: off
WEIGHTS: Final[Mapping[str, tuple[int, ...]]] = {
    "Conv": (1, 2), "ConvTranspose": (1, 2), "DeformConv": (1, 3), "Gemm": (0, 1, 2),
    "MatMul": (0, 1), "Gather": (0,), "PRelu": (1,), "Add": (0, 1), "Mul": (0, 1), "Sub": (0, 1),
    "Div": (0, 1), "Einsum": (0, 1), "LSTM": (1, 2, 3, 7), "GRU": (1, 2, 3), "RNN": (1, 2, 3),
    "BatchNormalization": (1, 2), "InstanceNormalization": (1, 2), "LayerNormalization": (1, 2),
    "GroupNormalization": (1, 2), "RMSNormalization": (1,),
}
"""Operands at which a constant tensor of floats is a weight."""

STATISTICS: Final[Mapping[str, tuple[int, ...]]] = {"BatchNormalization": (3, 4)}
"""Operands that are buffers: assigned in training, not reached by gradients."""

CONTENTS: Final[Mapping[str, tuple[int, ...]]] = {
    "Clip": (1, 2), "Dropout": (1,), "OneHot": (2,), "Pad": (2,), "Resize": (1, 2),
    "Upsample": (1,), "QuantizeLinear": (1, 2), "DequantizeLinear": (1, 2),
    "NonMaxSuppression": (2, 3, 4),
    "QLinearConv": (1, 2, 4, 5, 6, 7), "QLinearMatMul": (1, 2, 4, 5, 6, 7), "Range": (0, 1, 2),
    "Constant": (), "TfIdfVectorizer": (), "STFT": (2,), "MelWeightMatrix": (2, 3, 4),
}
"""Operands that are settings of the operator: floats there are constants."""

THROUGH: Final = frozenset({"Identity", "Unsqueeze", "Squeeze", "Reshape", "Transpose", "Expand"})
"""Operators that only arrange their first operand: what is read behind them is read of it."""
# fmt: on

MAX_STEPS: Final = 8
"""Arrangements in a row that a use is looked for behind."""


class Uses:
    """Readers of each name of a graph and of the graphs inside it."""

    def __init__(self, nodes: Iterable[NodeProto]) -> None:
        self.readers: dict[str, list[tuple[str, int, str]]] = {}
        self._note(nodes)

    def _note(self, nodes: Iterable[NodeProto]) -> None:
        for node in nodes:
            first = node.output[0] if node.output else ""
            for i, name in enumerate(node.input):
                if name:
                    self.readers.setdefault(name, []).append((node.op_type, i, first))
            for inner in subgraphs_of(node):
                self._note(inner.node)

    def of(self, name: str, steps: int = MAX_STEPS) -> set[tuple[str, int]]:
        """(operator, operand) that read a name, arrangements passed through."""
        found = set()
        for op, i, output in self.readers.get(name, ()):
            if op in THROUGH and i == 0 and steps:
                found |= self.of(output, steps - 1)
            else:
                found.add((op, i))
        return found

    def role(self, name: str, array: Array) -> Role | None:
        """The role of an initializer; None: a constant."""
        if array.dtype.kind == "O":
            return None
        if not type_of(array).dtype.is_float:
            return Role.BUFFER if array.size > MAX_CONTENTS else None
        read = self.of(name)
        if array.ndim == 0 or (read and all(_at(CONTENTS, r) for r in read)):
            return None
        if read and all(_at(STATISTICS, r) for r in read):
            return Role.BUFFER
        return Role.PARAMETER

    def weighs(self, name: str) -> bool:
        """Whether a constant under this name is read as a weight somewhere."""
        return any(_at(WEIGHTS, r) or _at(STATISTICS, r) for r in self.of(name))


def _at(table: Mapping[str, tuple[int, ...]], read: tuple[str, int]) -> bool:
    return read[1] in table.get(read[0], ())
