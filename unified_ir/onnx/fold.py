"""Sizes that a graph computes from shapes, followed symbolically while it is imported.

`Shape` of a tensor whose sizes are symbols is a vector of symbols; integer arithmetic on it is done
here on `Dim`s, so a Reshape to `Concat(Shape(x)[0], -1)` keeps its symbol. Contents are numpy
arrays of objects: ints, bools and dimensions. An expression whose value depends on the sizes in a
way that cannot be decided here is not folded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.dims import (
    Dim,
    Expr,
    FloorDiv,
    floor_div,
    is_open,
    substitute,
    symbol,
    symbols,
)
from triplane.unified_ir.ir.graph import Array

MAX_CONTENTS: Final = 64
"""Longer vectors are never sizes: a shape has 16 axes, bounds two per axis."""
MAX_FOLDED: Final = 1024
"""The most elements of a constant that is computed at import, so that sizes after it are known."""


class _Open(Exception):
    """Two sizes that compare differently for different values of their symbols."""


def symbolic(contents: Array) -> bool:
    """Return whether a size with a symbol is among the contents."""
    return any(isinstance(d, Expr) for d in contents.flat)


def fold(op: str, operands: Sequence[Array | None], attrs: Mapping[str, Any]) -> Array | None:
    """Return the result of `op` on known contents; None if it is not known for every size."""
    rule = _RULES.get(op)
    if rule is None:
        return None
    try:
        contents = np.asarray(rule(*operands, **attrs), dtype=object)
    except (_Open, InvalidInput, ValueError, TypeError, IndexError, ZeroDivisionError):
        return None
    return contents if contents.size <= MAX_CONTENTS else None


def _never_negative(dim: Dim) -> bool:
    """Return whether every term is certainly >= 0, as symbols are, which stand for sizes."""
    # A sufficient condition, not a necessary one: N*N - N is never negative either, but has a
    # negative term.
    if isinstance(dim, int):
        return dim >= 0
    if any(c < 0 for _, c in dim.terms):
        return False
    quotients = [a for monomial, _ in dim.terms for a, _ in monomial if isinstance(a, FloorDiv)]
    return all(_never_negative(d) for a in quotients for d in (a.numerator, a.denominator))


def _order(a: Dim, b: Dim) -> int:
    """Return -1, 0 or 1 as a < b, a == b or a > b for all sizes."""
    difference = a - b
    if isinstance(difference, int):
        return (difference > 0) - (difference < 0)
    if _never_negative(difference - 1):
        return 1
    if _never_negative(-difference - 1):
        return -1
    raise _Open


def _at_least(a: Dim, b: Dim) -> bool:
    """Return whether a >= b for all sizes."""
    return _never_negative(a - b) or _order(a, b) >= 0


def _quotient(a: Dim, b: Dim) -> Dim:
    """Divide as ONNX does, towards zero, which is the floor if nothing is negative.

    Exporters write the windows of a strided convolution as (H - 1) / stride + 1, so the sizes of
    inputs in a numerator are assumed to be at least 1: an empty plane has no windows. A
    data-dependent size is often 0, so this is not assumed of it.
    """
    if isinstance(b, int) and b > 0 and not is_open(a):
        # n = m + 1 with m >= 0: if the numerator is never negative in m, then division towards zero
        # is the floor for all n >= 1.
        nonempty = substitute(a, {name: symbol(name) + 1 for name in symbols(a)})
        if _never_negative(nonempty):
            return floor_div(a, b)
    if isinstance(a, int) and isinstance(b, int):
        quotient = abs(a) // abs(b)  # a float would be inexact above 2^53
        return quotient if (a < 0) == (b < 0) else -quotient
    if _never_negative(a) and _never_negative(b):
        return floor_div(a, b)
    raise _Open


def _larger(a: Dim, b: Dim) -> Dim:
    return a if _at_least(a, b) else b


def _smaller(a: Dim, b: Dim) -> Dim:
    return b if _at_least(a, b) else a


def _elementwise(f: Callable[..., Any]) -> Callable[..., Array]:
    # Object arrays, because numpy has no element type for symbolic sizes.
    applied = np.frompyfunc(f, f.__code__.co_argcount, 1)

    return lambda *operands, **_: np.asarray(applied(*operands), dtype=object)


def _ints(operand: Array | None) -> list[int]:
    if operand is None or symbolic(operand):
        raise _Open
    return [int(i) for i in operand.flat]


def _reduced(f: Callable[[Any, Any], Any], start: Any) -> Callable[..., Any]:
    def rule(x: Array, axes: Array | None = None, *, keepdims: int = 1, **_: Any) -> Any:
        if x.ndim != 1 or (axes is not None and _ints(axes) not in ([0], [-1])):
            raise _Open
        total = reduce(f, x if start is None else [start, *x])
        return np.array([total] if keepdims else total, dtype=object)

    return rule


def _slice(
    x: Array, starts: Array, ends: Array, axes: Array | None = None, steps: Array | None = None
) -> Array:
    index = [slice(None)] * x.ndim
    first, last = _ints(starts), _ints(ends)
    along = range(len(first)) if axes is None else _ints(axes)
    strides = [1] * len(first) if steps is None else _ints(steps)
    for a, b, axis, step in zip(first, last, along, strides, strict=True):
        # As in Slice's kernel: an end before the first element is None for Python.
        index[axis] = slice(a, None if step < 0 and b < -x.shape[axis] else b, step)
    part: Array = x[tuple(index)]
    return part


def _cast(x: Array, *, to: int, **_: Any) -> Array:
    """Cast between integer types; sizes fit all of them in a valid model."""
    # int32, int64, uint32 and uint64; in floats or narrow types a size may lose digits.
    if to not in {6, 7, 12, 13}:
        raise _Open
    return x


def _reshape(x: Array, shape: Array, *, allowzero: int = 0) -> Array:
    wanted = [x.shape[i] if d == 0 and not allowzero else d for i, d in enumerate(_ints(shape))]
    return x.reshape(wanted)


def _gather(x: Array, indices: Array, *, axis: int = 0) -> Array:
    taken = np.array(_ints(indices), np.int64).reshape(indices.shape)
    return np.asarray(np.take(x, taken, axis), dtype=object)


ARRANGING: Final[Mapping[str, Callable[..., Any]]] = {
    "Identity": lambda x: x,
    "Cast": _cast,
    "Gather": _gather,
    "Slice": _slice,
    "Concat": lambda *xs, axis: np.concatenate(xs, axis),
    "Unsqueeze": lambda x, axes: np.expand_dims(x, tuple(_ints(axes))),
    "Squeeze": lambda x, axes=None: np.squeeze(x, None if axes is None else tuple(_ints(axes))),
}
"""Rules that only rearrange the numbers of a vector, also of one that is known in part."""
_RULES: Final[Mapping[str, Callable[..., Any]]] = {
    **ARRANGING,
    "Reshape": _reshape,
    "Flatten": lambda x, axis=1: x.reshape((int(np.prod(x.shape[:axis])), -1)),
    "Add": _elementwise(lambda a, b: a + b),
    "Sub": _elementwise(lambda a, b: a - b),
    "Mul": _elementwise(lambda a, b: a * b),
    "Div": _elementwise(_quotient),
    "Mod": _elementwise(lambda a, b: a - floor_div(a, b) * b),
    "Neg": _elementwise(lambda a: -a),
    "Max": lambda *xs: reduce(_elementwise(_larger), xs),
    "Min": lambda *xs: reduce(_elementwise(_smaller), xs),
    "Equal": _elementwise(lambda a, b: _order(a, b) == 0),
    "Less": _elementwise(lambda a, b: not _at_least(a, b)),
    "LessOrEqual": _elementwise(lambda a, b: _at_least(b, a)),
    "Greater": _elementwise(lambda a, b: not _at_least(b, a)),
    "GreaterOrEqual": _elementwise(_at_least),
    "Where": _elementwise(lambda c, a, b: a if c else b),
    "ReduceProd": _reduced(lambda a, b: a * b, 1),
    "ReduceSum": _reduced(lambda a, b: a + b, 0),
    "ReduceMax": _reduced(_larger, None),
    "ReduceMin": _reduced(_smaller, None),
    "Expand": lambda x, shape: np.broadcast_to(
        x, np.broadcast_shapes(x.shape, tuple(_ints(shape)))
    ),
    "Tile": lambda x, repeats: np.tile(x, _ints(repeats)),
    "Transpose": lambda x, perm=None: np.transpose(x, perm),
}
"""Rules by operator, in the newest definition; operands are contents, attributes as in ONNX."""
