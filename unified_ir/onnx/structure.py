"""Where a node stands, and nodes whose values are known at import: constants, shapes."""

from __future__ import annotations

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
    """A node with its operands, where it stands."""

    importer: Importer
    node: NodeProto
    inputs: Sequence[Tensor | None]
    frame: Frame

    @property
    def build(self) -> Build:
        """The graph that the node's values go into."""
        return self.frame.scope.build

    def present(self, i: int) -> Tensor:
        """Operand `i`, which must be there."""
        operand = self.inputs[i] if i < len(self.inputs) else None
        if operand is None:
            raise InvalidInput(f"operand {i} is absent")
        return operand

    def graph(self, name: str) -> GraphProto:
        """The inner graph in attribute `name`."""
        for attribute in self.importer.resolved(self.node, self.frame):
            if attribute.name == name and attribute.HasField("g"):
                return attribute.g
        raise InvalidInput(f"the graph {name!r} is absent")

    def attrs(self) -> dict[str, Any]:
        """Attributes but inner graphs."""
        attrs = self.importer.resolved(self.node, self.frame)
        return {a.name: self.importer.value(a) for a in attrs if not a.HasField("g")}


Structure = Callable[[Site], Sequence[Tensor]]

MAX_FILLED: Final = 2**28
"""Elements of a filled tensor that becomes a weight."""


def _constant(site: Site) -> Sequence[Tensor]:
    attributes = site.importer.resolved(site.node, site.frame)
    if len(attributes) != 1:
        raise InvalidInput(f"a constant has one value, this has {len(attributes)}")
    array = _value(site.importer, attributes[0])
    return (site.importer.constant(site.node.output[0], array, site.frame.scope),)


def _value(importer: Importer, attribute: AttributeProto) -> Array:
    if attribute.type == AttributeProto.SPARSE_TENSOR:
        return _dense(importer, attribute.sparse_tensor)
    value = importer.value(attribute)
    dtype = {"value_float": np.float32, "value_floats": np.float32, "value_int": np.int64,
             "value_ints": np.int64, "value_string": object, "value_strings": object,
             "value": None}  # fmt: skip
    if attribute.name not in dtype:
        raise InvalidInput(f"a constant's {attribute.name!r} is not supported")
    return np.asarray(value, dtype[attribute.name])


def _dense(importer: Importer, sparse: SparseTensorProto) -> Array:
    values = array_of(sparse.values, importer.weights.folder)
    indices = array_of(sparse.indices, importer.weights.folder)
    shape = tuple(sparse.dims)
    count = _count(shape)
    if count > MAX_FILLED:
        raise InvalidInput(f"a sparse constant of shape {shape[:8]} is not read")
    dense = np.zeros(count, values.dtype)
    where = indices if indices.ndim == 1 else np.ravel_multi_index(tuple(indices.T), shape)
    if where.size and not 0 <= int(where.min()) <= int(where.max()) < count:
        raise InvalidInput("a sparse constant has indices outside its shape")
    dense[where] = values
    return dense.reshape(shape)


def _shape(site: Site) -> Sequence[Tensor]:
    """Sizes of the operand, which are known here as numbers or symbols."""
    x, attrs = site.present(0), site.attrs()
    start, end = attrs.pop("start", 0), attrs.pop("end", None)
    if attrs:
        raise InvalidInput(f"it has no attribute {next(iter(attrs))!r}")
    rank = x.rank
    first = min(max(start + rank if start < 0 else start, 0), rank)
    last = rank if end is None else min(max(end + rank if end < 0 else end, 0), rank)
    return (site.build.dims(x.shape[first : max(first, last)]),)


def _size(site: Site) -> Sequence[Tensor]:
    size = np.array(site.present(0).type.size, dtype=object)
    return (site.importer.contents.hold(site.build, size, int64),)


def _filled(site: Site) -> Sequence[Tensor]:
    """A weight where it is read as one, a constant where it is small, else a scalar repeated."""
    shape = site.present(0)
    value = np.asarray(site.attrs().get("value", np.zeros(1, np.float32)))
    if value.size != 1:
        raise InvalidInput(f"a fill is one number, got {value.size}")
    known = site.importer.contents.of(shape)
    name, scope = site.node.output[0], site.frame.scope
    static = known is not None and not symbolic(known)
    if static and known is not None and known.size and value.dtype.kind == "f":
        dims = tuple(int(d) for d in known)
        if 1 < _count(dims) <= MAX_FILLED:
            filled = np.broadcast_to(value.reshape(()), dims)
            if scope.uses.weighs(name, filled):
                return (scope.held(name, filled.copy()),)
    if static and known is not None and _count(sizes := [int(d) for d in known]) <= MAX_FOLDED:
        return (site.build.constant(np.full(sizes, value.reshape(()))),)
    return (emit("Expand", site.build.constant(value.reshape(())), shape),)


def _count(dims: Sequence[int]) -> int:
    """Elements of a shape, counted without overflow."""
    count = 1
    for d in dims:
        if d < 0:
            raise InvalidInput(f"a size is negative in {tuple(dims)[:8]}")
        count *= d
    return count


STRUCTURES: Final[Mapping[str, Structure]] = {
    "Constant": _constant,
    "ConstantOfShape": _filled,
    "Shape": _shape,
    "Size": _size,
}
"""Operators that are known when a graph is imported, and recorded as constants or sizes."""
