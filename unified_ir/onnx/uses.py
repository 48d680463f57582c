"""The purpose of an initializer, judged by its readers: parameter, buffer, or plain constant.

Training changes parameters: the weight of a product, convolution, norm, recurrent layer or
embedding, and operands that are added to or multiplied with a layer's output (biases, scales,
position tables, class tokens). Other arrays of floats are buffers: frequencies and tables of a
rotary position, masks, the mean and deviation that normalize an input, initial states. Numbers that
an operator needs when a graph is built (sizes, scales, bounds) stay constants. If the graph leaves
it open, as for a table of sines that is added, `trainable=` and `frozen=` of `import_onnx` decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from itertools import islice
from typing import Final, TypeVar

import numpy as np
from onnx import FunctionProto, NodeProto

from triplane.unified_ir.ir.graph import Array, Role
from triplane.unified_ir.ir.types import type_of
from triplane.unified_ir.onnx.fold import MAX_CONTENTS
from triplane.unified_ir.onnx.functions import FunctionKey, key_of
from triplane.unified_ir.onnx.lift import REPLACED
from triplane.unified_ir.onnx.source import subgraphs_of
from triplane.unified_ir.ops.row import OpKind
from triplane.unified_ir.ops.table import TABLE

Read = tuple[NodeProto, int]
"""A node, and the index of one of its operands."""
T = TypeVar("T")

Operands = Mapping[str, tuple[int, ...]]
"""Indices of operands by the name of an operator of ai.onnx."""

_ROWS: Final = {row.name: row for row in TABLE.values() if not row.domain} | {
    old: TABLE["", new] for old, new in REPLACED.items()
}
PRODUCTS: Final[Operands] = {
    name: row.weights
    for name, row in _ROWS.items()
    if row.kind is OpKind.CONTRACTION and 0 in row.weights
}
"""Products: a float operand is a weight, unless only sines and cosines read the result."""

LAYERS: Final[Operands] = {
    name: row.weights for name, row in _ROWS.items() if row.weights and 0 not in row.weights
}
"""Operands that are weights wherever they stand."""

ELEMENTWISE: Final = frozenset(
    name for name, row in _ROWS.items() if row.kind is OpKind.ELEMENTWISE and 0 in row.weights
)
"""Operators whose float operand is a weight after a layer, see `Uses._joins`."""

STATISTICS: Final[Operands] = {
    name: row.buffers for name, row in _ROWS.items() if row.kind is OpKind.NORMALIZATION
}
"""Operands that are buffers: assigned in training, not reached by gradients."""

_FIXED: Final[Operands] = {name: (*row.buffers, *row.settings) for name, row in _ROWS.items()}
"""Operands that training does not change: initial states of sequences, settings."""

_SETTINGS: Final[Operands] = {name: row.settings for name, row in _ROWS.items()}

_MOVEMENT: Final = frozenset(name for name, row in _ROWS.items() if row.kind is OpKind.MOVEMENT)
THROUGH: Final = _MOVEMENT - {"Concat"}
"""Operators that only rearrange their first operand: readers of the result read that operand."""
_PLAIN: Final = _MOVEMENT | ELEMENTWISE | {"Clip", "Gather"}
"""Operators between an input and the first layer."""
_SIZES: Final = frozenset({"Shape", "Size"})
_COMPARED: Final = frozenset(name for name, row in _ROWS.items() if row.kind is OpKind.COMPARISON)
"""Operators through which no gradient flows."""
_RANDOM: Final = frozenset(name for name, row in _ROWS.items() if row.kind is OpKind.RANDOM)
_STANDARD: Final = frozenset({"", "ai.onnx"})

MAX_READS: Final = 64
"""The most readers that decide the role of an array."""
MAX_ENDS: Final = 3
"""The most kinds of readers that are distinguished; the rules ask for at most two."""
MAX_LEARNT: Final = 1e4
"""An operand of a sum with larger numbers is a mask, which hides values."""


class Uses:
    """Readers of each name of a graph and of the graphs inside it.

    constants: names of initializers. inputs: names that a caller supplies. functions: those of the
    model, whose bodies show which of their operands are running statistics.
    """

    def __init__(
        self,
        nodes: Iterable[NodeProto],
        constants: Iterable[str] = (),
        inputs: Iterable[str] = (),
        functions: Functions | None = None,
    ) -> None:
        self.functions = Functions({}) if functions is None else functions
        self.readers: dict[str, list[tuple[NodeProto, int]]] = {}
        self.makers: dict[str, NodeProto] = {}
        self.fixed = set(constants)
        """Names that depend on no input."""
        self.bare = set(inputs) - self.fixed
        """Inputs, and values that only rearrange or scale them, before any layer."""
        self.has_layers = False
        self._reads: dict[str, tuple[Read, ...]] = {}
        self._endings: dict[str, frozenset[str]] = {}
        self._behind: dict[str, bool] = {}
        self._statistics: dict[str, bool] = {}
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
        names = [name for name in node.input if name]
        self.has_layers |= node.op_type in LAYERS or (
            node.op_type in PRODUCTS and any(name in self.fixed for name in names)
        )
        if next(subgraphs_of(node), None) is not None or node.op_type in _RANDOM:
            return
        if all(name in self.fixed for name in names):
            # What depends on constants alone is constant too, for example a transposed weight.
            self.fixed |= {*node.output}
        elif node.op_type in _PLAIN and all(n in self.fixed or n in self.bare for n in names):
            self.bare |= {*node.output}

    def of(self, name: str) -> tuple[Read, ...]:
        """Return the readers of a name, also through rearrangements and constant expressions.

        At most the first `MAX_READS`.
        """
        return _gathered(name, self._reads, self._look_at_reads, _joined_reads)

    def _look_at_reads(self, name: str) -> tuple[tuple[Read, ...], list[str]]:
        own: list[Read] = []
        further: list[str] = []
        for node, i in self.readers.get(name, ()):
            if node.op_type in _SIZES:
                continue
            is_arranged = node.op_type in THROUGH and i == 0
            if is_arranged or all(n in self.fixed for n in node.output):
                further += node.output
            elif len(own) < MAX_READS:
                own.append((node, i))
        return tuple(own), further

    def role(self, name: str, array: Array) -> Role | None:
        """Return the role of an initializer; None if it is a constant."""
        if array.dtype.kind == "O":
            return None
        if not type_of(array).dtype.is_float:
            return Role.BUFFER if array.size > MAX_CONTENTS else None
        read = self.of(name)
        if array.ndim == 0 or (read and all(_at(_SETTINGS, *r) for r in read)):
            return None
        held = _Held(array)
        learnt = any(self._learns(node, i, held) for node, i in read)
        return Role.PARAMETER if learnt else Role.BUFFER

    def is_statistic(self, name: str) -> bool:
        """Return whether batch normalization reads a name as a running mean or variance."""
        if name not in self._statistics:
            self._statistics[name] = any(self._reads_statistic(*read) for read in self.of(name))
        return self._statistics[name]

    def _reads_statistic(self, node: NodeProto, i: int) -> bool:
        function = self.functions.of(node)
        if function is not None:
            inner = self.functions.uses(function)
            return i < len(function.input) and inner.is_statistic(function.input[i])
        return node.domain in _STANDARD and _at(STATISTICS, node, i)

    def weighs(self, name: str, array: Array) -> bool:
        """Return whether a Constant is read as a weight: of a layer, or as the bias after one."""
        held = _Held(array)
        return any(
            self._reads_statistic(node, i)
            or (self._learns(node, i, held) and self._is_layer(node, i))
            for node, i in self.of(name)
        )

    def _is_layer(self, node: NodeProto, i: int) -> bool:
        strong = _at(LAYERS, node, i) or _at(PRODUCTS, node, i) or node.op_type == "Gather"
        return strong or (node.op_type == "Add" and self._is_behind_layer(node.input[1 - i]))

    def _learns(self, node: NodeProto, i: int, held: _Held) -> bool:
        """Return whether training changes this operand of the node."""
        if self._reads_statistic(node, i):
            return False
        if node.domain not in _STANDARD or _at(LAYERS, node, i):
            return True  # a function's, or an operator's that is not ONNX's: nothing is known
        if _at(_FIXED, node, i):
            return False
        if _at(PRODUCTS, node, i):
            return not self._gives_angles(node)
        if node.op_type == "Gather" and i == 0:
            # Rows of cosines that are only multiplied: a rotary position, not an embedding.
            return not (held.has_angles and self._ends(node) == {"Mul"})
        if node.op_type == "Concat":
            # A class token or a table of positions has several axes; vectors are not learnt.
            return bool(held.array.ndim > 1)
        if node.op_type in ELEMENTWISE:
            return self._joins(node, i, held)
        return node.op_type not in _COMPARED and held.array.size > 1 and held.is_moderate

    def _joins(self, node: NodeProto, i: int, held: _Held) -> bool:
        """Return whether an operand of a sum or an elementwise product is a weight.

        It is not if it hides values (a mask), normalizes an input, is a table of sines and cosines,
        or has one element and is not the bias of a layer.
        """
        other = node.input[1 - i]
        if not held.array.size or not held.is_moderate:
            return False
        if held.array.size == 1:
            return node.op_type == "Add" and self._is_behind_layer(other)
        if not self.has_layers:
            return True
        axes = sum(d > 1 for d in held.array.shape)
        # (x - mean) / deviation of an input, by channel at most.
        if other in self.bare and axes <= 1:
            return False
        is_table = axes > 1 and node.op_type in {"Mul", "Div"} and held.has_angles
        return not is_table and not self._gives_angles(node)

    def _is_behind_layer(self, name: str) -> bool:
        """Return whether a value is a layer's output, possibly rearranged."""
        passed: dict[str, None] = {}
        while name not in self._behind and name not in passed:
            passed[name] = None
            node = self.makers.get(name)
            if node is None or not node.input:
                break
            if node.op_type in LAYERS or node.op_type in PRODUCTS:
                self._behind[name] = True
            elif node.op_type in THROUGH:
                name = node.input[0]
            else:
                break
        is_behind = self._behind.get(name, False)
        # All names on the way get the answer, so a chain of n nodes is walked once, not n times.
        self._behind |= dict.fromkeys(passed, is_behind)
        return is_behind

    def _gives_angles(self, node: NodeProto) -> bool:
        """Return whether sines and cosines, and nothing else, read the node's outputs."""
        return self._ends(node) == {"Sin", "Cos"}

    def _ends(self, node: NodeProto) -> frozenset[str]:
        """Return the operators that read a node's outputs, rearranged or scaled by constants.

        At most `MAX_ENDS` of them.
        """
        look, known = self._look_at_ends, self._endings
        ends = [_gathered(n, known, look, _joined_ends) for n in node.output]
        return _joined_ends(frozenset(), ends)

    def _look_at_ends(self, name: str) -> tuple[frozenset[str], list[str]]:
        ends: set[str] = set()
        further: list[str] = []
        for reader, i in self.readers.get(name, ()):
            scales = reader.op_type in {"Mul", "Div"} and len(reader.input) == 2
            is_scaled = scales and reader.input[1 - i] in self.fixed
            if reader.op_type in _MOVEMENT or is_scaled:
                further += reader.output
            else:
                ends.add(reader.op_type)
        return frozenset(ends), further


class Functions:
    """The local functions of a model, and the uses in their bodies."""

    def __init__(self, functions: Mapping[FunctionKey, FunctionProto]) -> None:
        self._functions = functions
        self._uses: dict[FunctionKey, Uses] = {}

    def of(self, node: NodeProto) -> FunctionProto | None:
        """Return the function that a node calls; None if it is an operator."""
        return self._functions.get(key_of(node.domain, node.op_type, node.overload))

    def uses(self, function: FunctionProto) -> Uses:
        """Return the uses of the names in a function's body."""
        key = key_of(function.domain, function.name, function.overload)
        if key not in self._uses:
            self._uses[key] = Uses(function.node, functions=self)
        return self._uses[key]


class _Held:
    """An array, and properties that need a pass over all of it, computed once."""

    def __init__(self, array: Array) -> None:
        self.array = array

    @cached_property
    def is_moderate(self) -> bool:
        """Whether all elements are numbers that training may produce."""
        return bool(np.min(self.array) >= -MAX_LEARNT and np.max(self.array) <= MAX_LEARNT)

    @cached_property
    def has_angles(self) -> bool:
        """Whether it can be a table of sines or cosines by position: in -1..1, from angle 0 on.

        The angles of position 0 are 0, so only its row consists of zeros and ones.
        """
        table = self.array.reshape([d for d in self.array.shape if d > 1])
        if table.ndim < 2 or np.min(table) < -1 or np.max(table) > 1:
            return False
        whole = [bool(np.isin(row, (0, 1)).all()) for row in table]
        return whole[0] and not any(whole[1:])


def _gathered(
    name: str,
    known: dict[str, T],
    look: Callable[[str], tuple[T, list[str]]],
    joined: Callable[[T, list[T]], T],
) -> T:
    """Join what `look` returns for a name with the same for all the names that it leads to.

    `known` caches the result of each name. A cycle, which only a broken model has, is cut where it
    closes.
    """
    waiting, seen = [name], {}
    # A stack instead of recursion, for graphs of any depth: a name stays on it until the names that
    # it leads to are known.
    while waiting:
        top = waiting[-1]
        if top in known:
            waiting.pop()
        elif top not in seen:
            seen[top] = look(top)
            waiting += [n for n in seen[top][1] if n not in known and n not in seen]
        else:
            own, further = seen[top]
            known[top] = joined(own, [known[n] for n in dict.fromkeys(further) if n in known])
            waiting.pop()
    return known[name]


def _joined_reads(own: tuple[Read, ...], more: list[tuple[Read, ...]]) -> tuple[Read, ...]:
    parts = [part for part in (own, *more) if part]
    if len(parts) < 2:
        return parts[0] if parts else ()
    each = {(id(node), i): (node, i) for part in parts for node, i in part}
    return tuple(islice(each.values(), MAX_READS))


def _joined_ends(own: frozenset[str], more: list[frozenset[str]]) -> frozenset[str]:
    return frozenset(sorted(own.union(*more))[:MAX_ENDS])


def _at(table: Operands, node: NodeProto, i: int) -> bool:
    return i in table.get(node.op_type, ())
