"""Modules to messages; tables fill in order of first use, so equal modules give equal bytes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, Final, TypeVar

import numpy as np

from triplane.proto import ir_pb2 as pb
from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.arrays import constant_name, raw
from triplane.unified_ir.ir.dims import Dim, Expr
from triplane.unified_ir.ir.graph import (
    Array,
    AttrValue,
    Function,
    Meta,
    ModuleContents,
    Node,
    OpId,
    Value,
)
from triplane.unified_ir.ir.types import DType, OptionalType, SequenceType, TensorType, type_of

FORMAT_VERSION: Final = 4
"""2 added sequences, optionals, strings and narrow types; 3 negative sizes; 4 strategies."""
VALUES_VERSION: Final = 2
"""The first version with sequences, optionals, strings and the element types of `NEWER`."""
NEGATIVE_VERSION: Final = 3
"""The first version whose table of sizes holds negative numbers, which only attributes use."""
STRATEGY_VERSION: Final = 4
"""The first version in which nodes have strategies."""
FIRST_VERSION: Final = 1
"""Written if the module contains nothing newer, so that older programs can read it."""
NEWER: Final = frozenset({8, 18, 20, 23, 24, 25, 26})
"""Numbers of the element types that version 2 added."""
MAX_INLINE_BYTES: Final = 1024
"""Larger constants are stored in the weights, mapped in place and only once."""

_K = TypeVar("_K", bound=Hashable)


class Encoder:
    """Fills one message and its tables, and collects the constants that belong in the weights."""

    def __init__(self, max_inline_bytes: int = MAX_INLINE_BYTES) -> None:
        self.message = pb.Module(format_version=FIRST_VERSION)
        self.constants: dict[str, Array] = {}
        self._max_inline_bytes = max_inline_bytes
        self._strings: dict[str, int] = {}
        self._dims: dict[Dim, int] = {}
        self._ops: dict[OpId, int] = {}
        self._types: dict[TensorType, int] = {}
        self._places: dict[Meta, int] = {}

    def module(self, contents: ModuleContents) -> None:
        """Fill the message."""
        for key, function in contents.functions.items():
            named = self.message.functions.add(name=self.string(key))
            self.function(function, named.function)
        order = {key: i for i, key in enumerate(contents.functions)}
        for entry, key in contents.entries.items():
            self.message.entries.add(name=self.string(entry), function=order[key])
        for name, tensor in contents.state.items():
            role = pb.Role.Value(f"ROLE_{tensor.role.name}")
            self.message.state.add(name=self.string(name), type=self.type(tensor.type), role=role)
        # Entries and state keep the order of the module; properties have none of their own.
        for key, text in sorted(contents.meta.items()):
            self.message.meta.add(key=key, value=text)

    def function(self, function: Function, out: pb.Function) -> None:
        """Fill `out` with a function, its values numbered in order."""
        out.name = self.string(function.name)
        numbers = {param: i for i, param in enumerate(function.params)}
        out.param_names.extend(self.string(p.name) for p in function.params)
        out.param_types.extend(self.type(p.type) for p in function.params)
        for node in function.nodes:
            self.node(node, out.nodes.add(), numbers, function.name)
            for value in node.outputs:
                numbers[value] = len(numbers)
        out.result_names.extend(self.string(n) for n in function.result_names)
        out.results.extend(_number(numbers, r, function.name) for r in function.results)

    def node(self, node: Node, out: pb.Node, numbers: Mapping[Value, int], function: str) -> None:
        """Fill `out` with a node."""
        out.op = self.op(node.op)
        # 0 stands for an absent optional operand, so value i is written as i + 1.
        out.inputs.extend(
            0 if v is None else 1 + _number(numbers, v, function) for v in node.inputs
        )
        out.outputs.extend(self.type(v.type) for v in node.outputs)
        # Sorted, so that equal nodes give equal bytes however their attributes were passed.
        for name in sorted(node.attrs):
            self.attribute(node, name, out.attributes.add(name=self.string(name)))
        for region in node.regions:
            self.function(region, out.regions.add())
        if node.meta.location is not None or node.meta.scope:
            out.place = 1 + self.place(node.meta)
        if node.strategy:
            self._needs(STRATEGY_VERSION)
            out.strategy.extend(pb.Slices(axes=slices) for slices in node.strategy)

    def attribute(self, node: Node, name: str, out: pb.Attribute) -> None:
        """Fill `out` with one attribute."""
        value = node.attrs[name]
        kind = _kind(value)
        if kind is None:
            raise InvalidInput(
                f"attribute {name!r} of {node.op} is a {type(value).__name__}; files hold int, "
                "float, str, tuples of one of them, tensors, sizes and element types"
            )
        _WRITE[kind](self, out, value)

    def tensor(self, array: Array, out: pb.Attribute) -> None:
        """Write a tensor: inline if it is small, else into the weights."""
        type_ = self.type(type_of(array))
        # Strings stay inline at any size: the weights are a safetensors file, which has no strings.
        if array.nbytes <= self._max_inline_bytes or array.dtype.kind == "O":
            out.tensor.type = type_
            out.tensor.data = raw(array)
            return
        name = constant_name(array)
        # The name has 64 bits of the digest, so the bytes are compared too.
        held = self.constants.setdefault(name, array)
        if held is not array and raw(held) != raw(array):
            raise InvalidInput(f"two constants share the digest of {name!r}; change one of them")
        out.tensor_ref.type = type_
        out.tensor_ref.name = self.string(name)

    def dtype(self, dtype: DType, out: pb.Attribute) -> None:
        """Write an element type as an attribute."""
        if dtype.onnx in NEWER:
            self._needs(VALUES_VERSION)
        out.dtype = dtype.onnx  # type: ignore[assignment]

    def value_type(self, type_: TensorType, out: pb.Attribute) -> None:
        """Write a type as an attribute."""
        self._needs(VALUES_VERSION)
        out.type = self.type(type_)

    def string(self, text: str) -> int:
        """Return the index of a text."""
        return _index(self._strings, text, self.message.strings.append)

    def dim(self, dim: Dim) -> int:
        """Return a size as `TensorType.shape` and `Attribute.dims` write it.

        Negative numbers would read as symbols, so they are text in the table.
        """
        if isinstance(dim, int) and dim >= 0:
            return dim
        if isinstance(dim, int):
            self._needs(NEGATIVE_VERSION)
        # Sizes share one signed field: n >= 0 is the number n, and -1 - i is entry i of the table.
        return -1 - _index(self._dims, dim, lambda d: self.message.dims.append(str(d)))

    def op(self, op: OpId) -> int:
        """Return the index of an operator."""

        def add(op: OpId) -> None:
            domain, name = self.string(op.domain), self.string(op.name)
            self.message.ops.add(domain=domain, name=name, since=op.since)

        return _index(self._ops, op, add)

    def type(self, type_: TensorType) -> int:
        """Return the index of a type."""

        # A type that holds another adds that one to the table first, so the decoder needs one pass
        # and no type can contain itself.
        def add(type_: TensorType) -> None:
            message = pb.TensorType(**self._form(type_))
            if message.form or message.dtype in NEWER:
                self._needs(VALUES_VERSION)
            self.message.types.append(message)

        return _index(self._types, type_, add)

    def _form(self, type_: TensorType) -> dict[str, Any]:
        """Return the fields of a type; the type that it holds comes into the table first."""
        if isinstance(type_, OptionalType):
            return {"form": pb.FORM_OPTIONAL, "element": 1 + self.type(type_.element)}
        if isinstance(type_, SequenceType):
            form = pb.FORM_EMPTY if type_.empty else pb.FORM_SEQUENCE
            if isinstance(type_.element, DType):
                return {"form": form, "dtype": type_.element.onnx}
            return {"form": form, "element": 1 + self.type(type_.element)}
        if any(isinstance(d, int) and d < 0 for d in type_.shape):
            raise InvalidInput(f"a size of a type is at least 0, got {type_}")
        return {"dtype": type_.dtype.onnx, "shape": [self.dim(d) for d in type_.shape]}

    def _needs(self, version: int) -> None:
        """Raise the format version of the file to at least `version`."""
        self.message.format_version = max(self.message.format_version, version)

    def place(self, meta: Meta) -> int:
        """Return the index of a place."""

        def add(meta: Meta) -> None:
            file, line = (meta.location.file, meta.location.line) if meta.location else ("", 0)
            scope = self.string(meta.scope)
            self.message.places.add(file=self.string(file), line=line, scope=scope)

        return _index(self._places, meta, add)


def _index(table: dict[_K, int], key: _K, add: Callable[[_K], object]) -> int:
    index = table.get(key)
    if index is None:
        add(key)
        index = table[key] = len(table)
    return index


def _number(numbers: Mapping[Value, int], value: Value, function: str) -> int:
    if value not in numbers:
        raise InvalidInput(
            f"function {function!r} uses a value of type {value.type} before it is computed, or "
            "one of another function; a function is closed and in order"
        )
    return numbers[value]


def _kind(value: AttrValue) -> str | None:
    if isinstance(value, np.ndarray):
        return "tensor"
    if isinstance(value, tuple):
        # all() of nothing is true, so an empty tuple is written as ints; ints come before sizes.
        return next((k for t, k in _TUPLES if all(isinstance(v, t) for v in value)), None)
    # By exact type: a bool is an instance of int but is not an attribute.
    return _SCALARS.get(type(value))


_SCALARS: Final[Mapping[type, str]] = {
    int: "int", float: "float", str: "string", DType: "dtype",
    TensorType: "type", SequenceType: "type", OptionalType: "type",
}  # fmt: skip
_TUPLES: Final[tuple[tuple[Any, str], ...]] = (
    (int, "ints"),
    (float, "floats"),
    (str, "strings"),
    (int | Expr, "dims"),
)
_WRITE: Final[Mapping[str, Callable[[Encoder, pb.Attribute, Any], object]]] = {
    "int": lambda _, out, v: setattr(out, "int", v),
    "float": lambda _, out, v: setattr(out, "float", v),
    "string": lambda e, out, v: setattr(out, "string", e.string(v)),
    "ints": lambda _, out, v: out.ints.CopyFrom(pb.Ints(values=v)),
    "floats": lambda _, out, v: out.floats.CopyFrom(pb.Floats(values=v)),
    "strings": lambda e, out, v: out.strings.CopyFrom(pb.Strings(values=[e.string(s) for s in v])),
    "tensor": lambda e, out, v: e.tensor(v, out),
    "dims": lambda e, out, v: out.dims.values.extend(e.dim(d) for d in v),
    "dtype": lambda e, out, v: e.dtype(v, out),
    "type": lambda e, out, v: e.value_type(v, out),
}
