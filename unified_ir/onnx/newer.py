"""Definitions newer than the IR's opset, where they say the same or can be said in older words.

ai.onnx 27 and 28 widened types and defined a few corners that 26 left open. An operator that is
wholly new there has a body in ONNX's own words and needs nothing here.
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


def _same(app: Application) -> Application:
    return app


def _through_float32(app: Application) -> Lifted:
    """bfloat16 by way of float32, which holds each of its numbers."""
    narrow = DTYPES["bfloat16"]
    if all(x is None or x.dtype != narrow for x in app.inputs):
        return app
    wide = [x.cast(float32) if x is not None and x.dtype == narrow else x for x in app.inputs]
    row = recorder().table["", app.op]
    outputs = recorder().apply(row, wide, app.attrs, outputs=app.outputs)
    return tuple(y.cast(narrow) if y.dtype == float32 else y for y in outputs)


def _celu(app: Application) -> Lifted:
    """Narrow floats by way of float32, the one type that opset 12 takes."""
    x = app.operand(0)
    if x.dtype == float32:
        return app
    return (emit("Celu", x.cast(float32), **app.attrs).cast(x.dtype),)


def _mod(app: Application) -> Lifted:
    """Floats with fmod=0: the remainder has the sign of the divisor, zeros among them."""
    a, b = app.operand(0), app.operand(1)
    if app.attr("fmod", 0) or not a.dtype.is_float:
        return app
    rest = emit("Mod", a, b, fmod=1)
    zero = as_tensor(np.zeros((), a.dtype.numpy))
    moved = emit(
        "And", emit("Less", rest * emit("Sign", b), zero), emit("Not", emit("IsNaN", rest))
    )
    signed = emit("Where", moved, rest + b, rest)
    return (emit("Where", emit("Equal", rest, zero), zero * emit("Sign", b), signed),)


def _range(app: Application) -> Lifted:
    """float16 and bfloat16 are counted in float32."""
    dtype = app.operand(0).dtype
    if dtype not in _NARROW:
        return app.without("stash_type")
    if app.attr("stash_type", 1) != 1:
        raise InvalidInput("Range counts in float32; stash_type=1 says that")
    wide = [app.operand(i).cast(float32) for i in range(3)]
    return (emit("Range", *wide).cast(dtype),)


def _bit_shift(app: Application) -> Lifted:
    """Signed numbers: to the right with the sign, to the left by the bits alone."""
    x, y = app.operand(0), app.operand(1)
    if x.dtype.kind != "int":
        return app
    bits, bare = x.dtype.bits, DTYPES[f"u{x.dtype.name}"]
    minus = as_tensor(np.array(-1, x.dtype.numpy))
    zero = as_tensor(np.zeros((), x.dtype.numpy))
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
    positive = emit("Where", low, minus - x, x)  # ~x of a negative x
    moved = emit("BitShift", positive.cast(bare), by, direction="RIGHT").cast(x.dtype)
    full = emit("Where", low, minus, zero)
    return (emit("Where", inside, emit("Where", low, minus - moved, moved), full),)


def _as_bits(x: Tensor, dtype: DType) -> Tensor:
    return emit("BitCast", x, to=dtype.onnx)


def _space_to_depth(app: Application) -> Lifted:
    """CRD: the block's place varies slower than the channel it came from."""
    if app.attr("mode", "DCR") == "DCR":
        return app.without("mode")
    x, b = app.operand(0), int(app.attr("blocksize"))
    n, c, h, w = x.shape
    parts = x.reshape(n, c, h // b, b, w // b, b).transpose(0, 1, 3, 5, 2, 4)
    return (parts.reshape(n, c * (b * b), h // b, w // b),)


NEWER: Final[Mapping[tuple[str, int], Callable[[Application], Any]]] = {
    ("BitShift", 28): _bit_shift,
    ("Cast", 28): _same,
    ("Celu", 28): _celu,
    ("Compress", 28): _through_float32,
    ("DepthToSpace", 28): _same,
    ("DequantizeLinear", 28): _same,
    ("Einsum", 28): _through_float32,
    ("Mod", 28): _mod,
    ("OneHot", 28): _through_float32,
    ("Optional", 28): _same,
    ("OptionalGetElement", 28): _same,
    ("OptionalHasElement", 28): _same,
    ("QuantizeLinear", 28): _same,
    ("Range", 27): _range,
    ("ReduceLogSum", 28): _same,
    ("ReduceLogSumExp", 28): _same,
    ("ReverseSequence", 28): _through_float32,
    ("SpaceToDepth", 28): _space_to_depth,
    ("Unique", 28): _through_float32,
}
"""By operator and version: what an application of the newer definition is in the IR's."""


def as_meant(app: Application, opset: int) -> Lifted:
    """The application in the IR's definition; refused where that does not say the same."""
    rule = NEWER.get((app.op, app.since))
    if rule is None:
        raise InvalidInput(
            f"{app.op} is defined anew in opset {app.since} (the model has {opset}); export the "
            "model with an opset up to 26"
        )
    lifted: Lifted = rule(app)
    return lifted
