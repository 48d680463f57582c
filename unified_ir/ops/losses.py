"""Losses, composed of rows."""

from __future__ import annotations

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.types import int64
from triplane.unified_ir.ops.rows.arithmetic.elementwise import (
    abs_,
    clip,
    log,
    maximum,
    softplus,
    sqrt,
)
from triplane.unified_ir.ops.rows.arithmetic.likelihood import likelihood
from triplane.unified_ir.ops.rows.arithmetic.matrix import log_softmax
from triplane.unified_ir.ops.rows.movement.structure import where
from triplane.unified_ir.ops.tensor import Tensor


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Per-sample cross entropy; logits: (..., C), labels: (...) ints in 0..C-1 -> (...).

    The loss of `ignore_index` is 0; every engine refuses other labels (InvalidInput) when the graph
    runs. weight: (C,), a factor for each class. With smoothing e the target is 1 - e + e / C for
    the label and e / C for each other class (Szegedy et al. 2016).
    """
    return weighted_cross_entropy(logits, labels, weight, ignore_index, label_smoothing)[0]


def weighted_cross_entropy(
    logits: Tensor, labels: Tensor, weight: Tensor | None, ignore_index: int | None,
    label_smoothing: float,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return `cross_entropy` and the weight of each sample in a mean, None if all are 1."""
    if not 0.0 <= label_smoothing < 1.0:
        raise InvalidInput(f"label_smoothing must be in [0, 1), got {label_smoothing}")
    log_p = log_softmax(logits)
    loss, counted = likelihood(log_p, labels, weight, ignore_index, logits.rank - 1)
    if not label_smoothing:
        return loss, counted
    # With smoothing e the loss is (1 - e) (-w[y] log p[y]) + e / C sum_c (-w[c] log p[c]).
    others = -(log_p if weight is None else log_p * weight).mean([-1])
    if ignore_index is not None:
        others = where(labels.cast(int64) != ignore_index, others, 0.0)
    return loss * (1.0 - label_smoothing) + others * label_smoothing, counted


def negative_log_likelihood(log_p: Tensor, labels: Tensor) -> Tensor:
    """-log p[label] per sample; log_p: (..., C), labels: (...) ints in 0..C-1 -> (...)."""
    return likelihood(log_p, labels, None, None, log_p.rank - 1)[0]


def binary_cross_entropy(
    logits: Tensor, targets: Tensor, *, positive_weight: Tensor | float | None = None
) -> Tensor:
    """Elementwise cross entropy of sigmoid(logits) with targets in [0, 1], stable for any logit.

    positive_weight multiplies the term of the positive class.
    """
    if positive_weight is None:
        # -t log s(z) - (1 - t) log(1 - s(z)) = softplus(z) - t z, since log s(z) = z - softplus(z).
        return softplus(logits) - logits * targets
    return softplus(logits) * (1.0 - targets) + softplus(-logits) * targets * positive_weight


def huber(y: Tensor, target: Tensor, *, delta: float = 1.0) -> Tensor:
    """e^2 / 2 where |e| <= delta, else delta (|e| - delta / 2); e = y - target (Huber 1964)."""
    if delta <= 0:
        raise InvalidInput(f"delta must be positive, got {delta}")
    e = y - target
    size = abs_(e)
    inside = size < delta
    # The square is of e, not of |e|: at 0 the second derivative of |e|^2 would be 0, not 1.
    inner = where(inside, e, 0.0)
    return where(inside, inner * inner * 0.5, (size - delta * 0.5) * delta)


def smooth_l1(y: Tensor, target: Tensor, *, beta: float = 1.0) -> Tensor:
    """`huber` at delta = beta, divided by beta; |y - target| at beta 0 (Girshick 2015)."""
    if beta == 0.0:
        return abs_(y - target)
    return huber(y, target, delta=beta) / beta


def kl_divergence(log_q: Tensor, p: Tensor) -> Tensor:
    """Elementwise p (log p - log q), 0 where p is 0; log_q: logarithms, p: probabilities."""
    # 0 log 0 = 0 in the limit, but 0 times minus infinity is NaN, also in the gradient.
    inside = p > 0.0
    return where(inside, p * (log(where(inside, p, 1.0)) - log_q), 0.0)


def cosine_similarity(a: Tensor, b: Tensor, *, axis: int = -1, epsilon: float = 1e-8) -> Tensor:
    """a b / (max(|a|, epsilon) max(|b|, epsilon)) along `axis`."""
    first, second = (sqrt(maximum((x * x).sum([axis]), epsilon * epsilon)) for x in (a, b))
    return (a * b).sum([axis]) / (first * second)


def cosine_embedding(a: Tensor, b: Tensor, same: Tensor, *, margin: float = 0.0) -> Tensor:
    """1 - cos(a, b) for pairs that belong together (same = 1), else max(0, cos - margin).

    a, b: (N, D), same: (N,), 1 or -1 -> (N,).
    """
    near = cosine_similarity(a, b)
    return where(same > 0, 1.0 - near, clip(near - margin, 0.0))
