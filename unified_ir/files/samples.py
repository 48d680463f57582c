"""Rules for samples, checked in one place for training and for a node's own samples."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from triplane.proto.errors import InvalidInput

COUNTED: Final = "counted/"
"""Prefix of the result that holds the divisor of a mean that does not divide by the rows."""
IGNORED: Final = "ignored"
"""Key of a module's meta with the label that the loss of its training leaves out."""
MAX_CLASSES: Final = 10_000
"""Limit for classes of any dataset; a model usually distinguishes fewer."""


def check_finite(x: npt.NDArray[Any], name: str, *, what: str) -> None:
    """Refuse NaN and infinity, naming position and value. what: the user's word for elements."""
    if x.dtype.kind not in "fc":
        return
    finite = np.isfinite(x)
    if not finite.all():
        at = tuple(map(int, np.unravel_index(int(finite.argmin()), x.shape)))
        raise InvalidInput(
            f"{what} must be finite; {name} holds NaN or infinity, first in sample {at[0]}: "
            f"{name}[{', '.join(map(str, at))}] is {x[at]}"
        )


def check_classes(
    labels: npt.NDArray[Any],
    classes: int,
    giver: str,
    where: str,
    *,
    numbers: Sequence[int] | npt.NDArray[Any] | None = None,
    ignored: int | None = None,
) -> None:
    """Refuse labels that are not in 0..classes-1, except `ignored`, naming position and value.

    giver: what determines the classes, as in "Net gives 10 logits". where: names the sample by its
    number, as in "row {} of the batch"; numbers: those of the samples, from 0 if None.
    """
    if not labels.size:
        return
    # The fast path of every training step: two passes without temporary arrays.
    low, high = np.minimum.reduce(labels, axis=None), np.maximum.reduce(labels, axis=None)
    if low >= 0 and high < classes:
        return
    bad = (labels < 0) | (labels >= classes)
    if ignored is not None:
        bad &= labels != ignored
    if bad.any():
        at = tuple(np.argwhere(bad)[0])
        number = at[0] if numbers is None else numbers[at[0]]
        raise InvalidInput(
            f"{giver}, so labels are 0..{classes - 1}, got {low}..{high}; the first one out of "
            f"range is {labels[at]}, {where.format(number)}"
        )


def transpose_hint(shape: Sequence[Any], expected: Sequence[Any]) -> str:
    """Return how to transpose x: (N, ..., C) where (N, C, ...) is expected, "" if that is not it.

    shape, expected: with the axis of samples; sizes of `expected` that are not numbers fit any.
    """
    if not len(shape) == len(expected) >= 3 or shape[1] == expected[1]:
        return ""
    axes = (0, len(shape) - 1, *range(1, len(shape) - 1))
    sizes = zip([shape[k] for k in axes[1:]], expected[1:], strict=True)
    if not isinstance(expected[1], int) or any(isinstance(e, int) and n != e for n, e in sizes):
        return ""
    return (
        "; its channels are the last axis and must be the first one of each sample: "
        f"x.transpose{axes}"
    )


def check_labels(y: npt.NDArray[Any], labels: Sequence[str]) -> None:
    """Refuse classes without a name, naming the first sample."""
    if y.dtype.kind not in "iu" or y.ndim != 1:
        raise InvalidInput(f"labels must be whole numbers, one per sample, got {y.dtype}{y.shape}")
    if len(labels) > MAX_CLASSES:
        raise InvalidInput(f"there are {len(labels)} labels; at most {MAX_CLASSES} are supported")
    bad = (y < 0) | (y >= len(labels))
    if bad.any():
        at = int(bad.argmax())
        raise InvalidInput(
            f"class {y[at]} of sample {at} has no name; there are {len(labels)} labels"
        )
