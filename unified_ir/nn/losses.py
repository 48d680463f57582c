"""Losses: a mean over the batch, however large it is, with the metrics that belong to them.

A loss also defines the name of the model's output in exports, its default metrics, and the divisor
of its mean where that is not the number of samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike

from triplane.unified_ir import ops
from triplane.unified_ir.frontend.cell import Cell
from triplane.unified_ir.ir.types import ShapeError, TensorType
from triplane.unified_ir.ops.losses import weighted_cross_entropy
from triplane.unified_ir.ops.recorder import recording
from triplane.unified_ir.ops.rows.arithmetic.likelihood import likelihood
from triplane.unified_ir.ops.tensor import admitted

Metric = Callable[[ops.Tensor, ops.Tensor], ops.Tensor]
"""(output, target) -> a scalar, the mean over the batch.

A metric that divides by something else than the number of samples has a method `counted`, like
`Loss`.
"""


class Loss(Cell):
    """`construct(output, target)` returns a scalar, the mean over the batch."""

    output: ClassVar[str] = "y"
    """Name of the model's output in exported functions."""
    targets: ClassVar[str] = ""
    """What the targets are: "classes", "shares" (0..1), "numbers", or "" for anything else."""
    ignored: int | None = None
    """A label that is never counted, even outside the range of `classes`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the cell; while a graph is recorded, numpy arrays become its constants."""
        if recording():
            args = tuple(map(admitted, args))
            kwargs = {name: admitted(x) for name, x in kwargs.items()}
        return super().__call__(*args, **kwargs)

    def metrics(self) -> Mapping[str, Metric]:
        """Return the metrics that a trainer measures beside this loss by default."""
        return {}

    def counted(self, output: ops.Tensor, target: ops.Tensor) -> ops.Tensor | None:
        """Return the divisor of this batch's mean, a scalar; None where all samples count alike.

        Means of several batches are weighted by it. Where it is 0, `construct` returns the sum,
        which is 0 unless labels of weight 0 have terms, as with smoothing. The sum is then added to
        that of the other batches, so that a batch in parts has the same mean as the whole batch.
        """
        del output, target
        return None

    def classes(self, output: TensorType) -> int | None:
        """Return the number of classes for such an output; None if targets are not labels.

        A graph refuses a label out of range only when it runs, without naming the sample, so
        callers that feed labels check them against this number first.
        """
        return None


def accuracy(logits: ops.Tensor, labels: ops.Tensor) -> ops.Tensor:
    """Return the share of labels at the position of the largest logit, the first one in ties."""
    return (ops.argmax(logits) == labels.cast("int64")).cast(logits.dtype).mean()


def binary_accuracy(logits: ops.Tensor, targets: ops.Tensor) -> ops.Tensor:
    """Return the share of targets on the same side of 0.5 as sigmoid(logit)."""
    return ((logits > 0.0) == (targets > 0.5)).cast(logits.dtype).mean()


@dataclass(frozen=True)
class _AccuracyWithout:
    """`accuracy` over the labels that are not `ignored`; 0 if there are none."""

    ignored: int

    def __call__(self, logits: ops.Tensor, labels: ops.Tensor) -> ops.Tensor:
        labels = labels.cast("int64")
        counted = (labels != self.ignored).cast(logits.dtype)
        hits = (ops.argmax(logits) == labels).cast(logits.dtype)
        return _mean(hits * counted, counted)

    def counted(self, logits: ops.Tensor, labels: ops.Tensor) -> ops.Tensor:
        """Return the number of labels that count."""
        return (labels.cast("int64") != self.ignored).cast(logits.dtype).sum()


class _OfLabels(Loss):
    """A mean over labels, each with a factor, some possibly ignored."""

    targets = "classes"

    def __init__(self, weight: ArrayLike | None, ignored: int | None) -> None:
        super().__init__()
        self.weight = None if weight is None else np.asarray(weight, np.float32)
        self.ignored = ignored

    def metrics(self) -> Mapping[str, Metric]:
        """Return `accuracy` over the labels that count."""
        if self.ignored is None:
            return {"accuracy": accuracy}
        return {"accuracy": _AccuracyWithout(self.ignored)}

    def classes(self, output: TensorType) -> int | None:
        """Return the size of the last axis."""
        last = output.shape[-1] if output.rank else None
        return last if isinstance(last, int) else None

    def counted(self, output: ops.Tensor, target: ops.Tensor) -> ops.Tensor | None:
        """Return the sum of the factors of the labels that count."""
        if self.weight is None and self.ignored is None:
            return None
        counted = self.each(output, target)[1]
        return None if counted is None else counted.sum()

    def construct(self, output: ops.Tensor, labels: ops.Tensor) -> ops.Tensor:
        """See the class."""
        _whole_labels(type(self).__name__, labels)
        return _mean(*self.each(output, labels))

    def each(self, output: ops.Tensor, labels: ops.Tensor) -> tuple[ops.Tensor, ops.Tensor | None]:
        """Return the loss of each label and its factor; None where all factors are 1."""
        raise NotImplementedError


class SoftmaxCrossEntropy(_OfLabels):
    """Mean of -log softmax(logits)[label]; logits: (..., C), labels: (...) ints in 0..C-1.

    weight: (C,), a factor for each class; the mean divides by the sum of the labels' factors. A
    label equal to `ignore_index` is left out; if no label counts, the mean is 0.
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
        super().__init__(weight, ignore_index)
        self.label_smoothing = label_smoothing

    def each(self, output: ops.Tensor, labels: ops.Tensor) -> tuple[ops.Tensor, ops.Tensor | None]:
        """See `_OfLabels`."""
        weight = _weight_like(self.weight, output)
        return weighted_cross_entropy(output, labels, weight, self.ignored, self.label_smoothing)


class NegativeLogLikelihood(_OfLabels):
    """Mean of -log p[label]; log_p: (..., C) logarithms of probabilities, labels: (...) ints.

    `weight` and `ignore_index` as those of `SoftmaxCrossEntropy`.
    """

    output = "log_p"

    def __init__(self, *, weight: ArrayLike | None = None, ignore_index: int | None = None) -> None:
        super().__init__(weight, ignore_index)

    def each(self, output: ops.Tensor, labels: ops.Tensor) -> tuple[ops.Tensor, ops.Tensor | None]:
        """See `_OfLabels`."""
        weight = _weight_like(self.weight, output)
        return likelihood(output, labels, weight, self.ignored, output.rank - 1)


class BinaryCrossEntropy(Loss):
    """Mean cross entropy of sigmoid(logits) with targets in [0, 1] of the same shape.

    positive_weight: a factor for the term of the positive class, or one per last axis.
    """

    output = "logits"
    targets = "shares"

    def __init__(self, *, positive_weight: ArrayLike | None = None) -> None:
        super().__init__()
        weight = positive_weight
        self.positive_weight = None if weight is None else np.asarray(weight, np.float32)

    def metrics(self) -> Mapping[str, Metric]:
        """Return `accuracy`."""
        return {"accuracy": binary_accuracy}

    def construct(self, logits: ops.Tensor, targets: ops.Tensor) -> ops.Tensor:
        """See the class."""
        _same_shape("BinaryCrossEntropy", logits, targets)
        weight = _weight_like(self.positive_weight, logits)
        targets = targets.cast(logits.dtype)
        return ops.binary_cross_entropy(logits, targets, positive_weight=weight).mean()


class MSE(Loss):
    """Mean of (y - target)^2 over all elements; both of one shape."""

    targets = "numbers"

    def construct(self, y: ops.Tensor, target: ops.Tensor) -> ops.Tensor:
        """See the class."""
        _same_shape("MSE", y, target)
        error = y - target.cast(y.dtype)
        return (error * error).mean()


class L1(Loss):
    """Mean of |y - target| over all elements; both of one shape."""

    targets = "numbers"

    def construct(self, y: ops.Tensor, target: ops.Tensor) -> ops.Tensor:
        """See the class."""
        _same_shape("L1", y, target)
        return ops.abs_(y - target.cast(y.dtype)).mean()


class Huber(Loss):
    """Mean of e^2 / 2 where |e| <= delta, else delta (|e| - delta / 2); e = y - target."""

    targets = "numbers"

    def __init__(self, *, delta: float = 1.0) -> None:
        super().__init__()
        self.delta = delta

    def construct(self, y: ops.Tensor, target: ops.Tensor) -> ops.Tensor:
        """See the class."""
        _same_shape("Huber", y, target)
        return ops.huber(y, target.cast(y.dtype), delta=self.delta).mean()


class SmoothL1(Loss):
    """Mean of e^2 / (2 beta) where |e| < beta, else |e| - beta / 2; e = y - target."""

    targets = "numbers"

    def __init__(self, *, beta: float = 1.0) -> None:
        super().__init__()
        self.beta = beta

    def construct(self, y: ops.Tensor, target: ops.Tensor) -> ops.Tensor:
        """See the class."""
        _same_shape("SmoothL1", y, target)
        return ops.smooth_l1(y, target.cast(y.dtype), beta=self.beta).mean()


class KLDivergence(Loss):
    """Sum of p (log p - log q) for each sample, averaged over the batch.

    log_q: (N, ...) logarithms of the model's probabilities, p: target probabilities of that shape.
    """

    output = "log_q"

    def construct(self, log_q: ops.Tensor, p: ops.Tensor) -> ops.Tensor:
        """See the class."""
        _same_shape("KLDivergence", log_q, p)
        each = ops.kl_divergence(log_q, p.cast(log_q.dtype))
        return (each.sum([*range(1, each.rank)]) if each.rank > 1 else each).mean()


class CosineEmbedding(Loss):
    """Mean over pairs of 1 - cos(a, b) where same is 1, max(0, cos(a, b) - margin) where it is -1.

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
    """Mean over the batch of `ops.ctc` of each sequence, divided by its number of labels.

    log_p: (N, T, C) logarithms of probabilities; labels: (N, L) ints, padded at the end with -1.
    """

    output = "log_p"

    def __init__(self, *, blank: int = 0) -> None:
        super().__init__()
        self.blank = blank

    def construct(self, log_p: ops.Tensor, labels: ops.Tensor) -> ops.Tensor:
        """See the class."""
        _whole_labels("CTC", labels)
        # Padding is -1, so the labels of a sequence are those that are not negative.
        lengths = (labels.cast("int64") >= 0).cast("int64").sum([1])
        each = ops.ctc(log_p, labels, lengths, blank=self.blank)
        return (each / ops.maximum(lengths, 1).cast(each.dtype)).mean()


def _mean(each: ops.Tensor, counted: ops.Tensor | None) -> ops.Tensor:
    """Return the mean weighted by `counted`; the sum where all are 0, see `Loss.counted`."""
    if counted is None:
        return each.mean()
    total = counted.sum()
    # The divisor is replaced, not the quotient: 0 / 0 would be NaN in the gradient as well, even if
    # `where` selected the other value afterwards.
    return each.sum() / ops.where(total == 0.0, 1.0, total)


def _weight_like(weight: ArrayLike | None, like: ops.Tensor) -> ops.Tensor | None:
    return None if weight is None else ops.constant(weight, like.dtype)


def _whole_labels(name: str, labels: ops.Tensor) -> None:
    if labels.dtype.is_float:
        raise ShapeError(
            f"{name} takes integer labels, got {labels.type}; "
            "use MSE for real numbers, BinaryCrossEntropy for targets in [0, 1]"
        )


def _same_shape(name: str, y: ops.Tensor, target: ops.Tensor) -> None:
    if y.shape != target.shape:
        raise ShapeError(
            f"{name} takes an output and a target of one shape, got {y.type} and {target.type}; "
            "broadcasting here would average over pairs that do not belong together"
        )
