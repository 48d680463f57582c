"""Declared types of an ONNX graph as IR types; a `dim_param` stays a symbol."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from onnx import TensorShapeProto, TypeProto, ValueInfoProto

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.dims import (
    MAX_DIM,
    Dim,
    Expr,
    as_dim,
    is_symbol,
    parse,
    symbol,
    symbols,
)
from triplane.unified_ir.ir.types import MAX_RANK, OWN, OptionalType, SequenceType, TensorType
from triplane.unified_ir.onnx.source import dtype_of, unused

MAX_SYMBOL_CHARS: Final = 64
Shapes = Mapping[str, Sequence["int | str | Expr"]]


class Symbols:
    """Names of sizes in one model: a bare `dim_param` keeps its name, an unnamed size gets one."""

    def __init__(self, inputs: Sequence[ValueInfoProto]) -> None:
        self.bare = {
            d.dim_param
            for info in inputs
            for d in info.type.tensor_type.shape.dim
            if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", d.dim_param)
        }
        self.named: dict[str, Dim] = {}
        self.taken: set[str] = set(self.bare)

    def fresh(self, stem: str) -> Expr:
        """Return a symbol that no other size has, named after `stem`."""
        # 12 characters are left for the number that makes a name unique.
        base = re.sub(r"[^A-Za-z0-9_]+", "_", stem)[: MAX_SYMBOL_CHARS - 12].strip("_") or "size"
        base = base if base[0].isalpha() or base[0] == "_" else f"n{base}"
        name = unused(base, self.taken, "_")
        self.taken.add(name)
        return symbol(name)

    def dim(self, proto: TensorShapeProto.Dimension, stem: str) -> Dim:
        """Return a declared size; a negative or absent one is unknown and gets its own name."""
        if proto.HasField("dim_value") and 0 <= proto.dim_value <= MAX_DIM:
            return int(proto.dim_value)
        if not proto.dim_param:
            return self.fresh(stem)
        if proto.dim_param not in self.named:
            self.named[proto.dim_param] = self._param(proto.dim_param)
        return self.named[proto.dim_param]

    def _param(self, text: str) -> Dim:
        """Return a bare name, or an expression over bare names, unchanged; rename other text."""
        try:
            dim = parse(text)
        except InvalidInput:
            return self.fresh(text)
        # An expression over names that no input has bare could never be evaluated.
        return dim if is_symbol(dim) or symbols(dim) <= self.bare else self.fresh(text)


def declared_type(info: ValueInfoProto, names: Symbols, shapes: Shapes) -> TensorType:
    """Return the type of a graph input; `shapes` overrides the file."""
    return tensor_type(info.type, f"input {info.name[:80]!r}", info.name, names, shapes)


def tensor_type(
    proto: TypeProto, what: str, name: str, names: Symbols, shapes: Shapes
) -> TensorType:
    """Return a declared type; refuse maps, and tensors of unknown rank."""
    kind = proto.WhichOneof("value")
    if kind == "sequence_type":
        return _sequence(proto.sequence_type.elem_type, what)
    if kind == "optional_type":
        inner = proto.optional_type.elem_type
        return OptionalType(tensor_type(inner, what, name, names, shapes))
    if kind != "tensor_type":
        raise InvalidInput(
            f"{what} is of kind {kind or 'unknown'}; tensors, sequences and optionals are supported"
        )
    tensor = proto.tensor_type
    dtype = dtype_of(tensor.elem_type, what)
    if name in shapes:
        shape = tuple(as_dim(d) for d in shapes[name])
        if tensor.HasField("shape") and len(tensor.shape.dim) != len(shape):
            raise InvalidInput(
                f"{what} has {len(tensor.shape.dim)} axes in the model, shapes= gives {shape}"
            )
        return TensorType(dtype, shape)
    if not tensor.HasField("shape"):
        raise InvalidInput(
            f"{what} is declared without a shape; pass shapes={{{name!r}: ('N', ...)}}"
        )
    if len(tensor.shape.dim) > MAX_RANK:
        raise InvalidInput(f"{what} has {len(tensor.shape.dim)} axes, the limit is {MAX_RANK}")
    dims = (names.dim(d, f"{name}_{i}") for i, d in enumerate(tensor.shape.dim))
    return TensorType(dtype, tuple(dims))


def _sequence(element: TypeProto, what: str) -> SequenceType:
    """Return a sequence of tensors; a size that is not a number may differ between elements."""
    if element.WhichOneof("value") != "tensor_type":
        raise InvalidInput(f"{what} is a sequence, but not of tensors")
    tensor = element.tensor_type
    dtype = dtype_of(tensor.elem_type, what)
    if not tensor.HasField("shape"):
        return SequenceType(dtype)
    dims = (int(d.dim_value) if d.dim_value > 0 else OWN for d in tensor.shape.dim)
    return SequenceType(TensorType(dtype, tuple(dims)))
