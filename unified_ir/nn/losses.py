"""Losses: a mean over the batch, however large it is, and what goes with each.

A loss also says what the model's output is called when it is exported, and which metrics make sense
beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

from triplane.unified_ir import ops
from triplane.unified_ir.frontend.cell import Cell
from triplane.unified_ir.ir.types import ShapeError, TensorType

Metric = Callable[[ops.Tensor, ops.Tensor], ops.Tensor]
"""(output, target) -> a scalar, the mean over the batch."""


class Loss(Cell):
    """`construct(output, target)` gives a scalar, the mean over the batch."""

    output: ClassVar[str] = "y"
    """Name of the model's output in exported functions."""

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
    """Mean of -log softmax(logits)[label]; logits: (..., C), labels: (...) ints in 0..C-1."""

    output = "logits"

    def metrics(self) -> Mapping[str, Metric]:
        """`accuracy`."""
        return {"accuracy": accuracy}

    def classes(self, output: TensorType) -> int | None:
        """The size of the last axis."""
        last = output.shape[-1] if output.rank else None
        return last if isinstance(last, int) else None

    def construct(self, logits: ops.Tensor, labels: ops.Tensor) -> ops.Tensor:
        """See the class."""
        if labels.dtype.is_float:
            raise ShapeError(
                f"SoftmaxCrossEntropy takes whole-number labels, got {labels.type}; "
                "for numbers use MSE, for yes-no targets BinaryCrossEntropy"
            )
        return ops.cross_entropy(logits, labels).mean()


class BinaryCrossEntropy(Loss):
    """Mean cross entropy of sigmoid(logits) with targets in [0, 1] of the same shape."""

    output = "logits"

    def metrics(self) -> Mapping[str, Metric]:
        """`accuracy`."""
        return {"accuracy": binary_accuracy}

    def construct(self, logits: ops.Tensor, targets: ops.Tensor) -> ops.Tensor:
        """See the class."""
        _same_shape("BinaryCrossEntropy", logits, targets)
        return ops.binary_cross_entropy(logits, targets.cast(logits.dtype)).mean()


class MSE(Loss):
    """Mean of (y - target)^2 over all elements; both of one shape."""

    def construct(self, y: ops.Tensor, target: ops.Tensor) -> ops.Tensor:
        """See the class."""
        _same_shape("MSE", y, target)
        error = y - target.cast(y.dtype)
        return (error * error).mean()


def _same_shape(name: str, y: ops.Tensor, target: ops.Tensor) -> None:
    if y.shape != target.shape:
        raise ShapeError(
            f"{name} takes an output and a target of one shape, got {y.type} and {target.type}; "
            "broadcasting here would average over pairs that do not belong together"
        )
