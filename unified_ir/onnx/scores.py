"""Shared parts of the classifiers and regressors of ai.onnx.ml: inputs, transforms, labels.

ONNX does not define the outputs of a classifier of two classes with one score. They are those of
onnxruntime here, and a case in which runtimes disagree is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.types import float32
from triplane.unified_ir.onnx.application import Application
from triplane.unified_ir.ops.tensor import Tensor, as_tensor, emit

_SMALL: Final = 1e-7
"""SOFTMAX_ZERO does not change scores of at most this size."""
_WINITZKI: Final = 0.147
"""The constant of Winitzki's approximation of the inverse error function, which PROBIT uses."""


def matrix(app: Application) -> Tensor:
    """Return the operand as (N, features) of floats; a vector is one row."""
    x = app.operand(0)
    if x.rank not in {1, 2}:
        raise InvalidInput(f"{app.op} takes a matrix or a vector, got {x.type}; reshape it")
    x = x if x.dtype.is_float else x.cast(float32)
    return x.reshape(1, x.shape[0]) if x.rank == 1 else x


def floats(app: Application, name: str) -> Any:
    """Return an attribute of floats as a vector."""
    return np.asarray(app.attr(name, ()), np.float32).reshape(-1)


def number(x: float) -> Tensor:
    """Return a float32 scalar."""
    return as_tensor(np.array(x, np.float32))


def labels(app: Application) -> Any:
    """Return the class labels, text or whole numbers."""
    for name, dtype in (("strings", object), ("int64s", np.int64), ("ints", np.int64)):
        names = app.attr(f"classlabels_{name}", ())
        if len(names):
            return np.array(list(names), dtype)
    raise InvalidInput(f"{app.op} has no class labels")


def labelled(scores: Tensor, names: Any) -> Tensor:
    """Return the (N,) labels of the largest score of each row."""
    best = emit("ArgMax", scores, axis=1, keepdims=0)
    return emit("Gather", as_tensor(names), best, axis=0)


def _softmax_zero(scores: Tensor) -> Tensor:
    """Apply softmax to the scores that are not zero; a zero score stays zero."""
    most = emit("ReduceMax", scores, np.array([1]), keepdims=1)
    counted = emit("Greater", emit("Abs", scores), number(_SMALL))
    powers = emit("Exp", scores - most)
    total = emit("ReduceSum", emit("Where", counted, powers, number(0.0)), np.array([1]))
    return emit("Where", counted, powers, scores * emit("Exp", -most)) / total


def _probit(scores: Tensor) -> Tensor:
    """Return sqrt(2) erfinv(2 s - 1), the inverse by Winitzki's formula (2008)."""
    # With x = 2 s - 1 and L = log(1 - x^2): erfinv(x)^2 = sqrt((2 / (pi a) + L / 2)^2 - L / a) - (2
    # / (pi a) + L / 2).
    x = scores * 2.0 - 1.0
    log = emit("Log", (1.0 - x) * (1.0 + x))
    v = log * 0.5 + 2.0 / (math.pi * _WINITZKI)
    size = emit("Sqrt", emit("Sqrt", v * v - log * (1.0 / _WINITZKI)) - v)
    return emit("Where", emit("Less", x, number(0.0)), -size, size) * math.sqrt(2.0)


TRANSFORMS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "NONE": lambda scores: scores,
    "LOGISTIC": lambda scores: emit("Sigmoid", scores),
    "SOFTMAX": lambda scores: emit("Softmax", scores, axis=1),
    "SOFTMAX_ZERO": _softmax_zero,
    "PROBIT": _probit,
}
"""Transforms of several scores by name."""

COMPARE: Final[Mapping[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "BRANCH_LEQ": lambda x, v: emit("LessOrEqual", x, v),
    "BRANCH_LT": lambda x, v: emit("Less", x, v),
    "BRANCH_GTE": lambda x, v: emit("GreaterOrEqual", x, v),
    "BRANCH_GT": lambda x, v: emit("Greater", x, v),
    "BRANCH_EQ": lambda x, v: emit("Equal", x, v),
    "BRANCH_NEQ": lambda x, v: emit("Not", emit("Equal", x, v)),
}
"""Splits of trees by the name of their mode, in the order of the numbers that TreeEnsemble uses."""


def transform_of(app: Application) -> str:
    """Return the name of a node's transform."""
    name = str(app.attr("post_transform", "NONE"))
    if name not in TRANSFORMS:
        raise InvalidInput(
            f"post_transform {name!r} is not known; known are {', '.join(TRANSFORMS)}"
        )
    return name


def transformed(app: Application, scores: Tensor) -> Tensor:
    """Return scores of several classes or targets after the node's transform."""
    return TRANSFORMS[transform_of(app)](scores)


def regressed(app: Application, sums: Tensor, bias: Any, targets: int) -> Sequence[Tensor]:
    """Return a regressor's output: (N, targets) sums plus a bias per target, transformed."""
    if len(bias) not in {0, targets}:
        raise InvalidInput(f"it has {len(bias)} biases for {targets} targets")
    sums = (sums + as_tensor(bias.astype(sums.dtype.numpy)) if len(bias) else sums).cast(float32)
    if targets == 1 and transform_of(app) not in {"NONE", "PROBIT"}:
        return (sums,)  # as onnxruntime does
    return (transformed(app, sums),)


def chosen(truth: Tensor, names: Any) -> Tensor:
    """Return `names[1]` where a truth of shape (N, 1) holds, else `names[0]`."""
    index = truth.cast("int64").reshape(-1)
    return emit("Gather", as_tensor(names), index, axis=0)


def two_scores(app: Application, score: Tensor, *, complement: bool = True) -> Tensor:
    """Return (N, 1) scores s of the second of two classes as (1 - s, s), or as (-s, s)."""
    if transform_of(app) == "PROBIT":
        raise InvalidInput("one score for two labels has no PROBIT; export a score for each label")
    if transform_of(app) == "LOGISTIC":
        return emit("Sigmoid", opposed(score))
    return emit("Concat", 1.0 - score, score, axis=1) if complement else opposed(score)


def opposed(scores: Tensor) -> Tensor:
    """Return (N, 1) scores s as (-s, s)."""
    return emit("Concat", -scores, scores, axis=1)
