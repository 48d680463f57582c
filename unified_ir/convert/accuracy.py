"""Accuracy before and after a conversion: the share of samples with the right largest output."""

from __future__ import annotations

import numpy as np

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.convert.report import Accuracy
from triplane.unified_ir.ir.graph import Array
from triplane.unified_ir.quantize import Frozen, Samples, batches
from triplane.unified_ir.runtime import Session


def measure_accuracy(
    frozen: Frozen, before: Session, after: Session, samples: Samples, y: Array
) -> Accuracy:
    """Compare two sessions on labelled samples, batch by batch.

    The first result must be (N, classes) floating point, y within 0..classes-1.
    """
    name, type_ = frozen.function.result_names[0], frozen.function.results[0].type
    classes = type_.shape[-1] if type_.rank == 2 else None
    if not isinstance(classes, int) or not type_.dtype.is_float:
        raise InvalidInput(f"accuracy needs a result (N, classes) of scores, {name!r} is {type_}")
    if y.min() < 0 or y.max() >= classes:
        raise InvalidInput(
            f"{name!r} scores classes 0..{classes - 1}, but labels are {y.min()}..{y.max()}"
        )
    old, new = (
        np.concatenate([s.run(b, (name,))[name].argmax(-1) for b in batches(frozen, samples)])
        for s in (before, after)
    )
    return Accuracy(
        samples=len(y),
        before=float((old == y).mean()),
        after=float((new == y).mean()),
        agreement=float((old == new).mean()),
    )
