"""A node in its context, and nodes whose values are known at import: constants, shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from onnx import AttributeProto, GraphProto, NodeProto, SparseTensorProto

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.graph import Array
from triplane.unified_ir.ir.types import int64
from triplane.unified_ir.onnx.fold import MAX_FOLDED, symbolic
from triplane.unified_ir.onnx.source import array_of
from triplane.unified_ir.ops.build import Build
from triplane.unified_ir.ops.tensor import Tensor, emit

if TYPE_CHECKING:
    from triplane.unified_ir.onnx.importer import Frame, Importer


@dataclass(frozen=True, slots=True)
class Site:
    """A node with its operands and its context."""

    importer: Importer
    node: NodeProto
    inputs: Sequence[Tensor | None]
    frame: Frame

    @property
    def build(self) -> Build:
        """The build that the node's values go into."""
        return self.frame.scope.build

    def present(self, i: int) -> Tensor:
        """Return operand `i`, which must be present."""
        operand = self.inputs[i] if i < len(self.inputs) else None
        if operand is None:
            raise InvalidInput(f"operand {i} is absent")
        return operand

    def graph(self, name: str) -> GraphProto:
        """Return the inner graph in attribute `name`."""
        for attribute in self.importer.resolved(self.node, self.frame):
            if attribute.name == name and attribute.HasField("g"):
                return attribute.g
        raise InvalidInput(f"the inner graph {name!r} is missing")

    def attrs(self) -> dict[str, Any]:
        """Return all attributes except inner graphs."""
        attrs = self.importer.resolved(self.node, self.frame)
        return {a.name: self.importer.value(a) for a in attrs if not a.HasField("g")}


Structure = Callable[[Site], Sequence[Tensor]]

MAX_FILLED: Final = 2**28
"""The most elements of a filled tensor that becomes a weight."""


def _constant(site: Site) -> Sequence[Tensor]:
    attributes = site.importer.resolved(site.node, site.frame)
    if len(attributes) != 1:
        raise InvalidInput(f"a constant must have one value, this one has {len(attributes)}")
    array = _value(site.importer, attributes[0])
    return (site.importer.constant(site.node.output[0], array, site.frame.scope),)


def _value(importer: Importer, attribute: AttributeProto) -> Array:
    if attribute.type == AttributeProto.SPARSE_TENSOR:
        return _dense(importer, attribute.sparse_tensor)
    dtype = {"value_float": np.float32, "value_floats": np.float32, "value_int": np.int64,
             "value_ints": np.int64, "value_string": object, "value_strings": object,
             "value": None}  # fmt: skip
    if attribute.name not in dtype:
        raise InvalidInput(f"a constant's {attribute.name!r} is not supported")
    return np.asarray(importer.value(attribute), dtype[attribute.name])


def _dense(importer: Importer, sparse: SparseTensorProto) -> Array:
    values = array_of(sparse.values, importer.weights.folder)
    indices = array_of(sparse.indices, importer.weights.folder)
    shape = tuple(sparse.dims)
    # Checked before the allocation: a few bytes may declare a huge dense shape.
    count = _count(shape)
    if count > MAX_FILLED:
        raise InvalidInput(f"a sparse constant of shape {shape[:8]} is too large")
    dense = np.zeros(count, values.dtype)
    # ONNX allows linear positions (NNZ,) and coordinates (NNZ, rank).
    where = indices if indices.ndim == 1 else np.ravel_multi_index(tuple(indices.T), shape)
    if where.size and not 0 <= int(where.min()) <= int(where.max()) < count:
        raise InvalidInput("a sparse constant has indices outside its shape")
    dense[where] = values
    return dense.reshape(shape)


def _shape(site: Site) -> Sequence[Tensor]:
    """Return the sizes of the operand, which are known as numbers or symbols."""
    attrs = site.attrs()
    start, end = attrs.pop("start", 0), attrs.pop("end", None)
    if attrs:
        raise InvalidInput(f"it has no attribute {next(iter(attrs))!r}")
    return (site.build.dims(site.present(0).shape[start:end]),)  # ONNX slices as Python does


def _size(site: Site) -> Sequence[Tensor]:
    size = np.array(site.present(0).type.size, dtype=object)
    return (site.importer.contents.hold(site.build, size, int64),)


def _filled(site: Site) -> Sequence[Tensor]:
    """Return a weight if it is read as one, a constant if it is small, else a repeated scalar."""
    shape = site.present(0)
    value = np.asarray(site.attrs().get("value", np.zeros(1, np.float32)))
    if value.size != 1:
        raise InvalidInput(f"the fill value must be one number, got {value.size}")
    known = site.importer.contents.of(shape)
    name, scope = site.node.output[0], site.frame.scope
    if known is not None and not symbolic(known):
        dims = tuple(int(d) for d in known)
        count, filled = _count(dims), value.reshape(())
        if dims and value.dtype.kind == "f" and 1 < count <= MAX_FILLED:
            # A broadcast takes no memory; it is copied only if it becomes a weight.
            filled = np.broadcast_to(filled, dims)
            if scope.uses.weighs(name, filled):
                return (scope.held(name, filled.copy()),)
        if count <= MAX_FOLDED:
            return (site.build.constant(np.broadcast_to(filled, dims).copy()),)
    return (emit("Expand", site.build.constant(value.reshape(())), shape),)


def _count(dims: Sequence[int]) -> int:
    """Count the elements of a shape; refuse a negative size."""
    if any(d < 0 for d in dims):
        raise InvalidInput(f"a size is negative in {tuple(dims)[:8]}")
    return math.prod(dims)


STRUCTURES: Final[Mapping[str, Structure]] = {
    "Constant": _constant,
    "ConstantOfShape": _filled,
    "Shape": _shape,
    "Size": _size,
}
"""Operators whose values are known at import, recorded as constants or sizes."""
