"""What an initializer is for, by where it is read: parameter, buffer, or plain constant.

A parameter is what training changes: the weight of a product, convolution, norm, recurrent layer or
embedding, and what is added to or multiplied with the values behind one (biases, scales, position
tables, class tokens). Other arrays of floats are buffers: frequencies and tables of a rotary
position, masks, the mean and deviation that an input is normalized by, initial states. Numbers that
an operator needs when a graph is built (sizes, scales, bounds) stay constants. Where the graph does
not tell, as for a table of sines that is added, `trainable=` and `frozen=` of `import_onnx` do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import numpy as np
from onnx import NodeProto

from triplane.unified_ir.ir.graph import Array, Role
from triplane.unified_ir.ir.types import type_of
from triplane.unified_ir.onnx.fold import MAX_CONTENTS
from triplane.unified_ir.onnx.source import subgraphs_of

# fmt: off
PRODUCTS: Final[Mapping[str, tuple[int, ...]]] = {
    "Gemm": (0, 1, 2), "MatMul": (0, 1), "Einsum": (0, 1),
}
"""Products: a float operand is a weight, unless only sines and cosines read the result."""

LAYERS: Final[Mapping[str, tuple[int, ...]]] = {
    "Conv": (1, 2), "ConvTranspose": (1, 2), "DeformConv": (1, 3), "PRelu": (1,),
    "LSTM": (1, 2, 3, 7), "GRU": (1, 2, 3), "RNN": (1, 2, 3),
    "BatchNormalization": (1, 2), "InstanceNormalization": (1, 2), "LayerNormalization": (1, 2),
    "GroupNormalization": (1, 2), "RMSNormalization": (1,),
}
"""Operands that are weights wherever they stand."""

ELEMENTWISE: Final = frozenset({"Add", "Sub", "Mul", "Div"})
"""Operators whose float operand is a weight behind a layer, see `Uses._joins`."""

STATISTICS: Final[Mapping[str, tuple[int, ...]]] = {"BatchNormalization": (3, 4)}
"""Operands that are buffers: assigned in training, not reached by gradients."""

STATES: Final[Mapping[str, tuple[int, ...]]] = {"LSTM": (5, 6), "GRU": (5,), "RNN": (5,)}
"""Operands that a sequence begins with: buffers."""

CONTENTS: Final[Mapping[str, tuple[int, ...]]] = {
    "Clip": (1, 2), "Dropout": (1,), "OneHot": (2,), "Pad": (2,), "Resize": (1, 2),
    "Upsample": (1,), "QuantizeLinear": (1, 2), "DequantizeLinear": (1, 2),
    "NonMaxSuppression": (2, 3, 4),
    "QLinearConv": (1, 2, 4, 5, 6, 7), "QLinearMatMul": (1, 2, 4, 5, 6, 7), "Range": (0, 1, 2),
    "Constant": (), "TfIdfVectorizer": (), "STFT": (2,), "MelWeightMatrix": (2, 3, 4),
}
"""Operands that are settings of the operator: floats there are constants."""

THROUGH: Final = frozenset({
    "Identity", "Unsqueeze", "Squeeze", "Reshape", "Transpose", "Expand", "Flatten", "Cast",
    "Slice", "Split", "Tile", "Resize", "Pad",
})
"""Operators that only arrange their first operand: what is read behind them is read of it."""
_PLAIN: Final = THROUGH | ELEMENTWISE | {"Clip", "Pad", "Resize", "Concat", "Gather"}
"""Operators that an input passes on its way to the first layer."""
_SIZES: Final = frozenset({"Shape", "Size"})
_COMPARED: Final = frozenset({"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"})
"""Operators through which no gradient flows."""
_RANDOM: Final = frozenset({
    "Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform",
    "RandomUniformLike",
})
_STANDARD: Final = frozenset({"", "ai.onnx"})
# fmt: on

MAX_STEPS: Final = 4_096
"""Names that a use is looked for behind."""
MAX_LEARNT: Final = 1e4
"""Larger numbers in something that is added are a mask, which hides values."""


class Uses:
    """Readers of each name of a graph and of the graphs inside it.

    constants: names of initializers. inputs: names that a caller gives.
    """

    def __init__(
        self,
        nodes: Iterable[NodeProto],
        constants: Iterable[str] = (),
        inputs: Iterable[str] = (),
    ) -> None:
        self.readers: dict[str, list[tuple[NodeProto, int]]] = {}
        self.makers: dict[str, NodeProto] = {}
        self.fixed = set(constants)
        """Names that depend on no input."""
        self.bare = set(inputs) - self.fixed
        """Inputs, and what only arranges or scales them: no layer has read them yet."""
        self.has_layers = False
        self._note(nodes)

    def _note(self, nodes: Iterable[NodeProto]) -> None:
        for node in nodes:
            for i, name in enumerate(node.input):
                if name:
                    self.readers.setdefault(name, []).append((node, i))
            self.makers |= dict.fromkeys(node.output, node)
            self._classify(node)
            for inner in subgraphs_of(node):
                self.fixed |= {t.name for t in inner.initializer}
                self._note(inner.node)

    def _classify(self, node: NodeProto) -> None:
        given = [name for name in node.input if name]
        self.has_layers |= node.op_type in LAYERS or (
            node.op_type in PRODUCTS and any(name in self.fixed for name in given)
        )
        if next(subgraphs_of(node), None) is not None or node.op_type in _RANDOM:
            return
        if all(name in self.fixed for name in given):
            self.fixed |= {*node.output}
        elif node.op_type in _PLAIN and all(n in self.fixed or n in self.bare for n in given):
            self.bare |= {*node.output}

    def of(self, name: str) -> Iterator[tuple[NodeProto, int]]:
        """(node, operand) that read a name; arrangements and constant expressions passed."""
        waiting, seen = [name], {name}
        while waiting and len(seen) < MAX_STEPS:
            for node, i in self.readers.get(waiting.pop(), ()):
                if node.op_type in _SIZES:
                    continue
                is_arranged = node.op_type in THROUGH and i == 0
                if is_arranged or all(n in self.fixed for n in node.output):
                    waiting += [n for n in node.output if n not in seen]
                    seen |= {*node.output}
                else:
                    yield node, i

    def role(self, name: str, array: Array) -> Role | None:
        """The role of an initializer; None: a constant."""
        if array.dtype.kind == "O":
            return None
        if not type_of(array).dtype.is_float:
            return Role.BUFFER if array.size > MAX_CONTENTS else None
        read = list(self.of(name))
        if array.ndim == 0 or (read and all(_at(CONTENTS, *r) for r in read)):
            return None
        learnt = any(self._learns(node, i, array) for node, i in read)
        return Role.PARAMETER if learnt else Role.BUFFER

    def weighs(self, name: str, array: Array) -> bool:
        """Whether a Constant is read as a weight: of a layer, or as the bias behind one."""
        return any(
            _at(STATISTICS, node, i) or (self._learns(node, i, array) and self._is_layer(node, i))
            for node, i in self.of(name)
        )

    def _is_layer(self, node: NodeProto, i: int) -> bool:
        strong = _at(LAYERS, node, i) or _at(PRODUCTS, node, i) or node.op_type == "Gather"
        return strong or (node.op_type == "Add" and self._is_behind_layer(node.input[1 - i]))

    def _learns(self, node: NodeProto, i: int, array: Array) -> bool:
        """Whether training changes what this operand of the node reads."""
        if node.domain not in _STANDARD or _at(LAYERS, node, i):
            return True  # a function's, or an operator's that is not ONNX's: nothing is known
        if any(_at(table, node, i) for table in (STATISTICS, STATES, CONTENTS)):
            return False
        if _at(PRODUCTS, node, i):
            return not self._gives_angles(node)
        if node.op_type == "Gather" and i == 0:
            return not (_holds_angles(array) and self._ends(node) == {"Mul"})
        if node.op_type == "Concat":
            return bool(array.ndim > 1)
        if node.op_type in ELEMENTWISE:
            return self._joins(node, i, array)
        return node.op_type not in _COMPARED and array.size > 1 and _is_moderate(array)

    def _joins(self, node: NodeProto, i: int, array: Array) -> bool:
        """Whether an operand of a sum or an elementwise product is a weight.

        It is not where it hides values (a mask), normalizes an input, is a table of sines and
        cosines, or has one element that no bias of a layer is.
        """
        other = node.input[1 - i]
        if not array.size or not _is_moderate(array):
            return False
        if array.size == 1:
            return node.op_type == "Add" and self._is_behind_layer(other)
        if not self.has_layers:
            return True
        axes = sum(d > 1 for d in array.shape)
        if other in self.bare and axes <= 1:
            return False
        is_table = axes > 1 and node.op_type in {"Mul", "Div"} and _holds_angles(array)
        return not is_table and not self._gives_angles(node)

    def _is_behind_layer(self, name: str) -> bool:
        """Whether a value is a layer's, arrangements passed."""
        for _ in range(MAX_STEPS):
            node = self.makers.get(name)
            if node is None or not node.input:
                return False
            if node.op_type in LAYERS or node.op_type in PRODUCTS:
                return True
            if node.op_type not in THROUGH:
                return False
            name = node.input[0]
        return False

    def _gives_angles(self, node: NodeProto) -> bool:
        """Whether sines and cosines read what the node gives, and nothing else does."""
        return self._ends(node) == {"Sin", "Cos"}

    def _ends(self, node: NodeProto) -> set[str]:
        """Operators that read what a node gives, arrangements and constant factors passed."""
        waiting, seen, ends = [*node.output], {*node.output}, set()
        while waiting and len(seen) < MAX_STEPS:
            for reader, i in self.readers.get(waiting.pop(), ()):
                others = [n for k, n in enumerate(reader.input) if k != i]
                is_scaled = reader.op_type in {"Mul", "Div"} and all(
                    n in self.fixed for n in others
                )
                if reader.op_type in THROUGH or reader.op_type == "Concat" or is_scaled:
                    waiting += [n for n in reader.output if n not in seen]
                    seen |= {*reader.output}
                else:
                    ends.add(reader.op_type)
        return ends


def _at(table: Mapping[str, tuple[int, ...]], node: NodeProto, i: int) -> bool:
    return i in table.get(node.op_type, ())


def _is_moderate(array: Array) -> bool:
    """Whether all elements are numbers that training may give."""
    return bool(np.min(array) >= -MAX_LEARNT and np.max(array) <= MAX_LEARNT)


def _holds_angles(array: Array) -> bool:
    """Whether it can be a table of sines or cosines by position: in -1..1, from angle 0 on.

    The angles of position 0 are 0, so its row holds nothing but zeros and ones; the others do not.
    """
    table = array.reshape([d for d in array.shape if d > 1])
    if table.ndim < 2 or np.min(table) < -1 or np.max(table) > 1:
        return False
    whole = [bool(np.isin(row, (0, 1)).all()) for row in table]
    return whole[0] and not any(whole[1:])
