"""Operators of other ONNX domains, expressed in existing rows: labels, thresholds, optimizers.

Each rule returns the values of one node; its docstring is the definition that it follows. An
operator without a rule here and without a body in ONNX is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.types import float32, int64
from triplane.unified_ir.onnx.application import Application
from triplane.unified_ir.onnx.forests import tree_classifier, tree_regressor
from triplane.unified_ir.onnx.linear import (
    linear_classifier,
    linear_regressor,
    normalizer,
    scaler,
    svm_classifier,
    svm_regressor,
)
from triplane.unified_ir.onnx.trees import tree_ensemble
from triplane.unified_ir.ops.tensor import Tensor, as_tensor, emit

MAX_KEYS: Final = 65_536
"""The most keys of an encoder; each element is compared with every key."""

ML: Final = "ai.onnx.ml"
TRAINING: Final = "ai.onnx.preview.training"

Foreign = Callable[[Application], Sequence[Tensor]]


def _scalar(x: float, like: Tensor) -> Tensor:
    return as_tensor(np.array(x, like.dtype.numpy))


def _binarizer(app: Application) -> Sequence[Tensor]:
    """Return 1 where x > threshold, else 0."""
    x = app.operand(0)
    return (emit("Greater", x, _scalar(app.attr("threshold", 0.0), x)).cast(x.dtype),)


def _features(app: Application) -> Sequence[Tensor]:
    """Return x[..., indices], with an axis in front of a vector."""
    x, indices = app.operand(0), app.operand(1).reshape(-1)
    taken = emit("Gather", x, indices, axis=x.rank - 1)
    return (taken.reshape(1, *taken.shape) if x.rank == 1 else taken,)


def _label_encoder(app: Application) -> Sequence[Tensor]:
    """Return values[k] where x equals keys[k] (NaN equals NaN), else the default."""
    x = app.operand(0)
    keys, values = _column(app, "keys"), _column(app, "values")
    if len(keys) != len(values) or not 0 < len(keys) <= MAX_KEYS:
        raise InvalidInput(f"it has {len(keys)} keys and {len(values)} values")
    # (..., 1) against (keys,): every element is compared with every key.
    wide = emit("Unsqueeze", x, np.array([-1]))
    hit = emit("Equal", wide, as_tensor(keys))
    if keys.dtype.kind == "f" and np.isnan(keys).any():
        hit = emit("Or", hit, emit("And", emit("IsNaN", wide), as_tensor(np.isnan(keys))))
    # ArgMax takes the first of equal keys, and 0 if none matches; `position` tells these two apart.
    chosen = emit("ArgMax", hit.cast(float32), axis=-1, keepdims=0)
    position = emit("ReduceMax", hit.cast(int64), np.array([-1]), keepdims=0) > 0
    # The default is the row behind the last key.
    table = np.append(values, _default(app, values))
    at = emit("Where", position, chosen, as_tensor(np.array(len(keys), np.int64)))
    return (emit("Gather", as_tensor(table), at, axis=0),)


def _zip_map(_: Application) -> Sequence[Tensor]:
    """Refuse a list of maps, which is not a tensor."""
    raise InvalidInput(
        "it returns a list of maps, not a tensor; export with the option zipmap=False, or name the "
        "value that it reads as an output (outputs=, --output)"
    )


_COLUMNS: Final[Mapping[str, Any]] = {
    "tensor": None, "strings": object, "int64s": np.int64, "floats": np.float32,
}  # fmt: skip
_DEFAULTS: Final[Mapping[str, Any]] = {"O": ("string", "_Unused"), "i": ("int64", -1),
                                       "f": ("float", -0.0)}  # fmt: skip


def _column(app: Application, name: str) -> Any:
    for kind, dtype in _COLUMNS.items():
        if f"{name}_{kind}" in app.attrs:
            return np.asarray(app.attrs[f"{name}_{kind}"], dtype).reshape(-1)
    raise InvalidInput(f"it has no attribute {name}_*")


def _default(app: Application, values: Any) -> Any:
    if "default_tensor" in app.attrs:
        return np.asarray(app.attrs["default_tensor"], values.dtype).reshape(())
    kind, unused = _DEFAULTS[values.dtype.kind]
    return np.array(app.attr(f"default_{kind}", unused), values.dtype)


def _optimizer(kinds: int, update: Callable[..., tuple[Tensor, ...]]) -> Foreign:
    """Return the rule of an optimizer from the update of one weight.

    The operands after rate and step are all weights, then all gradients, then each kind of state.
    """

    def rule(app: Application) -> Sequence[Tensor]:
        rate, step, *rest = (app.operand(i) for i in range(len(app.inputs)))
        if not rest or len(rest) % kinds:
            count = len(rest)
            raise InvalidInput(f"{app.op} takes {kinds} operands per tensor after two, got {count}")
        n, rows = len(rest) // kinds, []
        for x, g, *state in zip(*(rest[k * n : (k + 1) * n] for k in range(kinds)), strict=True):
            # The gradient of norm_coefficient / 2 |x|^2.
            g = _scalar(app.attr("norm_coefficient", 0.0), x) * x + g
            rows.append(update(app, rate, step, x, g, *state))
        return [x for column in zip(*rows, strict=True) for x in column]

    return rule


def _is_later(step: Tensor) -> Tensor:
    """Return whether a step is not the first."""
    return emit("Greater", step, as_tensor(np.array(0, np.int64)))


def _momentum(
    app: Application, rate: Tensor, step: Tensor, x: Tensor, g: Tensor, v: Tensor
) -> tuple[Tensor, ...]:
    """v' = alpha v + b g, b = beta after the first step, else 1; x' = x - r v' (or Nesterov's)."""
    alpha = app.attr("alpha")
    later = _is_later(step)
    # ONNX's Momentum: in the first step (T = 0) the gradient enters with factor 1.
    beta = emit("Where", later, _scalar(app.attr("beta"), x), _scalar(1.0, x))
    velocity = v * _scalar(alpha, x) + beta * g
    nesterov = app.attr("mode") == "nesterov"
    move = g + _scalar(alpha, x) * velocity if nesterov else velocity
    return x - rate * move, velocity


def _adagrad(
    app: Application, rate: Tensor, step: Tensor, x: Tensor, g: Tensor, h: Tensor
) -> tuple[Tensor, ...]:
    """h' = h + g^2; x' = x - r / (1 + t decay) g / (sqrt(h') + eps)."""
    slowed = rate / (step.cast(x.dtype) * _scalar(app.attr("decay_factor", 0.0), x) + 1.0)
    squares = h + g * g
    wide = emit("Sqrt", squares) + _scalar(app.attr("epsilon", 0.0), x)
    return x - slowed * g / wide, squares


def _adam(
    app: Application, rate: Tensor, step: Tensor, x: Tensor, g: Tensor, *state: Tensor
) -> tuple[Tensor, ...]:
    """Update as Kingma and Ba 2015, the rate corrected from the second step on, then decay."""
    v, h = state
    alpha, beta = app.attr("alpha", 0.9), app.attr("beta", 0.999)
    mean = v * _scalar(alpha, x) + g * _scalar(1.0 - alpha, x)
    squares = h * _scalar(beta, x) + g * g * _scalar(1.0 - beta, x)
    t = step.cast(x.dtype)
    # r sqrt(1 - beta^t) / (1 - alpha^t); at t = 0 this would divide by zero.
    corrected = rate * emit("Sqrt", _left(beta, t, x)) / _left(alpha, t, x)
    used = emit("Where", _is_later(step), corrected, rate)
    moved = x - used * mean / (emit("Sqrt", squares) + _scalar(app.attr("epsilon", 0.0), x))
    return moved * _scalar(1.0 - app.attr("norm_coefficient_post", 0.0), x), mean, squares


def _left(base: float, t: Tensor, x: Tensor) -> Tensor:
    return 1.0 - emit("Pow", _scalar(base, x), t)


FOREIGN: Final[Mapping[tuple[str, str], Foreign]] = {
    (ML, "ArrayFeatureExtractor"): _features,
    (ML, "Binarizer"): _binarizer,
    (ML, "LabelEncoder"): _label_encoder,
    (ML, "LinearClassifier"): linear_classifier,
    (ML, "LinearRegressor"): linear_regressor,
    (ML, "Normalizer"): normalizer,
    (ML, "SVMClassifier"): svm_classifier,
    (ML, "SVMRegressor"): svm_regressor,
    (ML, "Scaler"): scaler,
    (ML, "TreeEnsemble"): tree_ensemble,
    (ML, "TreeEnsembleClassifier"): tree_classifier,
    (ML, "TreeEnsembleRegressor"): tree_regressor,
    (ML, "ZipMap"): _zip_map,
    (TRAINING, "Adagrad"): _optimizer(3, _adagrad),
    (TRAINING, "Adam"): _optimizer(4, _adam),
    (TRAINING, "Momentum"): _optimizer(3, _momentum),
}
"""Rules by domain and operator."""
