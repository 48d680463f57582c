"""Rows over the bits of integers and of other element types."""

from __future__ import annotations

from typing import Any

import numpy as np

from triplane.unified_ir.ir.types import TensorType, TypeMismatch, bool_
from triplane.unified_ir.ops.batching import elementwise
from triplane.unified_ir.ops.lowering import XlaContext
from triplane.unified_ir.ops.row import Op, OpCall, OpKind, dtype_attr
from triplane.unified_ir.ops.rows.arithmetic.elementwise import broadcast_same
from triplane.unified_ir.ops.rows.movement.structure import same
from triplane.unified_ir.ops.samples import fixed, ints, sample

_words = ints(0, 2**32, 5, dtype="uint32")
_pair = (sample(_words, _words),)


def _bitwise(name: str, f: Any) -> Op:
    return Op(name=name, kind=OpKind.ELEMENTWISE, infer=broadcast_same, reference=f, samples=_pair)


# fmt: off
bitwise_and = _bitwise("BitwiseAnd", np.bitwise_and)
bitwise_or = _bitwise("BitwiseOr", np.bitwise_or)
bitwise_xor = _bitwise("BitwiseXor", np.bitwise_xor)
bitwise_not = Op(name="BitwiseNot", kind=OpKind.ELEMENTWISE, infer=same, reference=np.invert,
                 batch=elementwise, samples=(sample(_words),))
# fmt: on

bit_shift = Op(
    name="BitShift",
    kind=OpKind.ELEMENTWISE,
    infer=broadcast_same,
    reference=lambda x, n, direction: x << n if direction == "LEFT" else x >> n,
    xla=lambda k, x, n, direction: (
        k.np.left_shift(x, n) if direction == "LEFT" else k.np.right_shift(x, n)
    ),
    samples=(
        sample(_words, fixed(7, "uint32"), direction="LEFT"),
        sample(_words, fixed(7, "uint32"), direction="RIGHT"),
    ),
)


def _bit_cast(call: OpCall) -> tuple[TensorType, ...]:
    x, wanted = call.type(0), dtype_attr(call.attrs["to"])
    if x.dtype.bits != wanted.bits:
        raise TypeMismatch(f"BitCast keeps the width of an element, got {x} to {wanted}")
    return (x.with_dtype(wanted),)


def _bit_cast_xla(k: XlaContext, x: Any, *, to: int) -> Any:
    """Take the bits; XLA does not read those of a bool, which are 0 or 1."""
    wanted = dtype_attr(to)
    bits = x.astype(np.uint8) if x.dtype == np.bool_ else x
    return bits != 0 if wanted == bool_ else k.lax.bitcast_convert_type(bits, wanted.numpy)


bit_cast = Op(
    name="BitCast",
    kind=OpKind.ELEMENTWISE,
    batch=elementwise,
    infer=_bit_cast,
    reference=lambda x, to: np.ascontiguousarray(x).view(dtype_attr(to).numpy).reshape(x.shape),
    xla=_bit_cast_xla,
    samples=(
        sample(lambda rng: rng.standard_normal((2, 3)).astype(np.float32), to=6),
        sample(_words, to=1),
    ),
)
"""The same bits as another element type of the same width; no gradient passes."""
