"""Losses: a mean over the batch, however large it is, and what goes with each.

A loss also says what the model's output is called when it is exported, and which metrics make sense
beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from triplane.unified_ir import ops
from triplane.unified_ir.frontend.cell import Cell
from triplane.unified_ir.ir.types import ShapeError, TensorType
from triplane.unified_ir.ops.likelihood import REDUCTIONS, likelihood
from triplane.unified_ir.ops.losses import weighted_cross_entropy

Metric = Callable[[ops.Tensor, ops.Tensor], ops.Tensor]
"""(output, target) -> a scalar, the mean over the batch."""


class Loss(Cell):
    """`construct(output, target)` gives a scalar, the mean over the batch."""

    output: ClassVar[str] = "y"
    """Name of the model's output in exported functions."""
    ignored: int | None = None
    """A label that counts nowhere, whatever `classes` says."""

    def metrics(self) -> Mapping[str, Metric]:
        """Metrics measured beside this loss unless the trainer is told otherwise."""
        return {}

    def classes(self, output: TensorType) -> int | None:
        """How many labels there are for such an output; None where targets are no labels.

        A graph refuses a label beyond them only when it runs, without a word of which sample; so
        whoever feeds labels holds them to this.
        """
        return None


def accuracy(logits: ops.Tensor, labels: ops.Tensor) -> ops.Tensor:
    """Share of labels that are the position of the largest logit; ties go to the first."""
    return (ops.argmax(logits) == labels.cast("int64")).cast(logits.dtype).mean()


def binary_accuracy(logits: ops.Tensor, targets: ops.Tensor) -> ops.Tensor:
    """Share of targets on the side of 0.5 on which sigmoid(logit) lies."""
    return ((logits > 0.0) == (targets > 0.5)).cast(logits.dtype).mean()


class SoftmaxCrossEntropy(Loss):
    """Mean of -log softmax(logits)[label]; logits: (..., C), labels: (...) ints in 0..C-1.

    weight: (C,), a factor for each class; the mean divides by the sum of the labels' factors. A
    label that is `ignore_index` counts nowhere; of a batch without any other the mean is NaN.
    With `label_smoothing` e the target is 1 - e + e / C for the label, e / C for each other.
    """

    output = "logits"

    def __init__(
        self,
        *,
        weight: ArrayLike | None = None,
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__()
        self.weight = None if weight is None else np.asarray(weight, np.float32)
        self.ignored, self.label_smoothing = ignore_index, label_smoothing

    def metrics(self) -> Mapping[str, Metric]:
        """`accuracy`, over the labels that count."""
        if self.ignored is None:
            return {"accuracy": accuracy}
        return {"accuracy": partial(_accuracy_without, self.ignored)}

    def classes(self, output: TensorType) -> int | None:
        """The size of the last axis."""
        last = output.shape[-1] if output.rank else None
        return last if isinstance(last, int) else None

    def construct(self, logits: ops.Tensor, labels: ops.Tensor) -> ops.Tensor:
        """See the class."""
        _whole_labels("SoftmaxCrossEntropy", labels)
        loss, counted = weighted_cross_entropy(
            logits, labels, _weight_like(self.weight, logits), self.ignored, self.label_smoothing
        )
        return REDUCTIONS["mean"](loss, counted)


class NegativeLogLikelihood(Loss):
    """Mean of -log p[label]; log_p: (..., C) logarithms of probabilities, labels: (...) ints.

    `weight` and `ignore_index` as those of `SoftmaxCrossEntropy`.
    """

    output = "log_p"

    def __init__(self, *, weight: ArrayLike | None = None, ignore_index: int | None = None) -> None:
        super().__init__()
        self.weight = None if weight is None else np.asarray(weight, np.float32)
        self.ignored = ignore_index

    def metrics(self) -> Mapping[str, Metric]:
        """`accuracy`, over the labels that count."""
        return SoftmaxCrossEntropy(ignore_index=self.ignored).metrics()

    def classes(self, output: TensorType) -> int | None:
        """The size of the last axis."""
        return SoftmaxCrossEntropy().classes(output)

    def construct(self, log_p: ops.Tensor, labels: ops.Tensor) -> ops.Tensor:
        """See the class."""
        _whole_labels("NegativeLogLikelihood", labels)
        weight = _weight_like(self.weight, log_p)
        loss, counted = likelihood(log_p, labels, weight, self.ignored, log_p.rank - 1)
        return REDUCTIONS["mean"](loss, counted)


class BinaryCrossEntropy(Loss):
    """Mean cross entropy of sigmoid(logits) with targets in [0, 1] of the same shape.

    positive_weight: a factor for the term of the positive class, or one per last axis.
    """

    output = "logits"

    def __init__(self, *, positive_weight: ArrayLike | None = None) -> None:
        super().__init__()
        given = positive_weight
        self.positive_weight = None if given is None else np.asarray(given, np.float32)

    def metrics(self) -> Mapping[str, Metric]:
        """`accuracy`."""
        return {"accuracy": binary_accuracy}

    def construct(self, logits: ops.Tensor, targets: ops.Tensor) -> ops.Tensor:
        """See the class."""
        _same_shape("BinaryCrossEntropy", logits, targets)
        weight = _weight_like(self.positive_weight, logits)
        targets = targets.cast(logits.dtype)
        return ops.binary_cross_entropy(logits, targets, positive_weight=weight).mean()


class MSE(Loss):
    """Mean of (y - target)^2 over all elements; both of one shape."""

    def construct(self, y: ops.Tensor, target: ops.Tensor) -> ops.Tensor:
        """See the class."""
        _same_shape("MSE", y, target)
        error = y - target.cast(y.dtype)
        return (error * error).mean()


class L1(Loss):
    """Mean of |y - target| over all elements; both of one shape."""

    def construct(self, y: ops.Tensor, target: ops.Tensor) -> ops.Tensor:
        """See the class."""
        _same_shape("L1", y, target)
        return ops.abs_(y - target.cast(y.dtype)).mean()


class Huber(Loss):
    """Mean of e^2 / 2 where |e| <= delta, else delta (|e| - delta / 2); e = y - target."""

    def __init__(self, *, delta: float = 1.0) -> None:
        super().__init__()
        self.delta = delta

    def construct(self, y: ops.Tensor, target: ops.Tensor) -> ops.Tensor:
        """See the class."""
        _same_shape("Huber", y, target)
        return ops.huber(y, target.cast(y.dtype), delta=self.delta).mean()


class SmoothL1(Loss):
    """Mean of e^2 / (2 beta) where |e| < beta, else |e| - beta / 2; e = y - target."""

    def __init__(self, *, beta: float = 1.0) -> None:
        super().__init__()
        self.beta = beta

    def construct(self, y: ops.Tensor, target: ops.Tensor) -> ops.Tensor:
        """See the class."""
        _same_shape("SmoothL1", y, target)
        return ops.smooth_l1(y, target.cast(y.dtype), beta=self.beta).mean()


class KLDivergence(Loss):
    """Sum of p (log p - log q) by sample, and its mean over the batch.

    log_q: (N, ...) logarithms of the model's probabilities, p: target probabilities of that shape.
    """

    output = "log_q"

    def construct(self, log_q: ops.Tensor, p: ops.Tensor) -> ops.Tensor:
        """See the class."""
        _same_shape("KLDivergence", log_q, p)
        each = ops.kl_divergence(log_q, p.cast(log_q.dtype))
        return (each.sum([*range(1, each.rank)]) if each.rank > 1 else each).mean()


class CosineEmbedding(Loss):
    """Mean over pairs of 1 - cos(a, b) where same is 1, of max(0, cos(a, b) - margin) where -1.

    The output is a pair a, b: (N, D); same: (N,).
    """

    def __init__(self, *, margin: float = 0.0) -> None:
        super().__init__()
        self.margin = margin

    def construct(self, pair: tuple[ops.Tensor, ops.Tensor], same: ops.Tensor) -> ops.Tensor:
        """See the class."""
        a, b = pair
        _same_shape("CosineEmbedding", a, b)
        _same_shape("CosineEmbedding", a[..., 0], same)
        return ops.cosine_embedding(a, b, same, margin=self.margin).mean()


class CTC(Loss):
    """Mean over the batch of a sequence's loss by `ops.ctc`, divided by how many labels it has.

    log_p: (N, T, C) logarithms of probabilities; labels: (N, L) ints, padded behind with -1.
    """

    output = "log_p"

    def __init__(self, *, blank: int = 0) -> None:
        super().__init__()
        self.blank = blank

    def construct(self, log_p: ops.Tensor, labels: ops.Tensor) -> ops.Tensor:
        """See the class."""
        _whole_labels("CTC", labels)
        lengths = (labels.cast("int64") >= 0).cast("int64").sum([1])
        each = ops.ctc(log_p, labels, lengths, blank=self.blank)
        return (each / ops.maximum(lengths, 1).cast(each.dtype)).mean()


def _accuracy_without(ignored: int, logits: ops.Tensor, labels: ops.Tensor) -> ops.Tensor:
    """`accuracy` over the labels that count."""
    labels = labels.cast("int64")
    counted = (labels != ignored).cast(logits.dtype)
    hits = (ops.argmax(logits) == labels).cast(logits.dtype)
    return (hits * counted).sum() / counted.sum()


def _weight_like(weight: ArrayLike | None, like: ops.Tensor) -> ops.Tensor | None:
    return None if weight is None else ops.constant(weight, like.dtype)


def _whole_labels(name: str, labels: ops.Tensor) -> None:
    if labels.dtype.is_float:
        raise ShapeError(
            f"{name} takes whole-number labels, got {labels.type}; "
            "for numbers use MSE, for yes-no targets BinaryCrossEntropy"
        )


def _same_shape(name: str, y: ops.Tensor, target: ops.Tensor) -> None:
    if y.shape != target.shape:
        raise ShapeError(
            f"{name} takes an output and a target of one shape, got {y.type} and {target.type}; "
            "broadcasting here would average over pairs that do not belong together"
        )
