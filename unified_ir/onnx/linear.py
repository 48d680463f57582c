"""Scaler, Normalizer, linear models and support vector machines of ai.onnx.ml."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.types import float32
from triplane.unified_ir.onnx.application import Application
from triplane.unified_ir.onnx.scores import (
    chosen,
    floats,
    labelled,
    labels,
    matrix,
    number,
    opposed,
    regressed,
    transform_of,
    transformed,
    two_scores,
)
from triplane.unified_ir.ops.rows.control.scanning import scan
from triplane.unified_ir.ops.tensor import Tensor, as_tensor, emit

MAX_CLASSES: Final = 64
"""The most classes of a support vector machine: each pair of them has a score."""
_COUPLINGS: Final = 100
"""The most steps that couple the probabilities of pairs."""
_COUPLED: Final = 0.005
"""An error below this over the number of classes ends the coupling."""


def scaler(app: Application) -> Sequence[Tensor]:
    """Return (x - offset) * scale, by feature or for all."""
    x = app.operand(0).cast(float32)
    offset, scale = floats(app, "offset"), floats(app, "scale")
    if not len(offset) == len(scale) or len(scale) not in {1, x.shape[-1]}:
        raise InvalidInput(f"{len(offset)} offsets and {len(scale)} scales do not fit {x.type}")
    return ((x - as_tensor(offset)) * as_tensor(scale),)


_NORMS: Final = {"MAX": "ReduceMax", "L1": "ReduceL1", "L2": "ReduceL2"}


def normalizer(app: Application) -> Sequence[Tensor]:
    """Divide each row by its largest number, L1 or L2 norm; a row whose norm is 0 stays."""
    x, name = app.operand(0).cast(float32), str(app.attr("norm", "MAX"))
    if name not in _NORMS:
        raise InvalidInput(f"the norm {name!r} is not known; known are {', '.join(_NORMS)}")
    size = emit(_NORMS[name], x, np.array([-1]), keepdims=1)
    return (x / emit("Where", emit("Equal", size, number(0)), number(1), size),)


def _linear_products(app: Application, x: Tensor, rows: int) -> Tensor:
    """Return the (N, rows) products with the node's coefficients."""
    weights = floats(app, "coefficients")
    if rows < 1 or len(weights) % rows or x.shape[1] != len(weights) // rows:
        raise InvalidInput(f"{len(weights)} coefficients do not fit {rows} rows of {x.type}")
    return x.cast(float32) @ as_tensor(np.ascontiguousarray(weights.reshape(rows, -1).T))


def linear_regressor(app: Application) -> Sequence[Tensor]:
    """Return x @ coefficients.T + intercepts."""
    targets = int(app.attr("targets", 1))
    weighed = _linear_products(app, matrix(app), targets)
    return regressed(app, weighed, floats(app, "intercepts"), targets)


def linear_classifier(app: Application) -> Sequence[Tensor]:
    """Return labels, and scores x @ coefficients.T + intercepts; a single score is the second's."""
    names, bias = labels(app), floats(app, "intercepts")
    if len(bias) != len(names) and not (len(bias) == 1 and len(names) == 2):
        raise InvalidInput(f"it has {len(bias)} intercepts for {len(names)} labels")
    scores = _linear_products(app, matrix(app), len(bias)) + as_tensor(bias)
    if len(bias) > 1:
        return labelled(scores, names), transformed(app, scores)
    return chosen(scores > 0, names), two_scores(app, scores)


def _rbf(x: Tensor, s: Tensor, params: Any) -> Tensor:
    """Return exp(-gamma |x - s|^2), from differences because products would cancel."""
    # |x - s|^2 = |x|^2 - 2 x s + |s|^2 loses all digits if x and s are long and close.
    apart = emit("Unsqueeze", x, np.array([2])) - emit("Unsqueeze", s, np.array([0]))
    return emit("Exp", emit("ReduceSumSquare", apart, np.array([1]), keepdims=0) * -params[0])


_KERNELS: Final[Mapping[str, Callable[[Tensor, Tensor, Any], Tensor]]] = {
    "LINEAR": lambda x, s, _: x @ s,
    "POLY": lambda x, s, p: emit("Pow", x @ s * p[0] + p[1], number(p[2])),
    "RBF": _rbf,
    "SIGMOID": lambda x, s, p: emit("Tanh", x @ s * p[0] + p[1]),
}


def _kernels(app: Application, x: Tensor, count: int) -> Tensor:
    """Return the (N, count) kernels of the rows with the support vectors."""
    vectors, kind = floats(app, "support_vectors"), str(app.attr("kernel_type", "LINEAR"))
    params = [float(p) for p in floats(app, "kernel_params")] or [0.0, 0.0, 0.0]
    if kind not in _KERNELS or len(params) != 3:
        raise InvalidInput(f"kernel {kind!r} with {len(params)} parameters is not supported")
    if len(vectors) % count or x.shape[1] != len(vectors) // count:
        raise InvalidInput(f"{count} support vectors of {len(vectors)} numbers do not fit {x.type}")
    columns = as_tensor(np.ascontiguousarray(vectors.reshape(count, -1).T))
    return _KERNELS[kind](x, columns, params)


def svm_regressor(app: Application) -> Sequence[Tensor]:
    """Return kernels @ coefficients + rho; its sign for one class."""
    x, rho = matrix(app).cast(float32), floats(app, "rho")
    count = int(app.attr("n_supports", 0))
    if transform_of(app) != "NONE" or not len(rho):
        raise InvalidInput("a support vector regressor needs a rho and takes no post_transform")
    if count:
        weights = floats(app, "coefficients")
        if len(weights) != count:
            raise InvalidInput(f"{count} support vectors have {len(weights)} coefficients")
        score = _kernels(app, x, count) @ as_tensor(weights[:, None])
    else:
        score = _linear_products(app, x, 1)
    score = score + float(rho[0])
    if app.attr("one_class", 0):
        score = (score > 0).cast(float32) * 2.0 - 1.0
    return (score,)


def svm_classifier(app: Application) -> Sequence[Tensor]:
    """Return labels by votes of pairs of classes, and scores of pairs or class probabilities."""
    names, counts = labels(app), [int(n) for n in app.attr("vectors_per_class", ())]
    k, x = len(names), matrix(app).cast(float32)
    if not sum(counts):
        return _linear_svm(app, x, names)
    if not 2 <= k <= MAX_CLASSES or len(counts) != k:
        raise InvalidInput(f"{len(counts)} counts of support vectors for {k} labels")
    scores = _of_pairs(app, x, counts)
    first, second = _pairs(k)
    # One vote per pair: for the first class if the score is positive, else for the second.
    won = (scores > 0).cast(float32)
    votes = won @ as_tensor(first) + (1.0 - won) @ as_tensor(second)
    label = labelled(votes, names)
    slopes, shifts = floats(app, "prob_a"), floats(app, "prob_b")
    if len(slopes):
        if len(slopes) != len(first) or len(shifts) != len(first):
            raise InvalidInput(f"{len(slopes)} slopes of probabilities for {len(first)} pairs")
        # Platt (1999): the probability that the first class of a pair wins is 1 / (1 + exp(A s +
        # B)).
        sure = emit("Sigmoid", -(scores * as_tensor(slopes) + as_tensor(shifts)))
        # libsvm's min_prob.
        clipped = emit("Clip", sure, number(1e-7), number(1 - 1e-7))
        return label, transformed(app, _coupled(clipped, k))
    if k > 2:
        return label, transformed(app, scores)
    if transform_of(app) != "NONE":
        raise InvalidInput("a post_transform of two classes needs probabilities (prob_a, prob_b)")
    return label, opposed(scores)


def _linear_svm(app: Application, x: Tensor, names: Any) -> Sequence[Tensor]:
    """Return labels, and a score for each class, all with the same bias."""
    if len(names) <= 2:
        raise InvalidInput("without support vectors it needs at least three classes")
    scores = _linear_products(app, x, len(names)) + float(floats(app, "rho")[0])
    return labelled(scores, names), transformed(app, scores)


def _pairs(k: int) -> tuple[Any, Any]:
    """Return two (pairs, k) matrices with ones at the first and at the second class of a pair."""
    pairs = list(combinations(range(k), 2))
    one = np.eye(k, dtype=np.float32)
    return one[[i for i, _ in pairs]], one[[j for _, j in pairs]]


def _of_pairs(app: Application, x: Tensor, counts: Sequence[int]) -> Tensor:
    """Return (N, pairs) scores; row j - 1 of the coefficients is for vectors of i, row i for j."""
    k, total, rho = len(counts), sum(counts), floats(app, "rho")
    weights = floats(app, "coefficients")
    if len(weights) != (k - 1) * total or len(rho) != k * (k - 1) // 2 or min(counts) < 0:
        raise InvalidInput(f"{len(weights)} coefficients, {len(rho)} rhos do not fit {k} classes")
    rows = weights.reshape(k - 1, total)
    starts = np.cumsum([0, *counts])
    columns = np.zeros((total, len(rho)), np.float32)
    # libsvm's layout: a support vector of class i has k - 1 coefficients, one for each other class.
    for p, (i, j) in enumerate(combinations(range(k), 2)):
        of_i, of_j = slice(starts[i], starts[i + 1]), slice(starts[j], starts[j + 1])
        columns[of_i, p], columns[of_j, p] = rows[j - 1, of_i], rows[i, of_j]
    return _kernels(app, x, total) @ as_tensor(columns) + as_tensor(rho)


def _coupled(sure: Tensor, k: int) -> Tensor:
    """Couple (N, pairs) probabilities that the first of a pair wins into (N, k) of the classes.

    This is the second method of Wu, Lin and Weng (2004) as libsvm computes it: one coordinate at a
    time, until the error of each row is small.
    """
    pairs = list(combinations(range(k), 2))
    loses = 1.0 - sure
    beats = np.zeros((len(pairs), k * k), np.float32)
    beaten = np.zeros_like(beats)  # at i * k + j: the probability that j wins against i
    for p, (i, j) in enumerate(pairs):
        beats[p, i * k + j] = beaten[p, j * k + i] = 1
    other = sure @ as_tensor(beaten) + loses @ as_tensor(beats)
    mine = sure @ as_tensor(beats) + loses @ as_tensor(beaten)
    diagonal = emit("ReduceSumSquare", other.reshape(-1, k, k), np.array([2]), keepdims=1)
    eye = as_tensor(np.eye(k, dtype=np.float32))
    # Q_ii = sum_j r_ji^2 and Q_ij = -r_ij r_ji; the probabilities minimize p^T Q p with sum p = 1.
    q = eye * diagonal - (other * mine).reshape(-1, k, k)
    start = sure @ as_tensor(np.zeros((len(pairs), k), np.float32)) + 1.0 / k
    going = emit("ReduceMax", start, np.array([1]), keepdims=1) * 0.0 + 1.0

    def step(carry: Any, _: Any) -> Any:
        p, go = carry
        qp = (q @ emit("Unsqueeze", p, np.array([2]))).reshape(-1, k)
        pqp = emit("ReduceSum", p * qp, np.array([1]), keepdims=1)
        error = emit("ReduceMax", emit("Abs", qp - pqp), np.array([1]), keepdims=1)
        # Rows that have converged keep their value; the scan makes the same trips for all rows.
        go = go * emit("Not", emit("Less", error, number(_COUPLED / k))).cast(float32)
        moved = p
        for t in range(k):
            row = emit("Gather", q, as_tensor(np.array(t)), axis=1)
            own = emit("Gather", row, as_tensor(np.array([t])), axis=1)
            here = emit("Gather", qp, as_tensor(np.array([t])), axis=1)
            diff = (pqp - here) / own
            # The coordinate t moves by diff and all are divided by 1 + diff, so the sum stays 1.
            # p^T Q p and Q p follow without another product.
            moved = (moved + diff * as_tensor(np.eye(k, dtype=np.float32)[t])) / (diff + 1.0)
            pqp = (pqp + diff * (diff * own + here * 2.0)) / (diff + 1.0) / (diff + 1.0)
            qp = (qp + diff * row) / (diff + 1.0)
        return (emit("Where", go > 0, moved, p), go), go

    trips = as_tensor(np.zeros(_COUPLINGS, np.float32))
    coupled: Tensor = scan(step, (start, going), trips)[0][0]
    return coupled
