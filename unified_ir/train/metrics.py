"""Metrics beside the loss: means, and tallies for metrics that are not means of batches.

A mean is a function (output, target) -> scalar. Over an epoch, the values of the batches are
weighted by their rows, which is exact for a mean over samples, or by the method `counted`. A
`Tally` counts inside the graph; its counts are summed over all batches, and the number is computed
from the sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.proto.suggestions import check_choice
from triplane.unified_ir import ops
from triplane.unified_ir.ir.graph import Array
from triplane.unified_ir.ir.types import ShapeError
from triplane.unified_ir.nn.losses import Metric, accuracy, binary_accuracy
from triplane.unified_ir.ops.tensor import Tensor

Average = Literal["macro", "micro", "positive"]
AVERAGES: Final[tuple[str, ...]] = get_args(Average)


class Tally:
    """Counts of one batch, and the number that is computed from their sum over all batches."""

    def count(self, output: Tensor, target: Tensor) -> Tensor:
        """Record counts of any shape in the graph under construction."""
        raise NotImplementedError

    def finish(self, total: Array) -> float:
        """Return the number for `total`: float64, the sum of all counts."""
        raise NotImplementedError


Metrics = Mapping[str, Metric | Tally | str] | Sequence[str]
"""Metrics of a trainer: each under its name, as itself or as a name of `BY_NAME`."""


@dataclass(frozen=True)
class TopK:
    """Share of labels among the `k` largest logits; ties go to the first, as in `nn.accuracy`."""

    k: int

    def __post_init__(self) -> None:
        if self.k < 1:
            raise InvalidInput(f"TopK needs k >= 1, got {self.k}")

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """logits: (..., C), labels: (...) whole numbers."""
        classes = _classes(logits)
        index = ops.unsqueeze(labels.cast("int64"), -1)
        own = ops.gather_elements(logits, index, axis=-1)
        # The rank of the label's logit is the number of logits ahead of it: no sort, and ties have
        # a defined order.
        before = np.arange(classes) < index
        ahead = ops.logical_or(logits > own, ops.logical_and(logits == own, before))
        rank = ahead.cast("float32").sum([-1])
        return (rank < float(self.k)).cast("float32").mean()


def mean_absolute_error(y: Tensor, target: Tensor) -> Tensor:
    """Return the mean of |y - target| over all elements."""
    return ops.abs_(_difference(y, target)).mean()


def mean_squared_error(y: Tensor, target: Tensor) -> Tensor:
    """Return the mean of (y - target)^2 over all elements."""
    error = _difference(y, target)
    return (error * error).mean()


@dataclass(frozen=True)
class RMSE(Tally):
    """Root of the mean of (y - target)^2 over all elements; both of one shape."""

    def count(self, output: Tensor, target: Tensor) -> Tensor:
        """Return [sum of squares, number of elements]."""
        error = _difference(output, target)
        squares = error * error
        return ops.stack([squares.sum(), (squares * 0.0 + 1.0).sum()])

    def finish(self, total: Array) -> float:
        """See `Tally`."""
        return math.sqrt(total[0] / total[1])


@dataclass(frozen=True)
class R2(Tally):
    """Coefficient of determination, 1 - sum (y - t)^2 / sum (t - mean t)^2, averaged over outputs.

    An output whose targets are all equal counts 1 if every prediction is right, else 0.
    """

    def count(self, output: Tensor, target: Tensor) -> Tensor:
        """Return (4, ...): sums over the rows of 1, t, t^2 and (y - t)^2."""
        # In float64: the variance is a difference of sums that may be close to each other.
        y, t = output.cast("float64"), target.cast("float64")
        error = _difference(y, t)
        return ops.stack([x.sum([0]) for x in (t * 0.0 + 1.0, t, t * t, error * error)])

    def finish(self, total: Array) -> float:
        """See `Tally`."""
        n, sums, squares, errors = total
        spread = squares - sums**2 / n
        varies = spread > squares * _ROUNDING
        ratio = errors / np.where(varies, spread, 1.0)
        return float(np.mean(np.where(varies, 1.0 - ratio, errors == 0)))


_ROUNDING = 1e-12
"""Share of sum t^2 below which the spread of float64 sums is rounding alone."""


def _difference(y: Tensor, target: Tensor) -> Tensor:
    if y.shape != target.shape:
        raise ShapeError(
            f"the output and the target must have one shape, got {y.type} and {target.type}"
        )
    return y - target.cast(y.dtype)


@dataclass(frozen=True)
class Perplexity(Tally):
    """exp of the mean cross entropy over all labels but `ignore_index`; logits: (..., C)."""

    ignore_index: int | None = None

    def count(self, output: Tensor, target: Tensor) -> Tensor:
        """Return [sum of cross entropies, number of labels]."""
        each = ops.cross_entropy(output, target, ignore_index=self.ignore_index)
        counts = each * 0.0 + 1.0
        if self.ignore_index is not None:
            counts = (target != self.ignore_index).cast(each.dtype)
        return ops.stack([each.sum(), counts.sum()])

    def finish(self, total: Array) -> float:
        """See `Tally`."""
        # math.exp raises OverflowError above that limit.
        mean = float(total[0] / total[1])
        return math.exp(mean) if mean < math.log(np.finfo(np.float64).max) else math.inf


@dataclass(frozen=True)
class Confusion(Tally):
    """(C, C) counts: rows are true classes, columns are predicted classes.

    output: logits (..., C) with labels (...), or binary logits of the target's shape, where C = 2.
    Labels beyond the classes are not counted. The number is the accuracy.
    """

    def count(self, output: Tensor, target: Tensor) -> Tensor:
        """See the class; exact below 2^24 in one batch."""
        if output.shape == target.shape:
            predicted, true, classes = output > 0.0, target.cast("float32") > 0.5, 2
        else:
            classes = _classes(output)
            predicted, true = ops.argmax(output), target
        # matrix = onehot(true)^T onehot(predicted); a label out of range is a row of zeros
        rows = ops.one_hot(true.cast("int64").reshape(-1), classes)
        return rows.transpose() @ ops.one_hot(predicted.cast("int64").reshape(-1), classes)

    def finish(self, total: Array) -> float:
        """See `Tally`."""
        return float(np.trace(total) / total.sum())


@dataclass(frozen=True)
class _ByClass(Confusion):
    """A ratio for each class, averaged.

    average: over the classes that occur ("macro"), over all counts together ("micro"), or only the
    last class ("positive"). A ratio of 0 to 0 is 0.
    """

    average: Average = "macro"

    def __post_init__(self) -> None:
        check_choice(f"{type(self).__name__}'s average", self.average, AVERAGES)

    def finish(self, total: Array) -> float:
        """See `Tally`."""
        hits, predicted, true = np.diag(total), total.sum(0), total.sum(1)
        if self.average == "micro":
            return self.ratio(hits.sum(), predicted.sum(), true.sum())
        each = [self.ratio(*x) for x in zip(hits, predicted, true, strict=True)]
        if self.average == "positive":
            return each[-1]
        return float(np.mean([x for x, a, b in zip(each, predicted, true, strict=True) if a + b]))

    def ratio(self, hits: float, predicted: float, true: float) -> float:
        """Return the ratio for numbers of hits, of predictions and of true samples of a class."""
        raise NotImplementedError


@dataclass(frozen=True)
class Precision(_ByClass):
    """Share of the predictions of a class that are right."""

    def ratio(self, hits: float, predicted: float, true: float) -> float:
        """See the class."""
        return float(hits / predicted) if predicted else 0.0


@dataclass(frozen=True)
class Recall(_ByClass):
    """Share of the samples of a class that are predicted as that class."""

    def ratio(self, hits: float, predicted: float, true: float) -> float:
        """See the class."""
        return float(hits / true) if true else 0.0


@dataclass(frozen=True)
class F1(_ByClass):
    """2 hits / (predicted + true): the harmonic mean of precision and recall."""

    def ratio(self, hits: float, predicted: float, true: float) -> float:
        """See the class."""
        return float(2 * hits / (predicted + true)) if predicted + true else 0.0


def _classes(logits: Tensor) -> int:
    last = logits.shape[-1] if logits.rank else None
    if not isinstance(last, int):
        raise ShapeError(
            f"the last axis of logits counts the classes and needs a fixed size, got {logits.type}"
        )
    return last


BY_NAME: Final[Mapping[str, Mapping[str, Metric | Tally]]] = {
    "accuracy": {"classes": accuracy, "shares": binary_accuracy},
    "top5": {"classes": TopK(5)},
    "precision": dict.fromkeys(("classes", "shares"), Precision()),
    "recall": dict.fromkeys(("classes", "shares"), Recall()),
    "f1": dict.fromkeys(("classes", "shares"), F1()),
    "perplexity": {"classes": Perplexity()},
    "mae": {"numbers": mean_absolute_error},
    "mse": {"numbers": mean_squared_error},
    "rmse": {"numbers": RMSE()},
    "r2": {"numbers": R2()},
}
"""Name -> the metric for each kind of target: classes, shares (0..1), or numbers."""


def metric_named(name: str, targets: str) -> Metric | Tally:
    """Return the metric of that name for targets of one kind; "" if the kind is not known."""
    check_choice("a metric given by its name", name, BY_NAME)
    rows = BY_NAME[name]
    if not targets and len(set(map(id, rows.values()))) == 1:
        return next(iter(rows.values()))
    if targets not in rows:
        fitting = ", ".join(k for k, row in BY_NAME.items() if targets in row)
        known = f"the targets of this loss are {targets}, for which there are {fitting}"
        unknown = "a loss of your own does not say which; give the function, such as nn.accuracy"
        raise InvalidInput(
            f"metric {name!r} measures {' or '.join(rows)}; {known if targets else unknown}"
        )
    return rows[targets]


def metrics_by_name(metrics: Metrics, targets: str) -> dict[str, Metric | Tally]:
    """Return a trainer's metrics with each text replaced by the metric that it names."""
    if isinstance(metrics, str) or not isinstance(metrics, (Mapping, Sequence)):
        raise InvalidInput(
            f"metrics is a dict of metrics by name, or a list of names, got {metrics!r:.80}"
        )
    pairs: Any = metrics.items() if isinstance(metrics, Mapping) else [(m, m) for m in metrics]
    if odd := [label for label, _ in pairs if not isinstance(label, str)]:
        raise InvalidInput(
            "metrics is a dict of metrics by name, or a list of names; a metric of its own needs a "
            f'name: metrics={{"NAME": ...}}, got {odd[0]!r:.80} in place of one'
        )
    chosen = {label: metric_named(m, targets) if isinstance(m, str) else m for label, m in pairs}
    for label, metric in chosen.items():
        if isinstance(metric, type):
            raise InvalidInput(
                f"metric {label!r} is the class {metric.__name__}; give an instance: "
                f"{metric.__name__}(...)"
            )
        if not (callable(metric) or isinstance(metric, Tally)):
            raise InvalidInput(
                "a metric is a function of (output, target), a train.Tally, or one of "
                f"{', '.join(BY_NAME)}, under its name; got {metric!r:.80} under {label!r:.80}"
            )
    return chosen
