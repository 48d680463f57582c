"""Rows that quantize: x ~ (q - zero_point) * scale.

There is one scale for the whole tensor, one per slice of an axis, or one per block along it.
Rounding is half to even; values out of range saturate.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.dims import Dim, ceil_div
from triplane.unified_ir.ir.graph import Node
from triplane.unified_ir.ir.types import (
    DType,
    ShapeError,
    TensorType,
    TypeMismatch,
    as_dtype,
    float32,
    int32,
    uint8,
)
from triplane.unified_ir.ops.emission import EmissionContext
from triplane.unified_ir.ops.row import Infer, Op, OpCall, OpKind, Types, dtype_attr
from triplane.unified_ir.ops.rows.arithmetic import xla_quant
from triplane.unified_ir.ops.rows.arithmetic.coding import (
    along,
    saturated,
    shaped,
    shifted,
    type_of_codes,
)
from triplane.unified_ir.ops.rows.arithmetic.matrix import matmul
from triplane.unified_ir.ops.rows.movement.structure import axes_of
from triplane.unified_ir.ops.rows.windows.convolution import conv_row
from triplane.unified_ir.ops.samples import fixed, ints, normal, sample


def _quantize(
    x: Any, scale: Any, zero: Any = None, *, axis: int, block_size: int, output_dtype: int,
    precision: int, saturate: int,
) -> Any:  # fmt: skip
    """q = saturate(round(x / scale) + zero_point)."""
    to = as_dtype(zero.dtype) if zero is not None else type_of_codes(output_dtype)
    if precision:
        x = x.astype(dtype_attr(precision).numpy)
    step = along(scale, x, axis, block_size)
    ratio = x / (step.astype(x.dtype) if step.dtype != x.dtype else step)
    # A zero point only gives floating-point codes their type; the cast rounds.
    if to.is_float:
        return saturated(ratio, to) if saturate else ratio.astype(to.numpy)
    shift = 0 if zero is None else along(zero, x, axis, block_size).astype(np.float64)
    return saturated(np.rint(ratio.astype(np.float64)) + shift, to)


def _dequantize(
    q: Any, scale: Any, zero: Any = None, *, axis: int, block_size: int, output_dtype: int
) -> Any:
    to = dtype_attr(output_dtype).numpy if output_dtype else scale.dtype
    step = along(scale, q, axis, block_size)
    if zero is None:
        return (q.astype(step.dtype) * step).astype(to)
    shift = along(zero, q, axis, block_size)
    wide = np.int64 if as_dtype(q.dtype).kind in {"int", "uint"} else np.float32
    return ((q.astype(wide) - shift.astype(wide)).astype(step.dtype) * step).astype(to)


def _check_scale(call: OpCall) -> None:
    """Require one scale for all, one per slice of `axis`, or one per block; zero points alike."""
    x, scale, block = call.type(0), call.type(1), call.attrs["block_size"]
    zero_fits = not call.has(2) or call.type(2).shape == scale.shape
    # A scale of shape () goes with a zero point of shape (1,) and the other way round.
    if call.has(2) and not block and scale.size == call.type(2).size == 1:
        zero_fits = True
    one = not scale.rank or (scale.shape == (1,) and not block)
    axis = 0 if one and not block else axes_of(x.rank, [call.attrs["axis"]])[0]
    wanted: tuple[Dim, ...] = x.shape[axis : axis + 1]
    if block:
        wanted = tuple(ceil_div(d, block) if i == axis else d for i, d in enumerate(x.shape))
    if not zero_fits or block < 0 or (scale.shape != wanted and not (one and not block)):
        operand_types = [str(call.type(i)) for i in range(len(call.types))]
        raise ShapeError(
            f"{call.row} takes one scale, or one per slice or block of axis {axis} (of shape "
            f"{wanted}), and zero points alike; got {operand_types} with block_size {block}"
        )


def _quantized(call: OpCall) -> Types:
    _check_scale(call)
    wanted, zero = call.attrs["output_dtype"], call.type(2).dtype if call.has(2) else None
    if wanted and zero is not None and dtype_attr(wanted) != zero:
        raise TypeMismatch(f"{call.row} gives {dtype_attr(wanted)}, its zero point is {zero}")
    return (call.type(0).with_dtype(zero or type_of_codes(wanted)),)


def _dequantized(call: OpCall) -> Types:
    _check_scale(call)
    wanted = call.attrs["output_dtype"]
    return (call.type(0).with_dtype(dtype_attr(wanted) if wanted else call.type(1).dtype),)


_SCALE = fixed(0.05, "float32")

_CODES_SINCE: Final = {
    "int2": 25, "uint2": 25, "float4e2m1": 23, "float8e8m0": 23, "int4": 21, "uint4": 21,
    "int16": 21, "uint16": 21, "float8e4m3fn": 19, "float8e4m3fnuz": 19, "float8e5m2": 19,
    "float8e5m2fnuz": 19, "float16": 19, "bfloat16": 19,
}  # fmt: skip
"""The opset since which QuantizeLinear and DequantizeLinear take an element type."""


_CODING_SINCE: Final = {
    ("QuantizeLinear", "saturate"): 19, ("QuantizeLinear", "block_size"): 21,
    ("QuantizeLinear", "output_dtype"): 21, ("QuantizeLinear", "precision"): 23,
    ("DequantizeLinear", "block_size"): 21, ("DequantizeLinear", "output_dtype"): 23,
}  # fmt: skip


def _emit_coding(context: EmissionContext, node: Node) -> None:
    """Emit the node, or refuse it if the opset is too old for one of its types or attributes."""
    values = [v for v in (*node.inputs, *node.outputs) if v is not None]
    needs = [(_CODES_SINCE.get(v.type.dtype.name, 0), str(v.type.dtype)) for v in values]
    needs += [(_CODING_SINCE.get((node.op.name, k), 0), k) for k in node.attrs]
    since, what = max(needs)
    if since > context.target.opset:
        raise InvalidInput(
            f"{node.op} takes {what} since opset {since}, and the target is opset "
            f"{context.target.opset} (at {node.meta.location}); choose a newer opset"
        )
    context.plain(node)


quantize_linear = Op(
    name="QuantizeLinear",
    kind=OpKind.QUANTIZATION,
    settings=(1, 2),
    emit=_emit_coding,
    infer=_quantized,
    reference=_quantize,
    xla=xla_quant.quantize,
    samples=(
        sample(normal(2, 3), _SCALE, fixed(128, "uint8")),
        sample(normal(2, 3), fixed([0.05, 0.1], "float32"), fixed([0, 0], "int8"), axis=0),
        sample(normal(2, 3), _SCALE),
    ),
)
dequantize_linear = Op(
    name="DequantizeLinear",
    kind=OpKind.QUANTIZATION,
    settings=(1, 2),
    emit=_emit_coding,
    infer=_dequantized,
    reference=_dequantize,
    xla=xla_quant.dequantize,
    samples=(
        sample(ints(0, 255, 2, 3, dtype="uint8"), _SCALE, fixed(128, "uint8")),
        sample(ints(-127, 127, 2, 3, dtype="int8"), fixed([0.05, 0.1], "float32"), axis=0),
        sample(ints(-999, 999, 4, dtype="int32"), _SCALE),
    ),
)


def _dynamic_types(call: OpCall) -> Types:
    scalar = TensorType(float32, ())
    return (call.type(0).with_dtype(uint8), scalar, scalar.with_dtype(uint8))[: call.outputs]


def _dynamic(x: Any) -> tuple[Any, Any, Any]:
    """Quantize by one scale that covers the range of x and 0."""
    low, high = min(x.min(initial=0), 0), max(x.max(initial=0), 0)
    # Any positive scale maps zeros to zeros; 0 would divide by zero.
    scale = np.float32((high - low) / np.float32(255)) or np.float32(1)
    zero = saturated(np.rint(-low / scale), uint8)
    codes = saturated(np.rint(x / scale) + zero.astype(np.float32), uint8)
    return codes, scale, zero


dynamic_quantize_linear = Op(
    name="DynamicQuantizeLinear",
    kind=OpKind.QUANTIZATION,
    infer=_dynamic_types,
    reference=_dynamic,
    xla=xla_quant.dynamic,
    samples=(
        sample(normal(2, 3), outputs=3),
        sample(fixed([[0.5, 2.0]], "float32"), outputs=3),
        sample(fixed([[0.0, 0.0]], "float32"), outputs=3),
    ),
)


def _check_zero(call: OpCall, i: int, of: int, axis: int) -> None:
    """Require one zero point, one per row or column, or zero points shaped to broadcast."""
    if not call.has(i):
        return
    q, zero = call.type(of), call.type(i)
    if zero.rank <= 1 and (zero.size == 1 or zero.shape == (q.shape[axis],)):
        return
    pairs = zip(zero.shape, q.shape, strict=False)
    if zero.rank != q.rank or not all(a in (1, b) for a, b in pairs):
        raise ShapeError(f"{call.row} of {q} takes zero points that broadcast to it, got {zero}")


def _types_like(row: Op, w: int, to: DType | None) -> Infer:
    """Build a rule of inference from that of `row` for floats.

    The weight is operand `w`, its zero point operand `w + 2`; without `to` the result has the
    element type of its zero point, operand 7.
    """

    # The row for floats knows the shapes; only the element type of the result differs.
    def infer(call: OpCall) -> Types:
        types = (call.type(0).with_dtype(float32), call.type(w).with_dtype(float32))
        assert row.infer is not None
        (y,) = row.infer(replace(call, row=row, types=types, known=(None, None)))
        rows = -2 if call.type(0).rank > 1 else -1
        _check_zero(call, 2, 0, rows if row is matmul else 0)
        _check_zero(call, w + 2, w, -1 if row is matmul else 0)
        return (y.with_dtype(to or call.type(7).dtype),)

    return infer


def _product(a: Any, a_zero: Any, b: Any, b_zero: Any) -> Any:
    return np.matmul(shifted(a, a_zero, -2 if a.ndim > 1 else -1), shifted(b, b_zero, -1))


def _matmul_integer(a: Any, b: Any, a_zero: Any = None, b_zero: Any = None) -> Any:
    """Sums wrap at 32 bits; in float64 they are exact up to 2^37 terms."""
    return np.asarray(_product(a, a_zero, b, b_zero)).astype(np.int64).astype(np.int32)


# Weights of the samples take 7 bits: without int8 dot products, x64 processors add two products of
# 8 bits in 16 bits, which saturate.
_A, _B = ints(0, 255, 2, 3, dtype="uint8"), ints(-63, 63, 3, 4, dtype="int8")
matmul_integer = Op(
    name="MatMulInteger",
    kind=OpKind.QUANTIZATION,
    infer=_types_like(matmul, 1, int32),
    reference=_matmul_integer,
    xla=xla_quant.matmul_integer,
    samples=(
        sample(_A, _B),
        sample(_A, _B, fixed(120, "uint8"), fixed([1, 0, -3, 5], "int8")),
        sample(ints(0, 255, 2, 5, 3, dtype="uint8"), _B, fixed(7, "uint8"), fixed(2, "int8")),
    ),
)


def _conv_integer(x: Any, w: Any, x_zero: Any = None, w_zero: Any = None, **attrs: Any) -> Any:
    assert conv_row.reference is not None
    y = conv_row.reference(shifted(x, x_zero, 0), shifted(w, w_zero, 0), **attrs)
    return y.astype(np.int64).astype(np.int32)


_X, _W = ints(0, 255, 2, 2, 5, 5, dtype="uint8"), ints(-63, 63, 4, 2, 3, 3, dtype="int8")
conv_integer = Op(
    name="ConvInteger", kind=OpKind.QUANTIZATION,
    infer=_types_like(conv_row, 1, int32),
    reference=_conv_integer,
    xla=xla_quant.conv_integer,
    samples=(
        sample(_X, _W, fixed(100, "uint8"), pads=(1, 1, 1, 1)),
        sample(_X, ints(0, 255, 4, 1, 3, 3, dtype="uint8"), fixed(9, "uint8"), fixed(3, "uint8"),
               group=2, strides=(2, 2)),
    ),
)  # fmt: skip


def _requantized(product: Any, scale: Any, zero: Any) -> Any:
    ratio = np.rint(product * scale.astype(np.float64)) + zero.astype(np.float64)
    return saturated(ratio, as_dtype(zero.dtype))


def _qlinear_matmul(  # noqa: PLR0917 - the operands of the row
    a: Any, a_scale: Any, a_zero: Any, b: Any, b_scale: Any, b_zero: Any, y_scale: Any, y_zero: Any
) -> Any:
    product = _product(a, a_zero, b, b_zero)
    rank = max(np.ndim(product), 1)
    scale = shaped(a_scale, rank, -2) * shaped(b_scale, rank, -1) / y_scale.reshape(())
    return _requantized(product, scale, y_zero.reshape(()))


_SA, _SB, _SY = fixed(0.02, "float32"), fixed(0.03, "float32"), fixed(0.7, "float32")
qlinear_matmul = Op(
    name="QLinearMatMul", kind=OpKind.QUANTIZATION, settings=(1, 2, 4, 5, 6, 7),
    infer=_types_like(matmul, 3, None),
    reference=_qlinear_matmul,
    xla=xla_quant.qlinear_matmul,
    samples=(
        sample(_A, _SA, fixed(120, "uint8"), _B, _SB, fixed(0, "int8"), _SY, fixed(90, "uint8")),
        sample(_A, _SA, fixed(7, "uint8"), ints(0, 255, 3, 4, dtype="uint8"), _SB,
               fixed(3, "uint8"), _SY, fixed(5, "uint8")),
    ),
)  # fmt: skip


def _qlinear_conv(  # noqa: PLR0917 - the operands of the row
    x: Any, x_scale: Any, x_zero: Any, w: Any, w_scale: Any, w_zero: Any, y_scale: Any,
    y_zero: Any, bias: Any = None, **attrs: Any,
) -> Any:  # fmt: skip
    assert conv_row.reference is not None
    # The bias has the scale x_scale * w_scale, that of the accumulator.
    wide = None if bias is None else bias.astype(np.float64)
    y = conv_row.reference(shifted(x, x_zero, 0), shifted(w, w_zero, 0), wide, **attrs)
    per_filter = shaped(w_scale, y.ndim, 1 - y.ndim)
    return _requantized(y, x_scale * per_filter / y_scale, y_zero)


qlinear_conv = Op(
    name="QLinearConv", kind=OpKind.QUANTIZATION, settings=(1, 2, 4, 5, 6, 7),
    infer=_types_like(conv_row, 3, None),
    reference=_qlinear_conv,
    xla=xla_quant.qlinear_conv,
    samples=(
        sample(_X, _SA, fixed(100, "uint8"), _W, fixed([0.03, 0.02, 0.05, 0.01], "float32"),
               fixed([0, 0, 0, 0], "int8"), _SY, fixed(128, "uint8"),
               ints(-500, 500, 4, dtype="int32"), pads=(1, 1, 1, 1)),
        sample(_X, _SA, fixed(9, "uint8"), ints(0, 255, 4, 2, 3, 3, dtype="uint8"), _SB,
               fixed(3, "uint8"), _SY, fixed(0, "uint8"), strides=(2, 2)),
    ),
)  # fmt: skip
