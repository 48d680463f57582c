"""Sizes that a graph computes from shapes, followed symbolically while it is imported.

`Shape` of a tensor whose sizes are symbols is a vector of symbols; the integer arithmetic on it is
done here on `Dim`s, so a Reshape to `Concat(Shape(x)[0], -1)` keeps its symbol. Contents are numpy
arrays of objects: ints, bools and dimensions. What cannot be decided for every size is not folded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
"""Elements of a constant that is computed at import, so that sizes behind it are known."""


class _Open(Exception):
    """Two sizes that compare differently for different values of their symbols."""


def symbolic(contents: Array) -> bool:
    """Whether a size with a symbol is among the contents."""
    return any(isinstance(d, Expr) for d in contents.flat)


def fold(op: str, operands: Sequence[Array | None], attrs: Mapping[str, Any]) -> Array | None:
    """What `op` gives on known contents; None where that is not known for every size."""
    rule = _RULES.get(op)
    if rule is None:
        return None
    try:
        contents = np.asarray(rule(*operands, **attrs), dtype=object)
    except (_Open, InvalidInput, ValueError, TypeError, IndexError, ZeroDivisionError):
        return None
    return contents if contents.size <= MAX_CONTENTS else None


def _never_negative(dim: Dim) -> bool:
    """Whether every term is surely >= 0; symbols stand for sizes, which are."""
    if isinstance(dim, int):
        return dim >= 0
    return all(c >= 0 and all(_atom_is(a) for a, _ in monomial) for monomial, c in dim.terms)


def _atom_is(atom: str | FloorDiv) -> bool:
    return isinstance(atom, str) or (
        _never_negative(atom.numerator) and _never_negative(atom.denominator)
    )


def _order(a: Dim, b: Dim) -> int:
    """-1, 0 or 1 as a < b, a == b or a > b for all sizes."""
    difference = a - b
    if isinstance(difference, int):
        return (difference > 0) - (difference < 0)
    if _never_negative(difference - 1):
        return 1
    if _never_negative(-difference - 1):
        return -1
    raise _Open


def _at_least(a: Dim, b: Dim) -> bool:
    """Whether a >= b for all sizes, or surely not."""
    return _never_negative(a - b) or _order(a, b) >= 0


def _quotient(a: Dim, b: Dim) -> Dim:
    """ONNX divides towards zero, which is the floor where nothing is negative.

    Exporters write the windows of a strided convolution as (H - 1) / stride + 1, so the sizes of
    inputs in a numerator are taken to be at least 1: an empty plane has no windows. A size that
    only data decide is often 0 and is not.
    """
    is_count = isinstance(b, int) and b > 0 and not is_open(a)
    if is_count and _never_negative(_of_nonempty(a)):
        return floor_div(a, b)
    if isinstance(a, int) and isinstance(b, int):
        return int(a / b) if b else _no()
    if _never_negative(a) and _never_negative(b):
        return floor_div(a, b)
    raise _Open


def _of_nonempty(dim: Dim) -> Dim:
    """The size with every symbol counted from 1."""
    return substitute(dim, {name: symbol(name) + 1 for name in symbols(dim)})


def _remainder(a: Dim, b: Dim) -> Dim:
    return a - floor_div(a, b) * b


def _no() -> int:
    raise _Open


def _larger(a: Dim, b: Dim) -> Dim:
    return a if _at_least(a, b) else b


def _smaller(a: Dim, b: Dim) -> Dim:
    return b if _at_least(a, b) else a


def _elementwise(f: Callable[..., Any]) -> Callable[..., Array]:
    applied = np.frompyfunc(f, f.__code__.co_argcount, 1)

    def rule(*operands: Array, **_: Any) -> Array:
        applied_to: Array = np.asarray(applied(*operands), dtype=object)
        return applied_to

    return rule


def _ints(operand: Array | None) -> list[int]:
    if operand is None or symbolic(operand):
        raise _Open
    return [int(i) for i in operand.flat]


def _reduced(f: Callable[[Any, Any], Any], start: Any) -> Callable[..., Any]:
    def rule(x: Array, axes: Array | None = None, *, keepdims: int = 1, **_: Any) -> Any:
        if x.ndim != 1 or (axes is not None and _ints(axes) not in ([0], [-1])):
            raise _Open
        total = start if start is not None or not x.size else x[0]
        for d in x[0 if start is not None else 1 :]:
            total = f(total, d)
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
        index[axis] = slice(a, None if step < 0 and b < -x.shape[axis] else b, step)
    part: Array = x[tuple(index)]
    return part


def _cast(x: Array, *, to: int, **_: Any) -> Array:
    """Between whole numbers: sizes fit them all, or the model is wrong anyhow."""
    if to not in {6, 7, 12, 13}:
        raise _Open
    return x


def _where(condition: Array, x: Array, y: Array) -> Array:
    return _elementwise(lambda c, a, b: a if c else b)(condition, x, y)


def _reshape(x: Array, shape: Array, *, allowzero: int = 0) -> Array:
    wanted = [x.shape[i] if d == 0 and not allowzero else d for i, d in enumerate(_ints(shape))]
    return x.reshape(wanted)


def _gather(x: Array, indices: Array, *, axis: int = 0) -> Array:
    taken = np.array(_ints(indices), np.int64).reshape(indices.shape)
    picked: Array = np.asarray(np.take(x, taken, axis), dtype=object)
    return picked


ARRANGING: Final[Mapping[str, Callable[..., Any]]] = {
    "Identity": lambda x: x,
    "Cast": _cast,
    "Gather": _gather,
    "Slice": _slice,
    "Concat": lambda *xs, axis: np.concatenate(xs, axis),
    "Unsqueeze": lambda x, axes: np.expand_dims(x, tuple(_ints(axes))),
    "Squeeze": lambda x, axes=None: np.squeeze(x, None if axes is None else tuple(_ints(axes))),
}
"""Rules that only arrange the numbers of a vector; they also take one that is known in part."""
_RULES: Final[Mapping[str, Callable[..., Any]]] = {
    **ARRANGING,
    "Reshape": _reshape,
    "Flatten": lambda x, axis=1: x.reshape((int(np.prod(x.shape[:axis])), -1)),
    "Add": _elementwise(lambda a, b: a + b),
    "Sub": _elementwise(lambda a, b: a - b),
    "Mul": _elementwise(lambda a, b: a * b),
    "Div": _elementwise(_quotient),
    "Mod": _elementwise(_remainder),
    "Neg": _elementwise(lambda a: -a),
    "Max": lambda *xs: _folded(_larger, xs),
    "Min": lambda *xs: _folded(_smaller, xs),
    "Equal": _elementwise(lambda a, b: _order(a, b) == 0),
    "Less": _elementwise(lambda a, b: not _at_least(a, b)),
    "LessOrEqual": _elementwise(lambda a, b: _at_least(b, a)),
    "Greater": _elementwise(lambda a, b: not _at_least(b, a)),
    "GreaterOrEqual": _elementwise(_at_least),
    "Where": _where,
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
"""By operator, in the newest definition; operands are contents, attributes as in ONNX."""


def _folded(f: Callable[[Any, Any], Any], xs: Sequence[Array]) -> Array:
    total = xs[0]
    for x in xs[1:]:
        total = _elementwise(f)(total, x)
    return total
