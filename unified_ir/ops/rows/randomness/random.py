"""Random numbers as a function of a key and a counter, equal on every engine.

The generator is Threefry-2x32 with 20 rounds (Salmon et al. 2011, "Parallel random numbers: as easy
as 1, 2, 3"), written in 32-bit integer operators. A key is uint32[2]. The owner of a key replaces
it by `next_key` after each draw, so a run resumes exactly from its saved keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.dims import Dim, ceil_div, product
from triplane.unified_ir.ir.types import TensorType, float32, uint32
from triplane.unified_ir.ops.lowering import XlaContext
from triplane.unified_ir.ops.row import DOMAIN, Op, OpCall, OpKind
from triplane.unified_ir.ops.rows.arithmetic.bits import bit_shift, bitwise_or
from triplane.unified_ir.ops.rows.arithmetic.elementwise import cos, log, sin, sqrt
from triplane.unified_ir.ops.rows.movement.indexing import arange
from triplane.unified_ir.ops.rows.movement.structure import concat, sizes_of, slice_axis
from triplane.unified_ir.ops.samples import fixed, ints, sample
from triplane.unified_ir.ops.tensor import Tensor

ROTATIONS: Final = ((13, 15, 26, 6), (17, 29, 16, 24))
# The constant of Threefry's key schedule (Skein's C240, cut to 32 bits), against all-zero keys.
PARITY: Final = 0x1BD11BDA
ROUNDS: Final = 20


def _threefry_types(call: OpCall) -> tuple[TensorType, ...]:
    if call.type(0) != TensorType(uint32, (2,)):
        raise InvalidInput(f"a random key must be uint32[2], got {call.type(0)}")
    if call.type(1).shape != call.type(2).shape:
        raise InvalidInput(f"counter words differ in shape: {call.type(1)} and {call.type(2)}")
    return (call.type(1), call.type(2))[: call.outputs]


def _rotate(x: Tensor, n: int) -> Tensor:
    left = bit_shift(x, np.uint32(n), direction="LEFT")
    return bitwise_or(left, bit_shift(x, np.uint32(32 - n), direction="RIGHT"))


def _rounds(key: Sequence[Any], x0: Any, x1: Any, rotate: Callable[[Any, int], Any]) -> list[Any]:
    """Run the rounds on tensors or on numpy arrays, whose words wrap modulo 2^32."""
    schedule = [*key, key[0] ^ key[1] ^ np.uint32(PARITY)]
    x0, x1 = x0 + schedule[0], x1 + schedule[1]
    for group in range(ROUNDS // 4):
        for n in ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = rotate(x1, n) ^ x0
        # A subkey is added every four rounds, rotating through the key words and their parity.
        x0 = x0 + schedule[(group + 1) % 3]
        x1 = x1 + (schedule[(group + 2) % 3] + np.uint32(group + 1))
    return [x0, x1]


def _rotate_words(x: Any, n: int) -> Any:
    return x << np.uint32(n) | x >> np.uint32(32 - n)


def _threefry_kernel(key: Any, x0: Any, x1: Any) -> Any:
    # Arrays of one element instead of scalars: numpy warns when a scalar overflows.
    words = [np.full(1, word, np.uint32) for word in key]
    return tuple(_rounds(words, x0, x1, _rotate_words))


def _threefry_xla(k: XlaContext, key: Any, x0: Any, x1: Any) -> Any:
    words, x0, x1 = (k.np.asarray(x) for x in (key, x0, x1))
    return _rounds([words[0], words[1]], x0, x1, _rotate_words)


_words = ints(0, 2**32, 5, dtype="uint32")
threefry = Op(
    name="Threefry2x32",
    computes=(
        "two uint32 words for each counter (x0, x1): 20 rounds of Threefry-2x32 under the "
        "key uint32[2]"
    ),
    kind=OpKind.RANDOM,
    domain=DOMAIN,
    operands=("K", "T", "T"),
    infer=_threefry_types,
    reference=_threefry_kernel,
    body=lambda key, x0, x1: _rounds((key[0], key[1]), x0, x1, _rotate),
    xla=_threefry_xla,
    samples=(
        sample(ints(0, 2**32, 2, dtype="uint32"), _words, _words, outputs=2),
        sample(fixed([0, 0], "uint32"), fixed([0], "uint32"), fixed([0], "uint32"), outputs=2),
    ),
)


def _blocks(key: Tensor, n: Dim) -> tuple[Tensor, ...]:
    """Return two vectors of words, together at least `n`; block i has the counter (0, i)."""
    low = arange(ceil_div(n, 2)).cast(uint32)
    return threefry.all_outputs(key, low * np.uint32(0), low, outputs=2)


def _shaped(pair: Sequence[Tensor], n: Dim, shape: Sequence[Dim]) -> Tensor:
    """Return the first `n` elements of both vectors in this shape."""
    both = concat(pair)
    return (both if n == both.shape[0] else slice_axis(both, 0, 0, n)).reshape(tuple(shape))


def _fraction(bits: Tensor) -> Tensor:
    """uint32 -> float32 in [0, 1)."""
    # The upper 24 bits: float32 has 24 bits of precision, so every multiple of 2^-24 is exact.
    return bit_shift(bits, np.uint32(8), direction="RIGHT").cast(float32) * 2.0**-24


def random_bits(key: Tensor, shape: Sequence[Dim] | Dim) -> Tensor:
    """key: uint32[2] -> uint32 of `shape`, uniform; block i, of counter (0, i), gives two."""
    sizes = sizes_of(shape)
    n = product(sizes)
    return _shaped(_blocks(key, n), n, sizes)


def random_uniform(key: Tensor, shape: Sequence[Dim] | Dim) -> Tensor:
    """key: uint32[2] -> float32 of `shape`, uniform on multiples of 2^-24 in [0, 1)."""
    return _fraction(random_bits(key, shape))


def random_normal(key: Tensor, shape: Sequence[Dim] | Dim) -> Tensor:
    """key: uint32[2] -> float32 of `shape`, normal with mean 0 and variance 1.

    Two words of a block give two numbers, r cos(a) and r sin(a) with r = sqrt(-2 ln(1 - u)) and
    a = 2 pi v (Box and Muller 1958), so |y| < 5.8. Engines agree up to the rounding of cos and ln.
    """
    sizes = sizes_of(shape)
    n = product(sizes)
    u, v = map(_fraction, _blocks(key, n))
    radius, angle = sqrt(log(1.0 - u) * -2.0), v * (2.0 * math.pi)
    return _shaped((radius * cos(angle), radius * sin(angle)), n, sizes)


def next_key(key: Tensor) -> Tensor:
    """Return the key after this one: block (2^32-1, 2^32-1), which no draw uses."""
    last = np.full(1, 2**32 - 1, np.uint32)
    return concat(threefry.all_outputs(key, last, last, outputs=2))


def fold_in(key: Tensor, number: int) -> Tensor:
    """Return a key derived from a key and a number in 0..2^32-1: block (2^32-2, number).

    Derived keys differ from each other, from the key and from those that `next_key` gives. Use it
    where one key must serve several draws.
    """
    kind: type = type(number)
    if not issubclass(kind, (int, np.integer)) or not 0 <= number < 2**32:
        raise InvalidInput(f"fold_in takes a whole number in 0..2^32-1, got {number!r:.80}")
    high, low = np.full(1, 2**32 - 2, np.uint32), np.full(1, number, np.uint32)
    return concat(threefry.all_outputs(key, high, low, outputs=2))


def dropout(x: Tensor, key: Tensor, p_drop: float) -> Tensor:
    """Zero each element with probability `p_drop`, and scale the others by 1 / (1 - p_drop)."""
    if not 0 <= p_drop < 1:
        raise InvalidInput(f"p_drop must be in [0, 1), got {p_drop}")
    if p_drop == 0:
        return x
    keep = random_uniform(key, x.shape) >= p_drop
    return x * (keep.cast(x.dtype) * (1 / (1 - p_drop)))
