"""Negative log likelihood of labels as ONNX defines it: weights, ignored labels, reductions.

Classes are along axis 1. Every engine refuses a label outside 0..C-1, other than the ignored one,
when the graph runs. For that the bodies here are emitted instead of the operators, which read -1 as
the last class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.types import ShapeError, int64
from triplane.unified_ir.ops.row import Op, OpKind
from triplane.unified_ir.ops.rows.arithmetic.matrix import log_softmax
from triplane.unified_ir.ops.rows.movement.indexing import gather, gather_elements
from triplane.unified_ir.ops.rows.movement.structure import squeeze, unsqueeze, where
from triplane.unified_ir.ops.samples import between, ints, normal, sample
from triplane.unified_ir.ops.tensor import Tensor

NO_LABEL: Final = -(2**31)
"""An index that is outside every axis, also when counted from the end."""

REDUCTIONS: Final[Mapping[str, Callable[[Tensor, Tensor | None], Tensor]]] = {
    "none": lambda loss, _: loss,
    "sum": lambda loss, _: loss.sum(),
    "mean": lambda loss, counted: loss.mean() if counted is None else loss.sum() / counted.sum(),
}
"""(losses, weight of each or None if all are 1) -> the result."""


def likelihood(
    log_p: Tensor, labels: Tensor, weight: Tensor | None, ignore_index: int | None, axis: int
) -> tuple[Tensor, Tensor | None]:
    """Return -w[label] log p[label] per label, and the weights: w[label], 0 where ignored.

    The weights are None if all are 1. log_p: like labels with the axis of classes inserted;
    weight: (C,).
    """
    others = tuple(d for i, d in enumerate(log_p.shape) if i != axis % max(log_p.rank, 1))
    if labels.dtype.is_float or others != labels.shape or log_p.rank != labels.rank + 1:
        raise ShapeError(
            f"the likelihood of classes along axis {axis} of {log_p.type} takes whole-number "
            f"labels ({', '.join(map(str, others))}), got {labels.type}"
        )
    if weight is not None and weight.shape != (log_p.shape[axis],):
        raise ShapeError(f"weights of classes are ({log_p.shape[axis]},), got {weight.type}")
    labels = labels.cast(int64)
    counts = None if ignore_index is None else labels != ignore_index
    # Ignored labels may lie outside the classes; 0 is valid, and the loss is set to 0 below.
    index = labels if counts is None else where(counts, labels, 0)
    index = where(index < 0, NO_LABEL, index)  # else -1 would be the last class
    loss = -squeeze(gather_elements(log_p, unsqueeze(index, axis), axis=axis), axis)
    counted = None if weight is None else gather(weight, index)
    if counted is not None:
        loss = loss * counted
    if counts is not None:
        loss = where(counts, loss, 0.0)
        counted = counts.cast(loss.dtype) if counted is None else where(counts, counted, 0.0)
    return loss, counted


def _likelihood_loss(
    log_p: Tensor, labels: Tensor, weight: Tensor | None = None, *,
    reduction: str, ignore_index: int | None = None,
) -> Tensor:  # fmt: skip
    if reduction not in REDUCTIONS:
        raise InvalidInput(f"reduction must be one of {', '.join(REDUCTIONS)}; got {reduction!r}")
    loss, counted = likelihood(log_p, labels, weight, ignore_index, 1)
    return REDUCTIONS[reduction](loss, counted)


def _cross_entropy_loss(
    scores: Tensor, labels: Tensor, weight: Tensor | None = None, **attrs: Any
) -> list[Tensor]:
    log_p = log_softmax(scores, axis=1)
    return [_likelihood_loss(log_p, labels, weight, **attrs), log_p]


def _kernel(
    log_p: Any, labels: Any, weight: Any = None, *, reduction: str, ignore_index: int | None = None
) -> Any:
    """Compute the loss by numpy's indexing."""
    classes = log_p.shape[1]
    counts = np.ones(labels.shape, bool) if ignore_index is None else labels != ignore_index
    wrong = counts & ((labels < 0) | (labels >= classes))
    if wrong.any():
        raise IndexError(f"label {labels[wrong][0]} is out of bounds for {classes} classes")
    index = np.where(counts, labels, 0)
    counted = (np.ones(classes, log_p.dtype) if weight is None else weight)[index] * counts
    picked = np.take_along_axis(log_p, np.expand_dims(index, 1), 1).squeeze(1)
    loss = -np.where(counts, picked, 0) * counted
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / counted.sum()


def _softmax_kernel(scores: Any, labels: Any, weight: Any = None, **attrs: Any) -> Any:
    shifted = scores - scores.max(1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return _kernel(log_p, labels, weight, **attrs), log_p


negative_log_likelihood_loss = Op(
    name="NegativeLogLikelihoodLoss", kind=OpKind.LOSS,
    reference=_kernel,
    body=_likelihood_loss,
    native=lambda node, opset: False,
    samples=(
        sample(normal(4, 3), ints(0, 3, 4)),
        sample(
            normal(2, 3, 4), ints(-1, 3, 2, 4), between(0.5, 2, 3),
            ignore_index=-1,
        ),
        sample(normal(4, 3), ints(0, 3, 4, dtype="int32"), between(0.5, 2, 3), reduction="none"),
    ),
)  # fmt: skip
"""log p: (N, C, ...), labels: (N, ...), weight: (C)? -> a scalar, or (N, ...) unreduced."""

softmax_cross_entropy_loss = Op(
    name="SoftmaxCrossEntropyLoss",
    kind=OpKind.LOSS,
    reference=_softmax_kernel,
    body=_cross_entropy_loss,
    native=lambda node, opset: False,
    samples=(
        sample(normal(4, 3), ints(0, 3, 4), outputs=2),
        sample(normal(2, 3, 2), ints(0, 4, 2, 2), between(0.5, 2, 3), ignore_index=3),
        sample(normal(4, 3), ints(0, 3, 4), between(0.5, 2, 3), reduction="sum"),
    ),
)
"""scores: (N, C, ...), labels: (N, ...), weight: (C)? -> the loss, log softmax(scores)."""
