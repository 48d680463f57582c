"""Bytes of an ONNX model from any source, parsed once, within limits, before any work on them.

Weights outside the graph are read only from files in the model's own folder: no absolute path, no
`..`, no link that leads out of it.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Collection, Iterable, Iterator
from itertools import chain, count
from pathlib import Path
from typing import Any, Final

import numpy as np
from google.protobuf.message import DecodeError
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper

from triplane.proto.errors import Corrupt, InvalidInput, NotFound
from triplane.unified_ir.files.container import Container, is_container
from triplane.unified_ir.ir.graph import Array
from triplane.unified_ir.ir.types import BY_ONNX, MAX_RANK, DType

MAX_MODEL_BYTES: Final = 2**31 - 1
"""The limit of a protobuf message; larger models keep their weights in separate files."""
MAX_TENSOR_BYTES: Final = 2**34
SHARED_BYTES: Final = 16 << 20
"""A file of weights of at least this size is read once as a whole; tensors are views of it."""
MAX_NESTING: Final = 16
"""The deepest nesting of graphs, as in a model file."""

_READ: Final[weakref.WeakValueDictionary[tuple[int, ...], Array]] = weakref.WeakValueDictionary()
"""Contents of files of weights that some array still uses, by the identity of the file."""

Source = str | Path | bytes | ModelProto


def read_model(source: Source) -> tuple[ModelProto, Path | None]:
    """Return the model, and the folder of its external data (None if it came as bytes).

    Raise NotFound for a missing file, Corrupt for bytes that are not an ONNX model, InvalidInput
    for a Triplane file.
    """
    if isinstance(source, ModelProto):
        return _checked(source), None
    if isinstance(source, bytes):
        return _checked(_parsed(source, "the bytes given")), None
    path = Path(source)
    if not path.is_file():
        raise NotFound(f"there is no file {path}; give the path of a .onnx file")
    if is_container(path):
        Container(path, kind="model")
        raise InvalidInput(
            f"{path.name} is already a Triplane model file and needs no import; "
            "triplane train, convert and inspect accept it as it is"
        )
    if path.stat().st_size > MAX_MODEL_BYTES:
        raise InvalidInput(
            f"{path.name} has {path.stat().st_size} bytes, an ONNX graph at most "
            f"{MAX_MODEL_BYTES}; save it with its weights as external data"
        )
    return _checked(_parsed(path.read_bytes(), path.name)), path.resolve().parent


def _parsed(data: bytes, name: str) -> ModelProto:
    try:
        model = ModelProto.FromString(data)
    except DecodeError as error:
        raise Corrupt(f"{name}: not an ONNX model, its protobuf does not parse: {error}") from error
    if not model.HasField("graph") or not model.opset_import:
        absent = "opset_import" if model.HasField("graph") else "graph"
        raise Corrupt(f"{name}: not an ONNX model, it has no {absent}")
    return model


def unused(name: str, taken: Collection[str], separator: str = ".") -> str:
    """Return the name, or the name with the first number from 2 on that is not taken."""
    names = chain([name], (f"{name}{separator}{k}" for k in count(2)))
    return next(n for n in names if n not in taken)


def _checked(model: ModelProto) -> ModelProto:
    """Return the model after checking that names are text and graphs do not nest too deep."""
    heads = [*model.opset_import, *(o for f in model.functions for o in f.opset_import)]
    _check_text([model.producer_name, model.producer_version, *(o.domain for o in heads)])
    _check_graph(model.graph, 0)
    for function in model.functions:
        named = [function.name, function.domain, function.overload, *function.attribute]
        _check_text([*named, *function.input, *function.output])
        _check_nodes(function.node, 0)
    return model


def _check_graph(graph: GraphProto, depth: int) -> None:
    if depth > MAX_NESTING:
        raise InvalidInput(f"graphs nest at most {MAX_NESTING} deep, this model goes deeper")
    infos = [*graph.input, *graph.output]
    _check_text([*(i.name for i in infos), *(t.name for t in graph.initializer)])
    _check_text(d.dim_param for i in infos for d in i.type.tensor_type.shape.dim)
    _check_nodes(graph.node, depth)


def _check_nodes(nodes: Iterable[NodeProto], depth: int) -> None:
    for node in nodes:
        _check_text([node.name, node.op_type, node.domain, node.overload])
        _check_text([*node.input, *node.output])
        _check_text(t for a in node.attribute for t in (a.name, a.ref_attr_name))
        for inner in subgraphs_of(node):
            _check_graph(inner, depth + 1)


def _check_text(texts: Iterable[Any]) -> None:
    """Refuse names that are not UTF-8, which the parser returns as bytes."""
    for text in texts:
        if isinstance(text, bytes):
            raise Corrupt(f"a name in the model is not UTF-8 text: {text[:40]!r}")


def subgraphs_of(node: NodeProto) -> Iterator[GraphProto]:
    """Yield the graphs in a node's attributes."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def dtype_of(number: int, what: str) -> DType:
    """Return an element type by its ONNX number."""
    if number not in BY_ONNX:
        name = TensorProto.DataType.Name(number) if number in TensorProto.DataType.values() else ""
        raise InvalidInput(f"{what} has elements of type {number} {name}, which is not supported")
    return BY_ONNX[number]


def array_of(tensor: TensorProto, folder: Path | None) -> Array:
    """Return the contents of a tensor; raise Corrupt if its bytes do not fit its type."""
    name = tensor.name[:80]
    dtype = dtype_of(tensor.data_type, f"tensor {name!r}")
    shape = tuple(tensor.dims)
    if len(shape) > MAX_RANK or any(d < 0 for d in shape):
        raise Corrupt(f"tensor {name!r} has the invalid shape {list(shape)[:20]}")
    # Python integers do not overflow, so a shape such as (2^62, 2^62) is refused by its true size.
    n = (math.prod(shape) * dtype.bits + 7) // 8
    if n > MAX_TENSOR_BYTES:
        raise InvalidInput(f"tensor {name!r} has {n} bytes, the limit is {MAX_TENSOR_BYTES}")
    if tensor.data_location == TensorProto.EXTERNAL:
        return _external(tensor, dtype, shape, n, folder)
    if tensor.HasField("raw_data") and len(tensor.raw_data) != n:
        raise Corrupt(f"tensor {name!r} has {len(tensor.raw_data)} bytes, its type takes {n}")
    return _decoded(tensor)


def _decoded(tensor: TensorProto) -> Array:
    try:
        return np.asarray(numpy_helper.to_array(tensor))
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise Corrupt(f"tensor {tensor.name[:80]!r} does not fit its type: {error}") from error


def _external(
    tensor: TensorProto, dtype: DType, shape: tuple[int, ...], n: int, folder: Path | None
) -> Array:
    entries = {e.key: e.value for e in tensor.external_data}
    path = _inside(entries.get("location", ""), tensor.name[:80], folder)
    offset, length = _number(entries, "offset", 0), _number(entries, "length", n)
    if length != n:
        raise Corrupt(f"tensor {tensor.name[:80]!r} has {length} external bytes, it takes {n}")
    if offset + n > path.stat().st_size:
        raise Corrupt(f"tensor {tensor.name[:80]!r} reaches beyond the end of {path.name}")
    if path.stat().st_size >= SHARED_BYTES and dtype.bits >= 8 and dtype.kind != "bool":
        # A view needs no copy; data at an odd offset is copied, because some kernels need
        # alignment.
        held = _whole(path)[offset : offset + n].view(dtype.numpy).reshape(shape)
        return held if held.flags.aligned else held.copy()
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read(n)
    return _decoded(TensorProto(name=tensor.name, dims=shape, data_type=dtype.onnx, raw_data=data))


def _whole(path: Path) -> Array:
    """Return the bytes of a file, read once for all its tensors, as long as one of them is used.

    The file is not mapped: exporting a model again overwrites it, which would change the numbers of
    a module imported before, or kill the process that reads them. A file that was replaced or
    changed is read again.
    """
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        # Not the path: a file of that name may have been written again.
        key = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        held = _READ.get(key)
        if held is None:
            held = np.fromfile(file, np.uint8)
            held.flags.writeable = False
            _READ[key] = held
    return held


def _number(entries: dict[str, str], key: str, default: int) -> int:
    text = entries.get(key, str(default))
    # isdigit alone accepts other scripts; 18 digits fit 64 bits, so that sums of two do too.
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise Corrupt(f"external data has the {key} {text[:40]!r}; a number was expected")
    return int(text)


def _inside(location: str, name: str, folder: Path | None) -> Path:
    """Return the file of external data, which must be in the model's folder, links resolved."""
    if folder is None:
        raise InvalidInput(
            f"tensor {name!r} lies in the file {location[:80]!r}, and the model came without a "
            "path; give import_onnx the path of the .onnx file"
        )
    parts = Path(location).parts
    if not location or "\0" in location or Path(location).is_absolute() or ".." in parts:
        raise Corrupt(f"tensor {name!r} lies at {location[:80]!r}; it must lie beside the model")
    # A link inside the folder may still lead out of it, so the resolved path is checked.
    path = Path(os.path.realpath(folder / location))
    if not path.is_relative_to(os.path.realpath(folder)):
        raise Corrupt(f"tensor {name!r} lies at {location[:80]!r}, a link out of the folder")
    if not path.is_file():
        raise NotFound(f"tensor {name!r} lies in {location[:80]!r}, which is not in {folder.name}")
    return path
