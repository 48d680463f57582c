"""What classifiers and regressors of ai.onnx.ml share: inputs, transforms of scores, labels.

ONNX leaves open what a classifier of two classes with one score gives; here it is what onnxruntime
gives, and a case that the two read differently is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.types import float32
from triplane.unified_ir.onnx.application import Application
from triplane.unified_ir.ops.tensor import Tensor, as_tensor, emit

_SMALL: Final = 1e-7
"""SOFTMAX_ZERO leaves scores of at most this size as they are."""
_WINITZKI: Final = 0.147
"""The constant of Winitzki's approximation of the inverse error function, which PROBIT uses."""


def matrix(app: Application) -> Tensor:
    """The operand as (N, features) of floats; a vector is one row."""
    x = app.operand(0)
    if x.rank not in {1, 2}:
        raise InvalidInput(f"{app.op} takes a matrix or a vector, got {x.type}; reshape it")
    x = x if x.dtype.is_float else x.cast(float32)
    return x.reshape(1, x.shape[0]) if x.rank == 1 else x


def floats(app: Application, name: str, like: Any = np.float32) -> Any:
    """An attribute of floats as an array."""
    return np.asarray(app.attr(name, ()), like).reshape(-1)


def labels(app: Application) -> Any:
    """The class labels, text or whole numbers."""
    for name, dtype in (("strings", object), ("int64s", np.int64), ("ints", np.int64)):
        labels_given = app.attr(f"classlabels_{name}")
        if labels_given is not None and len(labels_given):
            return np.array(list(labels_given), dtype)
    raise InvalidInput(f"{app.op} has no class labels")


def labelled(scores: Tensor, names: Any) -> Tensor:
    """(N,) labels of the largest score of each row."""
    return at(names, emit("ArgMax", scores, axis=1, keepdims=0))


def at(names: Any, indices: Tensor) -> Tensor:
    """`names[indices]`."""
    return emit("Gather", as_tensor(names), indices, axis=0)


def chosen(truth: Tensor, names: Any) -> Tensor:
    """`names[1]` where a truth of shape (N, 1) holds, else `names[0]`."""
    return at(names, truth.cast("int64").reshape(-1))


def _none(scores: Tensor) -> Tensor:
    return scores


def _logistic(scores: Tensor) -> Tensor:
    return emit("Sigmoid", scores)


def _softmax(scores: Tensor) -> Tensor:
    return emit("Softmax", scores, axis=1)


def _softmax_zero(scores: Tensor) -> Tensor:
    """A softmax of the scores that are not zero; the others give what zero times e gives."""
    most = emit("ReduceMax", scores, np.array([1]), keepdims=1)
    counted = emit("Greater", emit("Abs", scores), _number(_SMALL))
    powers = emit("Exp", scores - most)
    total = emit("ReduceSum", emit("Where", counted, powers, _number(0.0)), np.array([1]))
    return emit("Where", counted, powers, scores * emit("Exp", -most)) / total


def _probit(scores: Tensor) -> Tensor:
    """sqrt(2) erfinv(2 s - 1), the inverse by Winitzki's formula (2008)."""
    x = scores * 2.0 - 1.0
    log = emit("Log", (1.0 - x) * (1.0 + x))
    v = log * 0.5 + 2.0 / (math.pi * _WINITZKI)
    size = emit("Sqrt", emit("Sqrt", v * v - log * (1.0 / _WINITZKI)) - v)
    return emit("Where", emit("Less", x, _number(0.0)), -size, size) * math.sqrt(2.0)


def _number(x: float) -> Tensor:
    return as_tensor(np.array(x, np.float32))


TRANSFORMS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "NONE": _none,
    "LOGISTIC": _logistic,
    "SOFTMAX": _softmax,
    "SOFTMAX_ZERO": _softmax_zero,
    "PROBIT": _probit,
}
"""What becomes of several scores, by the name of the transform."""


def transform_of(app: Application) -> str:
    """The transform that a node asks for."""
    name = str(app.attr("post_transform", "NONE"))
    if name not in TRANSFORMS:
        raise InvalidInput(
            f"post_transform {name!r} is not known; known are {', '.join(TRANSFORMS)}"
        )
    return name


def transformed(app: Application, scores: Tensor) -> Tensor:
    """Scores of several classes or targets after the node's transform."""
    return TRANSFORMS[transform_of(app)](scores)


def complemented(scores: Tensor) -> Tensor:
    """(N, 1) scores s as (1 - s, s)."""
    return emit("Concat", 1.0 - scores, scores, axis=1)


def opposed(scores: Tensor) -> Tensor:
    """(N, 1) scores s as (-s, s)."""
    return emit("Concat", -scores, scores, axis=1)
