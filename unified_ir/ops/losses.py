"""Losses and summaries: functions of rows, not rows."""

from __future__ import annotations

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.ir.types import ShapeError, int64
from triplane.unified_ir.ops.elementwise import softplus
from triplane.unified_ir.ops.indexing import gather_elements
from triplane.unified_ir.ops.matrix import log_softmax
from triplane.unified_ir.ops.recorder import recorder
from triplane.unified_ir.ops.structure import stop_gradient, unsqueeze, where
from triplane.unified_ir.ops.tensor import Tensor

SUMMARY = "summary/"
"""Prefix of the results that summaries add."""

NO_LABEL = -(2**31)
"""Counted from the end, too, no position of any axis."""


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Per-sample cross entropy; logits: (B, C), labels: (B,) ints in 0..C-1 -> (B,).

    Any other label is refused when the graph runs (InvalidInput), on every engine. A label that
    shall not count is masked by the caller: give 0 for it and multiply its loss by 0.
    """
    if logits.rank != labels.rank + 1 or logits.shape[:-1] != labels.shape:
        raise ShapeError(
            f"cross_entropy takes logits (B, C) and labels (B,), got {logits.type}, {labels.type}"
        )
    labels = labels.cast(int64)
    index = where(labels < 0, NO_LABEL, labels)  # else -1 would be the last class
    picked = gather_elements(log_softmax(logits), unsqueeze(index, -1), axis=-1)
    return -picked.reshape(labels.shape)


def binary_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Elementwise cross entropy of sigmoid(logits) with targets in [0, 1], stable for any logit."""
    return softplus(logits) - logits * targets


def scalar_summary(name: str, x: Tensor) -> None:
    """Makes the scalar `x` the extra result `summary/NAME` of the function being recorded."""
    if x.rank:
        raise InvalidInput(f"scalar_summary({name!r}) takes a scalar, got {x.type}; reduce it")
    recorder().effect(SUMMARY + name, stop_gradient(x))
