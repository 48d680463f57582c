"""Operators of other ONNX domains, said in the rows there are: labels, thresholds, optimizers.

Each rule gives the values of one node; its comment is the definition it follows. What has no rule
here and no body in ONNX's own words is refused by name.
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
"""Keys of an encoder; each element is compared with every one."""

ML: Final = "ai.onnx.ml"
TRAINING: Final = "ai.onnx.preview.training"

Foreign = Callable[[Application], Sequence[Tensor]]


def _scalar(x: float, like: Tensor) -> Tensor:
    return as_tensor(np.array(x, like.dtype.numpy))


def _binarizer(app: Application) -> Sequence[Tensor]:
    """1 where x > threshold, else 0."""
    x = app.operand(0)
    return (emit("Greater", x, _scalar(app.attr("threshold", 0.0), x)).cast(x.dtype),)


def _features(app: Application) -> Sequence[Tensor]:
    """x[..., indices], with an axis in front of a vector."""
    x, indices = app.operand(0), app.operand(1).reshape(-1)
    taken = emit("Gather", x, indices, axis=x.rank - 1)
    return (taken.reshape(1, *taken.shape) if x.rank == 1 else taken,)


def _label_encoder(app: Application) -> Sequence[Tensor]:
    """values[k] where x equals keys[k] (NaN equals NaN), else the default."""
    x = app.operand(0)
    keys, values = _column(app, "keys"), _column(app, "values")
    if len(keys) != len(values) or not 0 < len(keys) <= MAX_KEYS:
        raise InvalidInput(f"it has {len(keys)} keys and {len(values)} values")
    wide = emit("Unsqueeze", x, np.array([-1]))
    hit = emit("Equal", wide, as_tensor(keys))
    if keys.dtype.kind == "f" and np.isnan(keys).any():
        hit = emit("Or", hit, emit("And", emit("IsNaN", wide), as_tensor(np.isnan(keys))))
    chosen = emit("ArgMax", hit.cast(float32), axis=-1, keepdims=0)
    position = emit("ReduceMax", hit.cast(int64), np.array([-1]), keepdims=0) > 0
    table = np.append(values, _default(app, values))
    at = emit("Where", position, chosen, as_tensor(np.array(len(keys), np.int64)))
    return (emit("Gather", as_tensor(table), at, axis=0),)


def _zip_map(_: Application) -> Sequence[Tensor]:
    """Refused: a list of maps is no tensor."""
    raise InvalidInput(
        "it gives a list of maps, which is no tensor; export with the option zipmap=False, or name "
        "the value that it reads as an output (outputs=, --output)"
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


def _groups(app: Application, kinds: int) -> list[tuple[Tensor, ...]]:
    """Operands after rate and step: all weights, then all gradients, then each kind of state."""
    rest = [app.operand(i) for i in range(2, len(app.inputs))]
    if not rest or len(rest) % kinds:
        raise InvalidInput(f"{app.op} takes {kinds} operands per tensor after two, got {len(rest)}")
    n = len(rest) // kinds
    return [tuple(rest[k * n + i] for k in range(kinds)) for i in range(n)]


def _columns(rows: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [x for column in zip(*rows, strict=True) for x in column]


def _regularized(app: Application, x: Tensor, g: Tensor) -> Tensor:
    return _scalar(app.attr("norm_coefficient", 0.0), x) * x + g


def _momentum(app: Application) -> Sequence[Tensor]:
    """v' = alpha v + b g, b = beta after the first step, else 1; x' = x - r v' (or Nesterov's)."""
    rate, step = app.operand(0), app.operand(1)
    alpha, rows = app.attr("alpha"), []
    for x, g, v in _groups(app, 3):
        g = _regularized(app, x, g)
        later = emit("Greater", step, as_tensor(np.array(0, np.int64)))
        beta = emit("Where", later, _scalar(app.attr("beta"), x), _scalar(1.0, x))
        velocity = v * _scalar(alpha, x) + beta * g
        nesterov = app.attr("mode") == "nesterov"
        move = g + _scalar(alpha, x) * velocity if nesterov else velocity
        rows.append((x - rate * move, velocity))
    return _columns(rows)


def _adagrad(app: Application) -> Sequence[Tensor]:
    """h' = h + g^2; x' = x - r / (1 + t decay) g / (sqrt(h') + eps)."""
    rate, step, rows = app.operand(0), app.operand(1), []
    for x, g, h in _groups(app, 3):
        g = _regularized(app, x, g)
        slowed = rate / (step.cast(x.dtype) * _scalar(app.attr("decay_factor", 0.0), x) + 1.0)
        squares = h + g * g
        wide = emit("Sqrt", squares) + _scalar(app.attr("epsilon", 0.0), x)
        rows.append((x - slowed * g / wide, squares))
    return _columns(rows)


def _adam(app: Application) -> Sequence[Tensor]:
    """Kingma and Ba 2015, its rate corrected from the second step on, with decay after it."""
    rate, step, rows = app.operand(0), app.operand(1), []
    alpha, beta = app.attr("alpha", 0.9), app.attr("beta", 0.999)
    for x, g, v, h in _groups(app, 4):
        g = _regularized(app, x, g)
        mean = v * _scalar(alpha, x) + g * _scalar(1.0 - alpha, x)
        squares = h * _scalar(beta, x) + g * g * _scalar(1.0 - beta, x)
        t = step.cast(x.dtype)
        corrected = rate * emit("Sqrt", _left(beta, t, x)) / _left(alpha, t, x)
        later = emit("Greater", step, as_tensor(np.array(0, np.int64)))
        used = emit("Where", later, corrected, rate)
        moved = x - used * mean / (emit("Sqrt", squares) + _scalar(app.attr("epsilon", 0.0), x))
        kept = _scalar(1.0 - app.attr("norm_coefficient_post", 0.0), x)
        rows.append((moved * kept, mean, squares))
    return _columns(rows)


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
    (TRAINING, "Adagrad"): _adagrad,
    (TRAINING, "Adam"): _adam,
    (TRAINING, "Momentum"): _momentum,
}
"""By domain and operator."""
