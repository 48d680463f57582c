"""Definitions newer than the IR's opset that mean the same or can be expressed in the older one.

ai.onnx 27 and 28 widened types and defined a few cases that 26 left open. An operator that is
entirely new there has a body in ONNX and needs nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.types import DTYPES, DType, float32
from triplane.unified_ir.onnx.application import Application, Lifted
from triplane.unified_ir.ops.recorder import recorder
from triplane.unified_ir.ops.tensor import Tensor, as_tensor, emit

_NARROW: Final = frozenset({DTYPES["bfloat16"], DTYPES["float16"]})


def _through_float32(app: Application) -> Lifted:
    """Compute bfloat16 in float32, which holds each of its numbers."""
    narrow = DTYPES["bfloat16"]
    if all(x is None or x.dtype != narrow for x in app.inputs):
        return app
    wide = [x.cast(float32) if x is not None and x.dtype == narrow else x for x in app.inputs]
    row = recorder().table["", app.op]
    outputs = recorder().apply(row, wide, app.attrs, outputs=app.outputs)
    return tuple(y.cast(narrow) if y.dtype == float32 else y for y in outputs)


def _celu(app: Application) -> Lifted:
    """Compute narrow floats in float32, the only type that opset 12 accepts."""
    x = app.operand(0)
    if x.dtype == float32:
        return app
    return (emit("Celu", x.cast(float32), **app.attrs).cast(x.dtype),)


def _mod(app: Application) -> Lifted:
    """Give a float remainder (fmod=0), also a zero, the sign of the divisor."""
    a, b = app.operand(0), app.operand(1)
    if app.attr("fmod", 0) or not a.dtype.is_float:
        return app
    rest = emit("Mod", a, b, fmod=1)
    zero = as_tensor(np.zeros((), a.dtype.numpy))
    moved = emit(
        "And", emit("Less", rest * emit("Sign", b), zero), emit("Not", emit("IsNaN", rest))
    )
    signed = emit("Where", moved, rest + b, rest)
    # Opset 28: a zero remainder takes the sign of the divisor, so that -0.0 results for a negative
    # one.
    return (emit("Where", emit("Equal", rest, zero), zero * emit("Sign", b), signed),)


def _range(app: Application) -> Lifted:
    """Count float16 and bfloat16 in float32."""
    dtype = app.operand(0).dtype
    if dtype not in _NARROW:
        return app.without("stash_type")
    if app.attr("stash_type", 1) != 1:
        raise InvalidInput("Range counts in float32, which is stash_type=1")
    wide = [app.operand(i).cast(float32) for i in range(3)]
    return (emit("Range", *wide).cast(dtype),)


def _bit_shift(app: Application) -> Lifted:
    """Shift signed numbers: to the right with the sign, to the left without."""
    x, y = app.operand(0), app.operand(1)
    if x.dtype.kind != "int":
        return app
    bits, bare = x.dtype.bits, DTYPES[f"u{x.dtype.name}"]
    minus = as_tensor(np.array(-1, x.dtype.numpy))
    zero = as_tensor(np.zeros((), x.dtype.numpy))
    # Shifts by a negative number, or by the width or more, are undefined in C; opset 28 defines
    # them.
    inside = emit(
        "And",
        emit("GreaterOrEqual", y, zero),
        emit("Less", y, as_tensor(np.array(bits, y.dtype.numpy))),
    )
    by = emit("Where", inside, y, zero).cast(bare)
    direction = app.attr("direction")
    if direction == "LEFT":
        moved = _as_bits(emit("BitShift", _as_bits(x, bare), by, direction="LEFT"), x.dtype)
        return (emit("Where", inside, moved, zero),)
    low = emit("Less", x, zero)
    # An arithmetic shift by logical ones: x >> n = ~(~x >> n) for negative x, with ~x = -1 - x.
    positive = emit("Where", low, minus - x, x)  # ~x of a negative x
    moved = emit("BitShift", positive.cast(bare), by, direction="RIGHT").cast(x.dtype)
    full = emit("Where", low, minus, zero)
    return (emit("Where", inside, emit("Where", low, minus - moved, moved), full),)


def _as_bits(x: Tensor, dtype: DType) -> Tensor:
    return emit("BitCast", x, to=dtype.onnx)


def _space_to_depth(app: Application) -> Lifted:
    """Lift mode CRD, in which the channel varies slower than the position in the block."""
    if app.attr("mode", "DCR") == "DCR":
        return app.without("mode")
    x, b = app.operand(0), int(app.attr("blocksize"))
    n, c, h, w = x.shape
    parts = x.reshape(n, c, h // b, b, w // b, b).transpose(0, 1, 3, 5, 2, 4)
    return (parts.reshape(n, c * (b * b), h // b, w // b),)


_SAME: Final = (
    "Cast", "DepthToSpace", "DequantizeLinear", "Optional", "OptionalGetElement",
    "OptionalHasElement", "QuantizeLinear", "ReduceLogSum", "ReduceLogSumExp",
)  # fmt: skip
_WIDENED: Final = ("Compress", "Einsum", "OneHot", "ReverseSequence", "Unique")
NEWER: Final[Mapping[tuple[str, int], Callable[[Application], Any]]] = {
    **{(name, 28): lambda app: app for name in _SAME},
    **{(name, 28): _through_float32 for name in _WIDENED},
    ("BitShift", 28): _bit_shift,
    ("Celu", 28): _celu,
    ("Mod", 28): _mod,
    ("Range", 27): _range,
    ("SpaceToDepth", 28): _space_to_depth,
}
"""By operator and version: the application of the newer definition in the IR's."""


def as_meant(app: Application, opset: int) -> Lifted:
    """Return the application in the IR's definition; refuse it if that cannot express it."""
    rule = NEWER.get((app.op, app.since))
    if rule is None:
        raise InvalidInput(
            f"{app.op} has a new definition in opset {app.since} (the model has {opset}); export "
            "the model with an opset up to 26"
        )
    lifted: Lifted = rule(app)
    return lifted
