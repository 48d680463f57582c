"""Types of a node's outputs, by the row's own rule or else by ONNX's inference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx import TypeProto, checker, helper, numpy_helper, shape_inference

from triplane.unified_ir.ir.dims import Dim, Expr, parse
from triplane.unified_ir.ir.graph import AttrValue, Function
from triplane.unified_ir.ir.types import (
    BY_ONNX,
    OWN,
    DType,
    OptionalType,
    SequenceType,
    ShapeError,
    TensorType,
    TypeMismatch,
    is_plain,
)
from triplane.unified_ir.ops.row import MEANING_OPSET, OPEN, Known, Op, OpCall


def infer(
    row: Op,
    types: Sequence[TensorType | None],
    known: Sequence[Known | None],
    attrs: Mapping[str, AttrValue],
    regions: tuple[Function, ...],
    outputs: int,
) -> tuple[TensorType, ...]:
    """Infer output types; a wrong call raises ShapeError or TypeMismatch naming the operator."""
    check_groups(row, types)
    if row.infer is not None:
        names: Any = attrs.get(OPEN, ()) if row.data_dependent_dims else ()
        call = OpCall(
            row, tuple(types), tuple(known), row.full_attrs(attrs), regions, outputs, names
        )
        return row.infer(call)
    return _infer_by_onnx(row, types, known, attrs, outputs)


def check_groups(row: Op, types: Sequence[TensorType | None]) -> None:
    """Check that operands have element types that the row takes, one for each type letter."""
    seen: dict[str, TensorType] = {}
    for i, t in enumerate(types):
        if t is not None and row.schema and not row.admits(i, t):
            raise TypeMismatch(f"{row} does not take {t} as operand {i}; cast it")
        if t is None or not is_plain(t) or not in_type_group(row, i):
            continue
        first = seen.setdefault(row.letter(i), t)
        if first.dtype != t.dtype:
            raise TypeMismatch(f"{row} needs one element type, got {first} and {t}; cast one")


def in_type_group(row: Op, i: int) -> bool:
    """Return whether operand `i` shares the element type of those with its type letter."""
    letter = row.letter(i)
    # A schema gives either a type variable such as T or one concrete type such as tensor(int64).
    if not letter or "tensor(" in letter:
        return False
    formals = row.schema.inputs if row.schema else ()
    return not formals or bool(formals[min(i, len(formals) - 1)].is_homogeneous)


def _infer_by_onnx(
    row: Op,
    types: Sequence[TensorType | None],
    known: Sequence[Known | None],
    attrs: Mapping[str, AttrValue],
    outputs: int,
) -> tuple[TensorType, ...]:
    assert row.schema is not None
    names = [f"i{k}" if t is not None else "" for k, t in enumerate(types)]
    node = helper.make_node(row.name, names, [f"o{k}" for k in range(outputs)], **onnx_attrs(attrs))
    protos = {n: type_proto(t) for n, t in zip(names, types, strict=True) if t is not None}
    data = {
        # Sizes with symbols are no arrays; rows whose output shape depends on them have a rule of
        # their own.
        n: numpy_helper.from_array(np.asarray(k, order="C"), n)
        for n, k in zip(names, known, strict=True)
        if isinstance(k, np.ndarray)
    }
    try:
        inferred = shape_inference.infer_node_outputs(
            row.schema,
            node,
            protos,
            data,
            opset_imports=[helper.make_opsetid("", MEANING_OPSET)],
            ir_version=10,
        )
    except (shape_inference.InferenceError, checker.ValidationError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ShapeError(f"{row} refuses {[str(t) for t in types]}: {reason}") from error
    return tuple(_from_proto(row, inferred[o], types) for o in node.output)


def onnx_attrs(attrs: Mapping[str, AttrValue]) -> dict[str, Any]:
    """Return attributes as `onnx.helper.make_node` takes them, without those of the IR alone."""
    return {k: _onnx_attr(v) for k, v in attrs.items() if k != OPEN}


def _onnx_attr(value: AttrValue) -> Any:
    if isinstance(value, TensorType):
        return type_proto(value)
    return numpy_helper.from_array(value) if isinstance(value, np.ndarray) else value


def type_proto(t: TensorType) -> TypeProto:
    """Return ONNX's form of a type; a symbolic size becomes a dim_param with its text."""
    if isinstance(t, OptionalType):
        return helper.make_optional_type_proto(type_proto(t.element))
    if isinstance(t, SequenceType):
        return helper.make_sequence_type_proto(_element_proto(t))
    shape = [d if isinstance(d, int) else str(d) for d in t.shape]
    return helper.make_tensor_type_proto(t.dtype.onnx, shape)


def _element_proto(t: SequenceType) -> TypeProto:
    """Leave sizes of their own unnamed: onnxruntime takes two of one name for equal."""
    if isinstance(t.element, DType):
        return helper.make_tensor_type_proto(t.element.onnx, None)
    shape = [None if d == OWN else d if isinstance(d, int) else str(d) for d in t.element.shape]
    return helper.make_tensor_type_proto(t.element.dtype.onnx, shape)


def _from_proto(row: Op, proto: TypeProto, types: Sequence[TensorType | None]) -> TensorType:
    tensor = proto.tensor_type
    if tensor.elem_type not in BY_ONNX or not tensor.HasField("shape"):
        raise ShapeError(
            f"{row} gives no static type for {[str(t) for t in types]}; its row needs a rule"
        )
    dims: list[Dim] = []
    for d in tensor.shape.dim:
        if d.HasField("dim_value"):
            dims.append(d.dim_value)
        elif d.dim_param:
            # ONNX copies the text of a dim_param but cannot compute with it. Where it would have
            # to, it drops the size, which is refused below rather than guessed.
            dims.append(parse(d.dim_param))
        else:
            raise ShapeError(
                f"{row} loses a symbolic size of {[str(t) for t in types]}; its row needs a rule"
            )
    return TensorType(BY_ONNX[tensor.elem_type], tuple(dims))


def broadcast(row: Op, *shapes: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """Broadcast as numpy does; two different symbols never broadcast, as that would be a guess."""
    rank = max((len(s) for s in shapes), default=0)
    padded = [(1,) * (rank - len(s)) + s for s in shapes]
    return tuple(_broadcast_dim(row, shapes, axis) for axis in zip(*padded, strict=True))


def _broadcast_dim(row: Op, shapes: tuple[tuple[Dim, ...], ...], dims: tuple[Dim, ...]) -> Dim:
    # The distinct sizes other than 1, then 1, so that wide[0] is the result also if all are 1.
    wide = [*dict.fromkeys(d for d in dims if d != 1), 1]
    if len(wide) > 2:
        symbolic = isinstance(wide[0], Expr) or isinstance(wide[1], Expr)
        way_out = (
            "give both the same symbol, or reshape" if symbolic else "reshape or transpose one"
        )
        shown = " and ".join(f"({', '.join(map(str, s))})" for s in shapes)
        raise ShapeError(f"{row} cannot broadcast {shown}: {wide[0]} against {wide[1]}; {way_out}")
    return wide[0]
