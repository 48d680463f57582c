"""Emission of rows that move elements, write them at places, or hold them as constants."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from triplane.unified_ir.ir.dims import Expr, symbols
from triplane.unified_ir.ir.graph import Node
from triplane.unified_ir.ir.types import DTYPES, float16, float32, int64
from triplane.unified_ir.ops.emission import EmissionContext
from triplane.unified_ir.ops.infer import onnx_attrs
from triplane.unified_ir.ops.row import OPEN


def emit_constant(context: EmissionContext, node: Node) -> None:
    """An initializer."""
    value = node.attrs["value"]
    assert isinstance(value, np.ndarray)
    context.names[node.outputs[0]] = context.constant(value)


def emit_dims(context: EmissionContext, node: Node) -> None:
    """Sizes as integer arithmetic on shapes."""
    context.names[node.outputs[0]] = context.dims(node.attrs["dims"])  # type: ignore[arg-type]


def emit_expand(context: EmissionContext, node: Node) -> None:
    """No elements are a constant: onnxruntime 1.31 takes an Expand of one to none for nothing."""
    type_ = node.outputs[0].type
    if 0 in type_.shape and not type_.symbols and node.inputs[0] is not None:
        empty = np.zeros(type_.concrete({}), type_.dtype.numpy)
        context.names[node.outputs[0]] = context.constant(empty)
    else:
        context.plain(node)


def emit_reshape(context: EmissionContext, node: Node) -> None:
    """One symbolic size becomes -1: no Shape arithmetic at run time."""
    shape = node.outputs[0].type.shape
    symbolic = [i for i, d in enumerate(shape) if isinstance(d, Expr)]
    if len(symbolic) > 1 or 0 in shape:
        context.plain(node)
        return
    wanted = np.array([-1 if isinstance(d, Expr) else d for d in shape], np.int64)
    data = context.inputs(node)[0]
    context.add("Reshape", [data, context.constant(wanted)], context.output_names(node))


def emit_slice(context: EmissionContext, node: Node) -> None:
    """A number of rows that the axis does not imply is held to: Slice itself would give fewer."""
    x, y = node.inputs[0], node.outputs[0].type
    assert x is not None
    opened = node.attrs.get(OPEN, ())
    if all(
        isinstance(a, int) or (isinstance(b, Expr) and _implied(a, b, opened))
        for a, b in zip(x.type.shape, y.shape, strict=True)
    ):
        context.plain(node)
        return
    taken = context.emit("Slice", *context.inputs(node))
    context.add("Reshape", [taken, context.dims(y.shape)], context.output_names(node), allowzero=1)


def _implied(axis: Expr, taken: Expr, opened: Any) -> bool:
    """Whether the size of a slice follows from the axis alone, or is what it turns out to be."""
    return symbols(taken) <= symbols(axis) | set(opened)


_NARROW: Final = frozenset({float16, DTYPES["bfloat16"]})


def emit_scatter(context: EmissionContext, node: Node) -> None:
    """onnxruntime 1.31 accumulates in no 16-bit type: through float32."""
    dtype = node.outputs[0].type.dtype
    if dtype not in _NARROW or node.attrs.get("reduction", "none") == "none":
        context.plain(node)
        return
    x, index, updates = context.inputs(node)
    wide = [context.emit("Cast", v, to=float32.onnx) for v in (x, updates)]
    scattered = context.emit(node.op.name, wide[0], index, wide[1], **node.attrs)
    context.add("Cast", [scattered], context.output_names(node), to=dtype.onnx)


_MARKED: Final = frozenset({int64, float32})


def emit_one_hot(context: EmissionContext, node: Node) -> None:
    """Positions and values of other types than onnxruntime has kernels for are cast around it."""
    index, depth, values = context.inputs(node)
    dtype = node.outputs[0].type.dtype
    if node.inputs[0].type.dtype != int64:  # type: ignore[union-attr]
        index = context.emit("Cast", index, to=int64.onnx)
    if node.inputs[1].type.dtype != int64:  # type: ignore[union-attr]
        depth = context.emit("Cast", depth, to=int64.onnx)
    if dtype in _MARKED:
        names = context.output_names(node)
        context.add("OneHot", [index, depth, values], names, **onnx_attrs(node.attrs))
        return
    wide = float32 if dtype.is_float else int64
    cast = context.emit("Cast", values, to=wide.onnx)
    marked = context.emit("OneHot", index, depth, cast, **onnx_attrs(node.attrs))
    context.add("Cast", [marked], context.output_names(node), to=dtype.onnx)


def emit_split(context: EmissionContext, node: Node) -> None:
    """Sizes of parts are written out: how many there are is no attribute before opset 18."""
    names = context.inputs(node)
    if len(names) == 1:
        x, axis = node.inputs[0], int(node.attrs.get("axis", 0))  # type: ignore[arg-type]
        assert x is not None
        names.append(context.dims([y.type.shape[axis % x.type.rank] for y in node.outputs]))
    context.add("Split", names, context.output_names(node), axis=node.attrs.get("axis", 0))
