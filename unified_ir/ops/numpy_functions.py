"""numpy's functions on tensors: those that are operators become nodes, the others are refused.

A ufunc (`np.tanh`, `np.maximum`, and what `array + tensor` calls) has one meaning for each element,
and a row or an operator of `Tensor` has the same. Other functions of numpy take arguments that have
no counterpart (`out`, `order`, `ddof`), so a message names the function to use instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NoReturn

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ops.source import user_location

ROWS: Final[Mapping[str, str]] = {
    "absolute": "Abs", "add": "Add", "arccos": "Acos", "arccosh": "Acosh", "arcsin": "Asin",
    "arcsinh": "Asinh", "arctan": "Atan", "arctanh": "Atanh", "ceil": "Ceil", "cos": "Cos",
    "cosh": "Cosh", "equal": "Equal", "exp": "Exp", "floor": "Floor", "greater": "Greater",
    "greater_equal": "GreaterOrEqual", "isinf": "IsInf", "isnan": "IsNaN", "less": "Less",
    "less_equal": "LessOrEqual", "log": "Log", "logical_and": "And", "logical_not": "Not",
    "logical_or": "Or", "logical_xor": "Xor", "matmul": "MatMul", "maximum": "Max",
    "minimum": "Min", "multiply": "Mul", "negative": "Neg", "reciprocal": "Reciprocal",
    "rint": "Round", "sign": "Sign", "sin": "Sin", "sinh": "Sinh", "sqrt": "Sqrt",
    "subtract": "Sub", "tan": "Tan", "tanh": "Tanh",
}  # fmt: skip
"""ufunc -> the row of the same meaning."""

METHODS: Final[Mapping[str, tuple[str, str]]] = {
    "bitwise_and": ("__and__", "__rand__"),
    "bitwise_or": ("__or__", "__ror__"),
    "bitwise_xor": ("__xor__", "__rxor__"),
    "divide": ("__truediv__", "__rtruediv__"),
    "floor_divide": ("__floordiv__", "__rfloordiv__"),
    "invert": ("__invert__", ""),
    "not_equal": ("__ne__", "__ne__"),
    "positive": ("__pos__", ""),
    "power": ("__pow__", "__rpow__"),
    "remainder": ("__mod__", "__rmod__"),
}
"""ufunc -> the method of its first operand, if that is a tensor, and the one of its second."""

SAME_NAME: Final = frozenset({
    "all", "amax", "amin", "any", "arange", "argmax", "argmin", "argsort", "clip", "compress",
    "concat", "count_nonzero", "cumprod", "cumsum", "diag", "diagonal", "dot", "einsum", "exp2",
    "eye", "flip", "full", "full_like", "linspace", "log10", "log2", "mean", "meshgrid",
    "moveaxis", "nonzero", "ones", "ones_like", "outer", "pad", "prod", "repeat", "reshape",
    "roll", "sort", "split", "square", "squeeze", "stack", "std", "sum", "swapaxes", "tile",
    "trace", "transpose", "tril", "triu", "unique", "unstack", "var", "where", "zeros",
    "zeros_like",
})  # fmt: skip
"""Functions that `ops` has by numpy's name."""

OTHER_NAMES: Final[Mapping[str, str]] = {
    "broadcast_to": "expand", "concatenate": "concat", "expand_dims": "unsqueeze",
    "isfinite": "is_finite", "linalg.norm": "vector_norm", "max": "amax", "min": "amin",
    "round": "round_", "take": "gather",
}  # fmt: skip
"""Functions that `ops` has by another name."""


def check_ufunc(ufunc: Any, method: str, options: Mapping[str, Any]) -> str:
    """Return the name of a ufunc that is an operator; refuse others by the name to use instead."""
    name = str(ufunc.__name__)
    if "out" in options:
        raise InvalidInput(
            f"an array cannot take the values of a tensor in place{_here()}: write a = a + x in "
            "place of a += x, and leave out=... away"
        )
    if method != "__call__":
        raise InvalidInput(
            f"np.{name}.{method} takes no tensor{_here()}; use a method such as x.sum(), x.prod(), "
            "x.max() or x.cumsum(axis)"
        )
    if options:
        raise InvalidInput(
            f"np.{name} of a tensor takes no {', '.join(options)}{_here()}; leave it out"
        )
    if name not in ROWS and name not in METHODS:
        refuse(ufunc)
    return name


def refuse(function: Any) -> NoReturn:
    """Refuse a numpy function by the name of the one to use instead."""
    module = str(getattr(function, "__module__", None) or "")
    name = f"{module.removeprefix('numpy')}.{function.__name__}".strip(".")
    if name in SAME_NAME:
        instead = f"use ops.{name}"
    elif name in OTHER_NAMES:
        instead = f"use ops.{OTHER_NAMES[name]}"
    else:
        instead = "write it with functions of triplane.unified_ir.ops, or call it on arrays before"
    raise InvalidInput(f"np.{name} takes no tensor of a graph{_here()}; {instead}")


def _here() -> str:
    place = user_location()
    return f" (at {place})" if place else ""
